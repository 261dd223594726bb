"""What Ray adds and what it scales to: workers, the log beside none, dispatch, a large restart.

Four questions, each of which ``--only`` asks alone:

- *scaling*: items a second with 1, 2, 4 and 8 workers and async steps of 100 ms, beside as many
  times the figure of one worker, from when all workers are at work. Each runs ``--in-flight``
  roots, by default few, so that the cores of a small machine are not what is measured.
- *log*: no-op steps on two workers with the log, beside the same actors with a sink that
  acknowledges at once and keeps nothing.
- *dispatch*: roots a second from the source to workers that end each root at once, by the real
  driver, on one event loop, without Ray and without a log.
- *restart*: a log with ``--roots`` roots, 90 % of them terminal; seconds from the start of the
  driver to the first root that is dispatched, and the peak of its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from datagen_ray import DatagenItemStatus, DatagenStore, Pipeline, step
from datagen_ray.clock import utc_now
from datagen_ray.cluster.actors import RayOptions
from datagen_ray.cluster.driver import Driver, DriverConfig
from datagen_ray.cluster.messages import (
    Assignment,
    Collected,
    Outcome,
    OutcomeStatus,
    RunCounts,
    WorkerReport,
    WorkerState,
)
from datagen_ray.cluster.run import LogStatuses, run
from datagen_ray.cluster.worker import POLL_S
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.sources import SourceRow

STEP_S = 0.1
IN_FLIGHT = 4
NO_LOG_VARIABLE = "DATAGEN_RAY_BENCH_NO_LOG"


class Stopwatch:
    """Times a run from when all its workers are at work, so that starting them is left out."""

    def __init__(self, workers: int, in_flight: int) -> None:
        self._waited_for = workers
        self._all_in_flight = workers * in_flight
        self._marks: list[tuple[float, int]] = []

    def phase(self, text: str) -> None:
        """Phases are not timed."""

    def note(self, text: str) -> None:
        self._waited_for -= " is ready as " in text

    def counts(self, counts: RunCounts) -> None:
        if self._waited_for <= 0:
            self._marks.append((time.perf_counter(), counts.ended))

    def items_a_second(self) -> float:
        """Over the middle of that, without the first wave of roots and the last."""
        first_of_all, last = self._marks[0][1], self._marks[-1][1]
        busy = [
            mark
            for mark in self._marks
            if first_of_all + self._all_in_flight <= mark[1] <= last - self._all_in_flight
        ]
        (began, first), (ended, final) = busy[0], busy[-1]
        return (final - first) / (ended - began)


def slow_steps() -> Pipeline:
    async def slow(_: Any) -> dict[str, Any]:
        await asyncio.sleep(STEP_S)
        return {"answer": "x" * 200}

    return Pipeline("bench", [step(name=name)(slow) for name in ("one", "two", "three")])


def quick_steps() -> Pipeline:
    async def nothing(_: Any) -> None: ...

    return Pipeline("bench", [step(name=name)(nothing) for name in ("one", "two", "three")])


def measured(folder: Path, pipeline: Pipeline, count: int, workers: int, in_flight: int) -> float:
    watch = Stopwatch(workers, in_flight)
    summary = run(
        pipeline,
        [{"n": n} for n in range(count)],
        root=folder,
        experiment=f"{workers}",
        workers=workers,
        concurrency=in_flight,
        listener=watch,
        maintainer=None,
        ray_options=RayOptions(temp_dir=os.environ.get("RAY_TMPDIR")),
        by_value=(sys.modules[__name__],),
    )
    assert summary.ok
    return watch.items_a_second()


def scaling(report: Report, folder: Path, seconds: float, in_flight: int) -> None:
    one = 0.0
    for workers in (1, 2, 4, 8):
        ideal = workers * in_flight / (3 * STEP_S)
        rate = measured(
            folder / f"scaling-{workers}",
            slow_steps(),
            # Workers start one after the other, and those that are there work meanwhile.
            int(ideal * (seconds + workers)),
            workers,
            in_flight,
        )
        one = one or rate
        report.add(
            f"{workers} worker(s), {in_flight} roots each, 3 steps of 100 ms",
            rate,
            "items/s",
            against=f"{workers} x one worker; ideal {ideal:,.0f}",
            ratio=rate / (one * workers),
        )


def log_cost(report: Report, folder: Path, count: int) -> None:
    """The sink without a log is chosen in the workers, by a variable that they inherit."""
    with_log = measured(folder / "log", quick_steps(), count, 2, 256)
    os.environ[NO_LOG_VARIABLE] = "1"
    try:
        without = measured(folder / "none", no_log(quick_steps()), count, 2, 256)
    finally:
        del os.environ[NO_LOG_VARIABLE]
    report.add("no-op steps, 2 workers, with the log", with_log, "items/s")
    report.add(
        "  the same actors without it", without, "items/s",
        against="with the log / without", ratio=with_log / without,
    )  # fmt: skip


class PipelineWithoutLog(Pipeline):
    """Loading it in a worker puts a sink that keeps nothing in the place of the log's."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.environ.get(NO_LOG_VARIABLE):
            DatagenStore.append_async = _acknowledged  # type: ignore[method-assign]


def no_log(pipeline: Pipeline) -> Pipeline:
    made = PipelineWithoutLog.__new__(PipelineWithoutLog)
    made.__dict__.update(pipeline.__dict__)
    return made


def _acknowledged(_: DatagenStore, __: Any) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


class Instant:
    """A worker that ends each root as soon as it is offered."""

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._outcomes: list[Outcome] = []
        self._first = 1

    async def start(self) -> WorkerReport:
        return WorkerReport(self._slot, self._slot, f"{self._slot}:1", "here", 1)

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        self._forget(acknowledged)
        self._outcomes += [Outcome(a.root_id, OutcomeStatus.COMPLETED, 1, 1) for a in chunk]

    async def collect(self, acknowledged: int) -> Collected:
        self._forget(acknowledged)
        await asyncio.sleep(0 if self._outcomes else POLL_S)
        last = self._first + len(self._outcomes) - 1
        return Collected(last, tuple(self._outcomes), WorkerState.READY)

    async def withdraw(self, _: int) -> tuple[str, ...]:
        return ()

    async def stop(self, grace_s: float) -> None:
        """Nothing is open."""

    def kill(self) -> None:
        """Nothing runs."""

    def _forget(self, acknowledged: int) -> None:
        gone = max(0, acknowledged - self._first + 1)
        del self._outcomes[:gone]
        self._first += gone


class InstantFleet:
    def open(self) -> None:
        """Nothing to start."""

    def spawn(self, slot: str) -> Instant:
        return Instant(slot)

    def start_maintainer(self) -> None:
        """None is needed."""

    async def check(self) -> None:
        """It is always there."""

    def claim_shard(self, slot: str) -> None:
        """Nobody else has it."""

    def check_not_superseded(self) -> None:
        """There is no other run."""


class NothingKnown:
    def is_terminated(self, _: str) -> bool:
        return False

    def known(self, _: str) -> bool:
        return False

    def running(self) -> Iterator[str]:
        return iter(())


def dispatch(report: Report, count: int) -> None:
    fleet = InstantFleet()
    driver = Driver(
        DriverConfig(slots=tuple(f"worker-{n}" for n in range(4))),
        fleet=fleet,
        ownership=fleet,
        rows=(SourceRow(str(n), {"n": n, "text": "x" * 100}) for n in range(count)),
        statuses=NothingKnown(),
        total=count,
    )
    began = time.perf_counter()
    counts = asyncio.run(driver.run())
    rate = counts.completed / (time.perf_counter() - began)
    report.add(
        "roots dispatched and settled, 4 workers that end them at once", rate, "roots/s",
        against="3,000 roots/s", ratio=rate / 3_000,
    )  # fmt: skip


def make_log(uri: str, roots: int) -> None:
    """A real log: nine roots of ten are completed, the tenth was created and is running."""
    with DatagenStore.open(uri, fsync=False) as store:
        batch: list[Any] = []
        for number in range(roots):
            writer = DatagenStreamWriter.open(
                str(number), run_id="before", writer_epoch=store.writer_epoch, now=utc_now
            )
            batch.append(writer.item_created())
            if number % 10:
                batch.append(writer.item_terminal(DatagenItemStatus.COMPLETED))
            if len(batch) >= 20_000:
                store.append(batch)
                batch = []
        if batch:
            store.append(batch)
    with DatagenStore.open(uri, fsync=False) as store:
        store.cleanup_own_shard()
        store.compact()
        store.refresh_indexes()


RESTART = """
import sys
from benchmarks.cluster import restart_here
restart_here(sys.argv[1], int(sys.argv[2]))
"""


def restart_here(uri: str, roots: int) -> None:
    """What a driver does before it dispatches a first root, with Ray up; in this process."""
    from datagen_ray.sources import count_keys, open_source, source_rows
    from datagen_ray.store.runs import begin_run, claim_all_shards

    source = open_source(lambda: ({"n": n} for n in range(roots)))
    began = time.perf_counter()
    total = count_keys(source, "n")
    with DatagenStore.open(uri, fsync=False) as store:
        begin_run(
            uri, f"again-{time.time_ns()}", pipeline_tree={}, fingerprint="f", origin="bench",
            fsync=False,
        )  # fmt: skip
        claim_all_shards(uri, fsync=False)
        statuses = store.root_item_statuses(None)

    class First(Instant):
        async def offer(self, _: Sequence[Assignment], __: int) -> None:
            took = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            sys.stdout.write(f"{took} {peak}\n")
            sys.stdout.flush()
            os._exit(0)

    class FirstFleet(InstantFleet):
        def spawn(self, slot: str) -> Instant:
            return First(slot)

    fleet = FirstFleet()
    driver = Driver(
        DriverConfig(slots=("worker-0",)),
        fleet=fleet,
        ownership=fleet,
        rows=source_rows(source, "n"),
        statuses=LogStatuses(statuses),
        total=total,
    )
    asyncio.run(driver.run())


def restart(report: Report, folder: Path, roots: int) -> None:
    uri = str(folder / "restart" / "log.lance")
    began = time.perf_counter()
    make_log(uri, roots)
    made_s = time.perf_counter() - began
    done = subprocess.run(
        [sys.executable, "-c", RESTART, uri, str(roots)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    took_s, peak_mib = map(float, done.stdout.split())
    what = f"restart, {roots:,} roots, 90 % done"
    report.add(f"{what}: to the first root", took_s, "s", against="limit 15 s", ratio=took_s / 15)
    report.add(
        f"{what}: driver's peak memory", peak_mib, "MiB", against="limit 2 GiB",
        ratio=peak_mib / 2048,
    )  # fmt: skip
    report.add("  making that log took", made_s, "s")


def main() -> None:
    questions = ("scaling", "log", "dispatch", "restart")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=questions, action="append", help="ask this alone")
    parser.add_argument("--roots", type=int, default=200_000, help="roots of the restart")
    parser.add_argument("--seconds", type=float, default=5, help="length of a scaling run")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="of a scaling worker")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the logs")
    options = parser.parse_args()
    asked = options.only or questions
    report = Report("cluster: what Ray adds, and what it scales to")
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        if "scaling" in asked:
            scaling(report, folder, options.seconds, options.in_flight)
        if "log" in asked:
            log_cost(report, folder, 12_000)
        if "dispatch" in asked:
            dispatch(report, 100_000)
        if "restart" in asked:
            restart(report, folder, options.roots)
    report.show(options.json)


if __name__ == "__main__":
    # Workers load what this file defines by its own name.
    from benchmarks import cluster

    cluster.main()
