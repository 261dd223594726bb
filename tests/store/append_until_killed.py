"""Run as a program: appends to a log and prints each acknowledged batch, until it is killed."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from datagen_ray.store.writer import ShardOwner, WriterOptions
from tests.store.writer_support import batch


def main(uri: str, prefix: str, broken_wal: str) -> None:
    wal = uri_wal(uri)

    def mend() -> None:
        if os.path.isfile(wal):
            os.unlink(wal)
            os.rename(f"{wal}-aside", wal)

    options = WriterOptions(reopen_pause_s=0.001)
    owner = ShardOwner.claim(uri, "slot", options=options, before_reopen=mend)

    def append(number: int) -> None:
        name = f"{prefix}{number}"
        owner.submit(batch(name, rows=1 + number % 5)).result()
        os.write(1, f"{name} {1 + number % 5}\n".encode())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(20)))
        while broken_wal == "for ever":
            first = 20 + 20 * owner.statistics().appends
            list(pool.map(append, range(first, first + 20)))
        if broken_wal == "break":
            os.rename(wal, f"{wal}-aside")
            os.close(os.open(wal, os.O_CREAT))
        list(pool.map(append, range(20, 40)))
        owner.flush()
        list(pool.map(append, range(40, 60)))
    owner.close()


def uri_wal(uri: str) -> str:
    from datagen_ray.store import layout

    return f"{uri}/{layout.wal_folder(layout.shard_uuid('slot'))}"


if __name__ == "__main__":
    main(*sys.argv[1:])
