"""For tests of pipelines: runs on a temporary real log, crashes on demand, a clock that jumps.

    def test_my_step():
        ctx = testing.step_context("draft", item_id="5")
        assert draft({"text": "hello"}, ctx)["draft"].startswith("hello")

    def test_my_pipeline():
        with testing.TrialLog() as log:
            trial = log.run(pipeline, rows, key="id")
            assert trial.summary.completed == 3
            assert log.fields("5")["answer"] == "42"

    def test_my_pipeline_survives_every_crash():
        testing.check_every_crash(pipeline, rows, key="id")

A *trial* is one run in this process, on a log as any other. A *write* is one batch of events that
becomes durable; ``crash_at=n`` ends a trial in the n-th as a lost machine would, but for this
process, which lives on and may run the next trial on what is left.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from datagen_ray.errors import ConfigError, WriterFencedError
from datagen_ray.log.events import (
    DatagenEvent,
    DatagenEventType,
    DatagenStepKind,
    DatagenStreamPosition,
)
from datagen_ray.log.fold import FoldedDatagenItem, fold_datagen_events
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.local import LocalRunSummary, run_local
from datagen_ray.pipeline.local_run import Hooks
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.sink import EventSink
from datagen_ray.store.store import DatagenStore

_START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class FakeClock:
    """A clock for a trial: it stands still, but for sleeps on it, which jump.

    Events carry its time, and the waits of retries and rate limits are over at once. A step's own
    ``asyncio.sleep`` and timeouts are left alone.
    """

    def __init__(self, start: datetime = _START) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        with self._lock:
            self._now += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        """Let so much time pass, and others run."""
        self.advance(seconds)
        await asyncio.sleep(0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the usual start."""
        return (self._now - _START).total_seconds()


def step_context(
    step_name: str = "step",
    *,
    item_id: str = "1",
    index: int = 0,
    enclosing: str | None = None,
    attempt: int = 0,
    retry: int = 0,
    pipeline: str = "trial",
    seed: int = 0,
) -> StepContext:
    """The ``ctx`` for a call of a step's own function, without a run.

    ``index`` is the number of the step's place in its frame ``enclosing``, which is the pipeline
    itself where that was made of a list; ``seed`` is the pipeline's. In the same place a run gives
    the same ``ctx.seed`` and ``ctx.idempotency_key``. Raises ``InvalidItemIdError`` for an id that
    no item can have.
    """
    return StepContext(
        item_id=item_id,
        root_id=str(DatagenItemId.parse(item_id).root),
        attempt=attempt,
        retry=retry,
        position=DatagenStreamPosition(step_name, DatagenStepKind.LEAF, index, enclosing, None),
        run_id="trial",
        pipeline=pipeline,
        base_seed=seed,
    )


class Crashed(WriterFencedError):
    """What the writes of a trial raise from its crash on; the run ends with it."""


class CrashingSink:
    """Lets ``crash_at - 1`` writes through; the next and all after it are never acknowledged.

    With ``last_is_durable`` the write at which it crashes is in the log all the same.
    """

    def __init__(
        self, sink: EventSink, *, crash_at: int | None = None, last_is_durable: bool = False
    ) -> None:
        self._sink = sink
        self._crash_at = crash_at
        self._last_is_durable = last_is_durable
        self.writes = 0

    @property
    def writer_epoch(self) -> str:
        return self._sink.writer_epoch

    @property
    def crashed(self) -> bool:
        return self._crash_at is not None and self.writes >= self._crash_at

    def append_async(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        was_alive = not self.crashed
        if was_alive:
            self.writes += 1
        if not self.crashed:
            return asyncio.ensure_future(self._sink.append_async(events))
        if was_alive and self._last_is_durable:
            return asyncio.ensure_future(self._unacknowledged(self._sink.append_async(events)))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(self._crash())
        return future

    async def _unacknowledged(self, durable: Awaitable[None]) -> None:
        await durable
        raise self._crash()

    def _crash(self) -> Crashed:
        return Crashed(f"the trial crashes at write {self._crash_at}, as it was told to")


@dataclass(frozen=True)
class Called:
    """One call of user code: ``kind`` is ``step``, ``choice``, ``split`` or ``reduce``.

    The retries of a step are one call.
    """

    kind: str
    item_id: str
    position: DatagenStreamPosition

    def __str__(self) -> str:
        return f"{self.kind} {self.position} of {self.item_id}"


@dataclass(frozen=True)
class Trial:
    """How one run on a trial log went. ``summary`` is None where it crashed."""

    calls: tuple[Called, ...]
    writes: int
    summary: LocalRunSummary | None

    @property
    def crashed(self) -> bool:
        return self.summary is None

    def called(self, step: str) -> list[str]:
        """The items for which the code of this step ran, in order, as often as it did."""
        return [call.item_id for call in self.calls if call.position.step_name == step]


@dataclass(frozen=True)
class ItemState:
    """What must not depend on how often a run was disturbed."""

    status: str
    fields: Mapping[str, Any]
    positions: tuple[str, ...]
    open_frames: tuple[str, ...]
    query_tags: Any = None


@dataclass
class _Calls:
    made: list[Called] = field(default_factory=list)

    def observe(self, kind: str, item_id: str, position: DatagenStreamPosition) -> None:
        self.made.append(Called(kind, item_id, position))


class TrialLog:
    """A real log in a temporary folder, or below ``folder``, to run pipelines on.

    As a context manager it removes the temporary folder at the end.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="datagen-trial-") if folder is None else folder)

    @property
    def uri(self) -> str:
        """The address of the log, for :meth:`DatagenStore.open`."""
        return str(self.folder / "log.lance")

    def run(
        self,
        pipeline: Pipeline,
        rows: Iterable[Mapping[str, Any]],
        *,
        key: str | None = None,
        crash_at: int | None = None,
        last_is_durable: bool = False,
        clock: FakeClock | None = None,
        **options: Any,
    ) -> Trial:
        """Run what is left to do, as ``run_local`` does; ``options`` are those of ``run_local``.

        ``crash_at=n`` ends the run in its n-th write, which is lost, or durable but unknown to be
        with ``last_is_durable``. Placed steps run in this process. Roots that failed often are
        tried again, and failures end the trial at once unless ``max_root_retries`` says otherwise.
        """
        if crash_at is not None and crash_at < 1:
            raise ConfigError(f"crash_at={crash_at}; writes are counted from 1")
        calls = _Calls()
        sinks: list[CrashingSink] = []

        def wrap(sink: EventSink) -> EventSink:
            sinks.append(CrashingSink(sink, crash_at=crash_at, last_is_durable=last_is_durable))
            return sinks[-1]

        hooks = Hooks(wrap=wrap, observe=calls.observe)
        if clock is not None:
            hooks = Hooks(wrap=wrap, observe=calls.observe, now=clock, sleep=clock.sleep)
        defaults = {"max_root_retries": 0, "retry_exhausted": True, "placed": "here"}
        options = {**defaults, "fsync": False, **options}
        try:
            summary = run_local(
                pipeline, list(rows), key=key, log_uri=self.uri, hooks=hooks, **options
            )
        except Crashed:
            return Trial(tuple(calls.made), sinks[-1].writes, None)
        return Trial(tuple(calls.made), sinks[-1].writes, summary)

    def events(self) -> list[DatagenEvent]:
        """All events, item by item, each item's in order."""
        with DatagenStore.open(self.uri, read_only=True) as store:
            roots = store.root_item_statuses()
            return [event for root_id in roots for event in store.events_for_root(root_id)]

    def item(self, item_id: str) -> FoldedDatagenItem:
        """One item or sub-item, its blobs loaded; ``KeyError`` where there is none."""
        with DatagenStore.open(self.uri, read_only=True) as store:
            folded = store.fold_item(item_id, load_blobs=True).folded()
        if folded is None:
            raise KeyError(f"{item_id!r} is not in the log")
        return folded

    def fields(self, item_id: str) -> dict[str, Any]:
        """The stored values of an item's fields, lists for those that grow."""
        return _fields(self.item(item_id))

    def state(self) -> dict[str, ItemState]:
        """Every item and sub-item as it is now; blobs stand as their checksums."""
        by_item: dict[str, list[DatagenEvent]] = {}
        for event in self.events():
            by_item.setdefault(event.item_id, []).append(event)
        found = {}
        for item_id, events in sorted(by_item.items()):
            folded = fold_datagen_events(events)
            if folded is not None:
                found[item_id] = _state(folded)
        return found

    def durable_calls(self) -> set[tuple[str, str, str]]:
        """Kind, item and position of every call of user code whose result is in the log."""
        found: set[tuple[str, str, str]] = set()
        for event in self.events():
            if event.event_type is DatagenEventType.STEP_COMPLETED:
                place = (event.item_id, str(event.position))
                found.update((kind, *place) for kind in ("step", "split", "reduce"))
            elif event.event_type is DatagenEventType.ITEM_CREATED and event.parent_item_id:
                found.add(("split", event.parent_item_id, str(event.position)))
        return found

    def close(self) -> None:
        """Remove the folder, if it was made for this."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _fields(folded: FoldedDatagenItem) -> dict[str, Any]:
    return {
        name: [_shown(value) for value in kept.values]
        if kept.mode == "append"
        else _shown(kept.value)
        for name, kept in folded.fields.items()
    }


def _shown(value: Any) -> Any:
    if value.kind != "blob":
        return value.value
    return value.raw.checksum if value.raw.bytes is None else value.raw.bytes


def _state(folded: FoldedDatagenItem) -> ItemState:
    trajectory = folded.trajectory
    return ItemState(
        status=str(folded.status),
        fields=_fields(folded),
        positions=tuple(str(cursor.position) for cursor in trajectory.ordered),
        open_frames=tuple(sorted(map(str, trajectory.open_frames))),
        query_tags=folded.query_tags,
    )


def assert_same_state(
    found: Mapping[str, ItemState], expected: Mapping[str, ItemState], where: str = "the log"
) -> None:
    """Fail with the first difference: an item that is missing or one too many, or what differs."""
    for item_id in sorted({*found, *expected}):
        one, other = found.get(item_id), expected.get(item_id)
        if one == other:
            continue
        if one is None or other is None:
            raise AssertionError(
                f"{where}: item {item_id} is {'missing' if one is None else 'one too many'}"
            )
        for part in ("status", "fields", "positions", "open_frames", "query_tags"):
            was, should = getattr(one, part), getattr(other, part)
            if was != should:
                raise AssertionError(
                    f"{where}: {part} of item {item_id} are {was!r}, not {should!r}; is a step, "
                    "a split or a predicate not deterministic?"
                )


def assert_not_run_again(
    calls: Iterable[Called], durable: set[tuple[str, str, str]], where: str = "the log"
) -> None:
    """Fail where the code of a step ran though its result was in the log already."""
    for call in calls:
        if (call.kind, call.item_id, str(call.position)) in durable:
            raise AssertionError(f"{where}: {call} ran again, though its result was durable")


def check_every_crash(
    pipeline: Pipeline | Callable[[], Pipeline],
    rows: Iterable[Mapping[str, Any]],
    *,
    key: str | None = None,
    most: int | None = None,
    **options: Any,
) -> int:
    """Crash at every write, resume, and compare with an undisturbed run; the number of crashes.

    Fails where a resumed run ends with another state, or runs a step again whose result was
    durable. ``most`` bounds the crashes, which are then spread over the run. Give a function that
    makes the pipeline where its steps keep state of their own. One root runs at a time unless
    ``concurrency`` says otherwise, so that writes are in the same order each time.
    """
    make = pipeline if callable(pipeline) else lambda: pipeline
    rows = list(rows)
    options = {"concurrency": 1, **options}
    with TrialLog() as log:
        writes = log.run(make(), rows, key=key, **options).writes
        expected = log.state()
    count = writes if most is None else min(most, writes)
    for number in range(count):
        crash_at = 1 + number * writes // count
        where = f"after a crash at write {crash_at} of {writes}"
        with TrialLog() as log:
            log.run(
                make(),
                rows,
                key=key,
                crash_at=crash_at,
                last_is_durable=bool(number % 2),
                **options,
            )
            durable = log.durable_calls()
            resumed = log.run(make(), rows, key=key, **options)
            assert_not_run_again(resumed.calls, durable, where)
            assert_same_state(log.state(), expected, where)
    return count
