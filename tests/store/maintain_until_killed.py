"""Run as a program: appends and maintains a log, printing each acknowledged batch, until killed."""

from __future__ import annotations

import os
import random
import sys

from datagen_ray.store import layout
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import cleanup_old_versions, compact, refresh_indexes
from datagen_ray.store.merge import ShardMerger
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch

ROUNDS = 6


def main(uri: str, prefix: str) -> None:
    choose = random.Random(prefix)
    storage = LogStorage(uri)
    merger = ShardMerger(storage, layout.shard_uuid("slot"))
    owner = ShardOwner.claim(uri, "slot")
    number = 0
    for round_number in range(ROUNDS):
        for _ in range(choose.randint(1, 6)):
            name = f"{prefix}{number}"
            owner.submit(batch(name, rows=1 + number % 5)).result()
            os.write(1, f"{name} {1 + number % 5}\n".encode())
            number += 1
        owner.flush()
        merger.run()
        if round_number % 2:
            compact(storage)
            refresh_indexes(storage)
            cleanup_old_versions(storage, retention_s=0)
        collect_garbage(storage, grace_s=0, wal_retention_s=0)
    owner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
