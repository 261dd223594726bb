"""What a worker tells the monitoring of the cluster. Names end in a unit, or say what they count.

Counting goes on beside the steps and must cost them next to nothing, so it only adds up here; once
a second the sums are handed to a :class:`Meter`, which may be slow.

Latency of a step: from the first call of its function for an item until its checkpoint is handed to
the log, retries and their pauses included. Of steps that end by the thousand each second only
:data:`MOST_TIMES` a second go into the histogram; counters are exact.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from datagen_ray.log.events import DatagenEvent, DatagenEventType, DatagenStreamPosition
from datagen_ray.pipeline.sink import EventSink

PUBLISH_S = 1.0
MOST_TIMES = 500

_LATENCIES_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


@dataclass(frozen=True)
class Measure:
    """One measure: its name, what it tells, and whether it is kept for each step."""

    name: str
    kind: str
    about: str
    by_step: bool = False
    boundaries: tuple[float, ...] = ()


CHECKPOINTS = Measure("datagen_ray_checkpoints", "counter", "Checkpoints that became durable")
STEPS = Measure("datagen_ray_steps_begun", "counter", "Steps begun", by_step=True)
RETRIES = Measure("datagen_ray_step_retries", "counter", "Pauses before a step is called again")
FAILURES = Measure("datagen_ray_step_failures", "counter", "FAILED rows written", by_step=True)
LATENCY = Measure(
    "datagen_ray_step_latency_seconds",
    "histogram",
    "First call of a step until its checkpoint was handed to the log",
    by_step=True,
    boundaries=_LATENCIES_S,
)
COMMIT = Measure(
    "datagen_ray_commit_seconds",
    "histogram",
    "A checkpoint handed to the log until it was durable",
    boundaries=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
)
ROOTS = Measure("datagen_ray_roots_ended", "counter", "Roots that ended, in any way")
ROOTS_FAILED = Measure("datagen_ray_roots_failed", "counter", "Roots that ended failed")
FENCED = Measure("datagen_ray_workers_fenced", "counter", "Workers whose shard was taken over")
QUEUED = Measure("datagen_ray_queued_roots", "gauge", "Roots that wait at the worker")
RUNNING = Measure("datagen_ray_running_roots", "gauge", "Roots that the worker runs")
QUEUED_ROWS = Measure("datagen_ray_queued_rows", "gauge", "Rows that wait to be put into the WAL")
PENDING = Measure(
    "datagen_ray_pending_generations", "gauge", "Flushed generations that wait to be merged"
)
MEASURES = (
    CHECKPOINTS, STEPS, RETRIES, FAILURES, LATENCY, COMMIT, ROOTS, ROOTS_FAILED, FENCED,
    QUEUED, RUNNING, QUEUED_ROWS, PENDING,
)  # fmt: skip


class Meter(Protocol):
    """Where sums go. ``step`` is empty for measures that are not kept for each step."""

    def add(self, measure: Measure, amount: float, step: str = "") -> None: ...

    def put(self, measure: Measure, value: float) -> None: ...

    def observe(self, measure: Measure, value: float, step: str = "") -> None: ...


class NoMeter:
    """A meter that nobody reads."""

    def add(self, measure: Measure, amount: float, step: str = "") -> None:
        """Nothing is kept."""

    def put(self, measure: Measure, value: float) -> None:
        """Nothing is kept."""

    def observe(self, measure: Measure, value: float, step: str = "") -> None:
        """Nothing is kept."""


class WorkerMetrics:
    """Adds up what one worker does. Belongs to the worker's event loop."""

    def __init__(self, meter: Meter, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._monotonic = monotonic
        self._sums: Counter[tuple[Measure, str]] = Counter()
        self._times: dict[tuple[Measure, str], list[float]] = {}
        self._began: dict[str, dict[tuple[str, DatagenStreamPosition], float]] = {}

    def sink(self, inner: EventSink) -> EventSink:
        """A sink that hands everything to ``inner`` and counts it."""
        return _CountingSink(inner, self)

    def call(self, what: str, item_id: str, position: DatagenStreamPosition) -> None:
        """User code is called; this is an ``Observe`` of the pipeline layer."""
        if what != "step":
            return
        self._sums[STEPS, position.step_name] += 1
        self._began.setdefault(_root(item_id), {})[item_id, position] = self._monotonic()

    async def pause(self, seconds: float) -> None:
        """Waits between two calls of one step, and counts it."""
        self._sums[RETRIES, ""] += 1
        await asyncio.sleep(seconds)

    def root_ended(self, root_id: str, *, failed: bool) -> None:
        self._began.pop(root_id, None)
        self._sums[ROOTS, ""] += 1
        self._sums[ROOTS_FAILED, ""] += failed

    def fenced(self) -> None:
        self._sums[FENCED, ""] += 1

    def publish(self, gauges: Mapping[Measure, float]) -> None:
        """Hand over what was added up since the last time, and how things stand now."""
        for (measure, step), amount in self._sums.items():
            if amount:
                self._meter.add(measure, amount, step)
        for (measure, step), times in self._times.items():
            for value in times:
                self._meter.observe(measure, value, step)
        self._sums.clear()
        self._times.clear()
        for measure, value in gauges.items():
            self._meter.put(measure, value)

    def appended(self, events: Sequence[DatagenEvent]) -> bool:
        """Rows are handed to the log; whether they are a checkpoint."""
        is_checkpoint = False
        for event in events:
            if event.event_type is DatagenEventType.STEP_COMPLETED:
                is_checkpoint = True
                began = self._began.get(_root(event.item_id), {})
                position = event.position
                at = None if position is None else began.pop((event.item_id, position), None)
                if at is not None:
                    self._timed(LATENCY, self._monotonic() - at, event.step_name or "")
            elif event.event_type is DatagenEventType.FAILED:
                self._sums[FAILURES, event.step_name or ""] += 1
        return is_checkpoint

    def committed(self, began_s: float) -> None:
        self._sums[CHECKPOINTS, ""] += 1
        self._timed(COMMIT, self._monotonic() - began_s)

    def now_s(self) -> float:
        return self._monotonic()

    def _timed(self, measure: Measure, value: float, step: str = "") -> None:
        times = self._times.setdefault((measure, step), [])
        if len(times) < MOST_TIMES:
            times.append(value)


class _CountingSink:
    def __init__(self, inner: EventSink, metrics: WorkerMetrics) -> None:
        self._inner = inner
        self._metrics = metrics

    @property
    def writer_epoch(self) -> str:
        return self._inner.writer_epoch

    def append_async(self, events: Sequence[DatagenEvent]) -> Awaitable[None]:
        durable = self._inner.append_async(events)
        if self._metrics.appended(events) and isinstance(durable, asyncio.Future):
            began_s = self._metrics.now_s()

            def note(done: asyncio.Future[None]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._metrics.committed(began_s)

            durable.add_done_callback(note)
        return durable


def _root(item_id: str) -> str:
    return item_id.partition("/")[0]
