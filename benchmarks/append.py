"""Durable checkpoints a second: one caller, and 256 at once, beside lance-context and the limit.

A checkpoint is two string fields of 120 characters and a STEP_COMPLETED: three rows. Every caller
waits for its checkpoint to be durable before it brings the next. The events are composed before the
clock starts, for us and for lance-context alike. fsync is on for us and for the limit; the rival
does none. The limit is a bare Lance ``ShardWriter``: one pre-encoded batch of 256 checkpoints a
put, and an fsync of the new WAL file and its folder.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance_context

from benchmarks.report import Report, arguments, median_of
from datagen_ray import (
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenStepKind,
    DatagenStore,
    DatagenStreamPosition,
    DatagenStreamWriter,
    DatagenValue,
)
from datagen_ray.log.schema import encode_events
from datagen_ray.store.creation import create_log
from datagen_ray.store.layout import shard_uuid

CALLERS = 256
LONE_CHECKPOINTS = 300
CHECKPOINTS_A_CALLER = 40
LIMIT_ENTRIES = 40
RIVAL_CHECKPOINTS = 60
FIELD_CHARACTERS = 120
POSITION = DatagenStreamPosition("solve", DatagenStepKind.LEAF, 0, "main")


def checkpoints(item: str, count: int) -> list[list[DatagenEvent]]:
    """``count`` checkpoints of one item, each of three events."""
    stream = DatagenStreamWriter.open(item, run_id="bench", writer_epoch="bench:1")
    text = [DatagenValue.of(letter * FIELD_CHARACTERS) for letter in "ab"]
    fields = [
        DatagenFieldUpdate(name, "set", value, "str")
        for name, value in zip("xy", text, strict=True)
    ]
    return [stream.step_completed(POSITION, fields) for _ in range(count)]


def lone(folder: Path) -> float:
    batches = checkpoints("lone", LONE_CHECKPOINTS)
    with DatagenStore.open(str(folder / "log.lance")) as store:
        store.writer_epoch  # noqa: B018 - claims the shard before the clock starts
        start = time.perf_counter()
        for batch in batches:
            store.append_checkpoint(batch)
        return LONE_CHECKPOINTS / (time.perf_counter() - start)


def concurrent(folder: Path) -> float:
    work = [checkpoints(f"c{n}", CHECKPOINTS_A_CALLER) for n in range(CALLERS)]

    async def caller(store: DatagenStore, batches: list[list[DatagenEvent]]) -> None:
        for batch in batches:
            await store.append_checkpoint_async(batch)

    async def all_callers(store: DatagenStore) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(caller(store, batches) for batches in work))
        return CALLERS * CHECKPOINTS_A_CALLER / (time.perf_counter() - start)

    with DatagenStore.open(str(folder / "log.lance")) as store:
        store.writer_epoch  # noqa: B018 - as above
        return asyncio.run(all_callers(store))


def bare(folder: Path, checkpoints_a_put: int, puts: int) -> float:
    """Checkpoints a second of a bare ShardWriter with pre-encoded batches, fsynced."""
    uri = str(folder / "log.lance")
    dataset = create_log(uri)
    shard = shard_uuid("default")
    batches = [
        encode_events([e for batch in checkpoints(f"b{n}", checkpoints_a_put) for e in batch])
        for n in range(puts)
    ]
    wal = f"{uri}/_mem_wal/{shard}/wal"
    with dataset.mem_wal_writer(shard, max_wal_flush_interval_ms=1) as writer:
        known = set(os.listdir(wal)) if os.path.isdir(wal) else set()
        start = time.perf_counter()
        for batch in batches:
            writer.put(batch)
            for name in set(os.listdir(wal)) - known:
                known.add(name)
                _fsync(f"{wal}/{name}")
            _fsync(wal)
        return checkpoints_a_put * puts / (time.perf_counter() - start)


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rival(folder: Path, threads: int) -> float:
    batches = [
        [event.to_dict() for event in batch]
        for n in range(threads)
        for batch in checkpoints(f"r{n}", max(1, RIVAL_CHECKPOINTS // threads))
    ]
    store: Any = lance_context.DatagenStore.open(str(folder / "log.lance"))
    turn = threading.Lock()

    def append(batch: list[dict[str, Any]]) -> None:
        # Its store refuses a second caller ("Already borrowed"), so the callers take turns.
        with turn:
            store.append_checkpoint(batch)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(append, batches))
    return len(batches) / (time.perf_counter() - start)


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("append: durable checkpoints/s")
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:

        def fresh(name: str, run: int) -> Path:
            folder = Path(scratch) / f"{name}-{run}"
            folder.mkdir()
            return folder

        runs = options.runs
        one = median_of(runs, lambda run: lone(fresh("lone", run)))
        many = median_of(runs, lambda run: concurrent(fresh("many", run)))
        bare_one = median_of(runs, lambda run: bare(fresh("bare1", run), 1, LONE_CHECKPOINTS))
        bare_many = median_of(runs, lambda run: bare(fresh("bareN", run), CALLERS, LIMIT_ENTRIES))
        rival_one = median_of(runs, lambda run: rival(fresh("rival1", run), 1))
        rival_many = median_of(runs, lambda run: rival(fresh("rivalN", run), CALLERS))
    unit = "checkpoints/s"
    report.add("1 caller", one, unit)
    report.add("  bare put + fsync", bare_one, unit, against="1 caller", ratio=one / bare_one)
    report.add("  lance-context", rival_one, unit, against="1 caller", ratio=one / rival_one)
    report.add(f"{CALLERS} callers", many, unit)
    report.add(
        "  bare pre-encoded put + fsync",
        bare_many,
        unit,
        against=f"{CALLERS} callers",
        ratio=many / bare_many,
    )
    report.add(
        "  lance-context", rival_many, unit, against=f"{CALLERS} callers", ratio=many / rival_many
    )
    report.show(options.json)


if __name__ == "__main__":
    main()
