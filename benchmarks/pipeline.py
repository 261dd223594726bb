"""Items a second through a pipeline, with the log and without, and slow steps beside their ideal.

What does the log cost? Three steps an item, 256 items in flight, run by the same executor once on
a log with fsync and once on a sink that acknowledges at once: with steps that do nothing, where the
log is most of the work, and with async steps that take 100 ms, as a call of a model does. For the
latter there are also the sleeps alone, in the same event loop, and the ideal, and it is seen that
no more than 256 of them run at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, arguments, ratio_of
from datagen_ray import DatagenEvent, DatagenStore, Pipeline, step
from datagen_ray.pipeline.executor import Executor, RootTask
from datagen_ray.pipeline.sink import EventSink

ITEMS = 3_000
IN_FLIGHT = 256
STEP_S = 0.1
SLOW_WAVES = 32


class NoLog:
    """A sink that acknowledges at once and keeps nothing."""

    writer_epoch = "none:1"

    def append_async(self, _: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


class NoBlobs:
    async def load(self, event_id: str) -> bytes:
        raise KeyError(event_id)


def quick_steps() -> Pipeline:
    async def nothing(_: Any) -> None: ...

    return Pipeline("bench", [step(name=name)(nothing) for name in ("one", "two", "three")])


def slow_steps() -> Pipeline:
    running = 0

    async def slow(_: Any) -> dict[str, Any]:
        nonlocal running
        running += 1
        if running > IN_FLIGHT:
            raise AssertionError(f"{running} steps at a time, of {IN_FLIGHT}")
        await asyncio.sleep(STEP_S)
        running -= 1
        return {"answer": "x" * 200}

    return Pipeline("bench", [step(name=name)(slow) for name in ("one", "two", "three")])


async def run_items(pipeline: Pipeline, sink: EventSink, count: int) -> float:
    """Items a second. More are at hand than may be in flight, as a driver sees to."""
    executor = Executor(
        pipeline, sink, run_id="bench", blobs=NoBlobs(), max_in_flight_roots=IN_FLIGHT
    )
    await executor.start()
    numbers = iter(range(count))

    async def runner() -> None:
        for number in numbers:
            result = await executor.run(RootTask(str(number), {"question": "why?"}))
            assert result.status == "completed", result.error

    start = time.perf_counter()
    await asyncio.gather(*(runner() for _ in range(2 * IN_FLIGHT)))
    took = time.perf_counter() - start
    await executor.close()
    return count / took


def with_log(folder: Path, pipeline: Pipeline, count: int) -> float:
    with DatagenStore.open(str(folder / "log.lance")) as store:
        store.writer_epoch  # noqa: B018 - claims the shard before the clock starts
        return asyncio.run(run_items(pipeline, store, count))


def without_log(pipeline: Pipeline, count: int) -> float:
    return asyncio.run(run_items(pipeline, NoLog(), count))


def bare_sleeps(count: int) -> float:
    """The limit that this machine allows: the sleeps alone, in the same event loop."""

    async def runner(numbers: Any) -> None:
        for _ in numbers:
            for _ in range(3):
                await asyncio.sleep(STEP_S)

    async def all_runners() -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(runner(numbers) for _ in range(IN_FLIGHT)))

    start = time.perf_counter()
    asyncio.run(all_runners())
    return count / (time.perf_counter() - start)


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("pipeline: items/s in one process, three steps an item, 256 in flight")
    slow_count = IN_FLIGHT * SLOW_WAVES
    ideal = IN_FLIGHT / (3 * STEP_S)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:

        def folder(name: str, run: int) -> Path:
            made = Path(scratch) / f"{name}-{run}"
            made.mkdir()
            return made

        warm_up(folder("warm", 0))
        quick, bare, slow, slow_bare, sleeps = [], [], [], [], []
        # Side by side, so that what else the machine does falls on both sides of a ratio.
        for run in range(options.runs):
            quick.append(with_log(folder("quick", run), quick_steps(), ITEMS))
            bare.append(without_log(quick_steps(), ITEMS))
            slow.append(with_log(folder("slow", run), slow_steps(), slow_count))
            slow_bare.append(without_log(slow_steps(), slow_count))
            sleeps.append(bare_sleeps(slow_count))
    with_over = "with the log"
    report.add("no-op steps, log with fsync", median(quick), "items/s")
    report.add(
        "  without the log", median(bare), "items/s", against=with_over, ratio=ratio_of(quick, bare)
    )
    report.add("100 ms steps, log with fsync", median(slow), "items/s")
    report.add(
        "  without the log",
        median(slow_bare),
        "items/s",
        against=with_over,
        ratio=ratio_of(slow, slow_bare),
    )
    report.add("  ideal", ideal, "items/s", against=with_over, ratio=median(slow) / ideal)
    report.add(
        "  bare sleeps", median(sleeps), "items/s", against=with_over, ratio=ratio_of(slow, sleeps)
    )
    report.show(options.json)


def warm_up(folder: Path) -> None:
    with_log(folder, quick_steps(), 200)


if __name__ == "__main__":
    main()
