"""Durable checkpoints a second: one caller, and 256 at once, beside two rivals and the limits.

A checkpoint is two string fields of 120 characters and a STEP_COMPLETED: three rows. Every caller
waits for its checkpoint to be durable before it brings the next. The events are composed before the
clock starts, for us and for lance-context alike; composing checks them. fsync is on for us, for
dbos and for the limits; lance-context does none.

The rivals:

- lance-context writes the same rows, given as dicts. Its store refuses a second caller.
- dbos records what a step returned, before its workflow goes on: here a list of the same two
  strings, in its SQLite database, which syncs every commit. One process and one event loop, each
  caller a workflow of async steps; starting and ending the workflows is not counted. The rest is
  as dbos comes: it makes its statements in the threads of the loop, and SQLite has one writer.

The limits:

- A bare Lance ``ShardWriter``: pre-encoded batches, of one checkpoint and of 256, and an fsync of
  the new WAL file and its folder after each put.
- The floor: 256 coroutines that do nothing but await a future that another thread resolves, all
  that wait at once with one call. What Python takes for callers that wait, with nothing to write.

All are measured in turn, so that what else the machine does falls on both sides of a ratio.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import lance_context
from dbos import DBOS

from benchmarks.report import Report, arguments, ratio_of
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
LONE_DBOS_STEPS = 100
DBOS_STEPS_A_CALLER = 2
FIELD_CHARACTERS = 120
POSITION = DatagenStreamPosition("solve", DatagenStepKind.LEAF, 0, "main")
TEXTS = [letter * FIELD_CHARACTERS for letter in "ab"]


def checkpoints(item: str, count: int) -> list[list[DatagenEvent]]:
    """``count`` checkpoints of one item, each of three events."""
    stream = DatagenStreamWriter.open(item, run_id="bench", writer_epoch="bench:1")
    fields = [
        DatagenFieldUpdate(name, "set", DatagenValue.of(text), "str")
        for name, text in zip("xy", TEXTS, strict=True)
    ]
    return [stream.step_completed(POSITION, fields) for _ in range(count)]


def times_of(calls: int, call: Callable[[int], Any]) -> list[float]:
    """Seconds that each of so many calls took, one after the other."""
    times = []
    for number in range(calls):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return times


def lone(folder: Path) -> list[float]:
    """Seconds of each append of one caller."""
    batches = checkpoints("lone", LONE_CHECKPOINTS)
    with DatagenStore.open(str(folder / "log.lance")) as store:
        store.writer_epoch  # noqa: B018 - claims the shard before the clock starts
        return times_of(LONE_CHECKPOINTS, lambda n: store.append_checkpoint(batches[n]))


def concurrent(folder: Path) -> float:
    """Checkpoints a second of 256 callers."""
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


def bare(folder: Path, checkpoints_a_put: int, puts: int) -> list[float]:
    """Seconds of each put and fsync of a bare ShardWriter with pre-encoded batches."""
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

        def put(number: int) -> None:
            writer.put(batches[number])
            for name in set(os.listdir(wal)) - known:
                known.add(name)
                _fsync(f"{wal}/{name}")
            _fsync(wal)

        return times_of(puts, put)


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def floor() -> float:
    """Waits a second of 256 coroutines, each for a future that another thread resolves."""
    waiting: deque[asyncio.Future[None]] = deque()
    wake = threading.Event()
    left = CALLERS * CHECKPOINTS_A_CALLER

    def resolve(futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            future.set_result(None)

    def in_thread(loop: asyncio.AbstractEventLoop) -> None:
        nonlocal left
        while left:
            wake.wait()
            wake.clear()
            taken = [waiting.popleft() for _ in range(len(waiting))]
            left -= len(taken)
            if taken:
                loop.call_soon_threadsafe(resolve, taken)

    async def caller(loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(CHECKPOINTS_A_CALLER):
            future = loop.create_future()
            waiting.append(future)
            wake.set()
            await future

    async def all_callers() -> float:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=in_thread, args=(loop,))
        thread.start()
        start = time.perf_counter()
        await asyncio.gather(*(caller(loop) for _ in range(CALLERS)))
        took = time.perf_counter() - start
        thread.join()
        return CALLERS * CHECKPOINTS_A_CALLER / took

    return asyncio.run(all_callers())


def with_lance_context(folder: Path, threads: int) -> list[float]:
    """Seconds between the ends of the checkpoints of so many callers."""
    batches = [
        [event.to_dict() for event in batch]
        for n in range(threads)
        for batch in checkpoints(f"r{n}", max(1, RIVAL_CHECKPOINTS // threads))
    ]
    store: Any = lance_context.DatagenStore.open(str(folder / "log.lance"))
    turn = threading.Lock()

    def append(batch: list[dict[str, Any]]) -> float:
        # Its store refuses a second caller ("Already borrowed"), so the callers take turns.
        with turn:
            store.append_checkpoint(batch)
            return time.perf_counter()

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        ends = sorted(pool.map(append, batches))
    return [end - before for before, end in zip([start, *ends], ends, strict=False)]


def with_dbos(folder: Path, callers: int, steps: int) -> float:
    """Steps a second of so many workflows, each of so many steps, one after the other."""
    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder}/dbos.sqlite",
            "run_admin_server": False,
            "log_level": "WARNING",
        }
    )

    @DBOS.step()
    async def solve() -> list[str]:
        return TEXTS

    async def run() -> float:
        at_work, begun = 0, asyncio.Event()
        start = end = 0.0

        @DBOS.workflow()
        async def work() -> None:
            nonlocal at_work, start, end
            at_work += 1
            if at_work == callers:
                start = time.perf_counter()
                begun.set()
            await begun.wait()
            for _ in range(steps):
                await solve()
            end = time.perf_counter()

        DBOS.launch()
        await asyncio.gather(*(work() for _ in range(callers)))
        return callers * steps / (end - start)

    try:
        return asyncio.run(run())
    finally:
        DBOS.destroy(destroy_registry=True)


def rate(times: list[float], checkpoints_each: int = 1) -> float:
    """Checkpoints a second."""
    return checkpoints_each * len(times) / sum(times)


def main() -> None:
    options = arguments(__doc__ or "")
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:

        def fresh(name: str) -> Path:
            return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))

        def note(name: str, figure: float) -> None:
            figures.setdefault(name, []).append(figure)

        for _ in range(options.runs):
            one, limit = lone(fresh("lone")), bare(fresh("bare1"), 1, LONE_CHECKPOINTS)
            other = with_lance_context(fresh("other1"), 1)
            note("one", rate(one))
            note("one bare", rate(limit))
            note("one lance-context", rate(other))
            note("one dbos", with_dbos(fresh("dbos1"), 1, LONE_DBOS_STEPS))
            note("p50", median(one) * 1000)
            note("p50 bare", median(limit) * 1000)
            note("p50 lance-context", median(other) * 1000)
            note("many", concurrent(fresh("many")))
            note("many bare", rate(bare(fresh("bareN"), CALLERS, LIMIT_ENTRIES), CALLERS))
            note("many floor", floor())
            note("many lance-context", rate(with_lance_context(fresh("otherN"), CALLERS)))
            note("many dbos", with_dbos(fresh("dbosN"), CALLERS, DBOS_STEPS_A_CALLER))
    report = Report("append: durable checkpoints")

    def rows(ours: str, key: str, unit: str, beside: dict[str, str]) -> None:
        report.add(ours, median(figures[key]), unit)
        for name, what in beside.items():
            theirs = figures[f"{key} {name}"]
            report.add(
                f"  {what}",
                median(theirs),
                unit,
                against=ours,
                ratio=ratio_of(figures[key], theirs),
            )

    lance_row = {"lance-context": "lance-context"}
    dbos_row = {"dbos": "dbos, steps of workflows"}
    put_row = {"bare": "bare put + fsync"}
    rows("1 caller", "one", "checkpoints/s", put_row | lance_row | dbos_row)
    rows("p50 of one append", "p50", "ms", put_row | lance_row)
    limits = {"bare": "bare pre-encoded put + fsync", "floor": "floor: a wait for a thread"}
    rows(f"{CALLERS} callers", "many", "checkpoints/s", limits | lance_row | dbos_row)
    report.show(options.json)


if __name__ == "__main__":
    main()
