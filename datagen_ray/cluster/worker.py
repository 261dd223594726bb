"""A worker: owns one shard, runs the roots that it is handed, and says how they ended.

Life of a worker::

    start     claim the shard -> check that no later run took over -> ready to be offered roots
    offer     queue assignments; a root that is queued or running already is not queued again
    (work)    user code of up to ``concurrency`` roots runs at once, each with its whole tree; a
              root that waits for the log lets another begin; the histories of the ones to resume
              are read in bulk, in one pass a chunk
    collect   hand over outcomes, and the worker's state
    drain     take no more; running steps get ``drain_s`` to end; what is written is durable; close

Crash guarantees: an outcome is reported only when everything that it stands for is durable, so
a driver that has seen it may forget the root. Whatever a killed worker had in hand is in the log up
to its last acknowledged checkpoint and is taken up from there by whoever resumes it.

A fenced or broken worker acknowledges nothing more and stops at once. It never claims again by
itself: only its driver may start it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from datagen_ray.cluster.messages import (
    Assignment,
    Collected,
    Mode,
    Outcome,
    OutcomeStatus,
    WorkerConfig,
    WorkerReport,
    WorkerState,
)
from datagen_ray.cluster.metrics import (
    PENDING,
    PUBLISH_S,
    QUEUED,
    QUEUED_ROWS,
    RUNNING,
    Measure,
    Meter,
    NoMeter,
    WorkerMetrics,
)
from datagen_ray.errors import (
    ConfigError,
    DamagedLogError,
    DatagenError,
    InputError,
    RunSupersededError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.endings import SELF_CANCELLED, Drained
from datagen_ray.pipeline.executor import Executor, RootTask
from datagen_ray.pipeline.limits import Limits
from datagen_ray.pipeline.placement import RemoteCalls
from datagen_ray.pipeline.places import Place
from datagen_ray.store.runs import check_not_superseded
from datagen_ray.store.store import DatagenStore
from datagen_ray.waiting import within

_LOGGER = logging.getLogger("datagen_ray.cluster")

POLL_S = 0.5
"""How long a ``collect`` waits for an outcome. Short, since Ray lets pending calls end before it
ends an actor that was sent SIGTERM."""
CLEANUP_S = 60.0
"""How often the worker's own flushed rows are merged into the base table, at the least."""
ABANDONED_S = 10.0
"""How long a worker that cannot go on stays to tell the driver why. One that is cut off from its
cluster is asked no more, and Ray may need minutes to find out."""
LINGER_S = 0.005
"""How long a ``collect`` that has an outcome waits for more, so that fast roots share a reply."""


_HALTED = (WorkerState.FENCED, WorkerState.SUPERSEDED, WorkerState.BROKEN)


class NotStartedError(Exception):
    """A call reached a worker that has not claimed its shard: an earlier one was restarted."""


class _Running(NamedTuple):
    """A root that has begun and not ended; the task says whether it was drained."""

    task: asyncio.Task[bool]
    place: Place


class _Blobs:
    """Fetches blob bytes for the steps that use them, off the event loop."""

    def __init__(self, store: DatagenStore) -> None:
        self._store = store

    async def load(self, event_id: str) -> bytes:
        found = await asyncio.to_thread(self._store.get_blob, event_id)
        if found is None:
            raise DamagedLogError(f"the bytes of blob event {event_id} are gone")
        return found


class Worker:
    """Runs the roots of one slot. All methods belong to one event loop.

    ``load_pipeline`` turns the bytes of the config into a pipeline; it is handed in since only the
    caller knows how they were made. ``incarnation`` is any text that no other life of the slot has.
    ``remote`` runs placed steps, ``limits`` are those of the run; see the executor. ``meter`` is
    told what the worker does, once a second.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        load_pipeline: Callable[[bytes], Any],
        incarnation: str,
        remote: RemoteCalls | None = None,
        limits: Limits | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._config = config
        self._load_pipeline = load_pipeline
        self._incarnation = incarnation
        self._remote = remote
        self._limits = limits
        self._metrics = WorkerMetrics(meter or NoMeter())
        self._publishing: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[WorkerReport] | None = None
        self._store: DatagenStore | None = None
        self._executor: Executor | None = None
        self._state = WorkerState.READY
        self._reason: str | None = None
        self._queue: deque[Assignment] = deque()
        self._in_hand: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._histories: dict[str, Sequence[DatagenEvent]] = {}
        self._outcomes: deque[Outcome] = deque()
        self._told_begun = 0
        self._first = 1
        self._news = asyncio.Event()
        self._halted = asyncio.Event()
        self._asked_at_s = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> WorkerReport:
        """Claim the shard, then make sure that the run is still the latest, then get ready.

        A second call gets the answer of the first. Raises ``RunSupersededError`` or
        ``StorageError``, after which the worker can only be thrown away.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> WorkerReport:
        config = self._config
        for path in reversed(config.import_paths):
            absolute = os.path.abspath(path)
            if absolute not in sys.path:
                sys.path.insert(0, absolute)
        try:
            pipeline = self._load_pipeline(config.pipeline)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the pipeline cannot be loaded on a worker: {error}; put its modules beside the "
                "job's file, or install them on every node"
            ) from error
        check = partial(check_not_superseded, config.log_uri, config.term, config.storage_options)
        store = await asyncio.to_thread(
            DatagenStore.open,
            config.log_uri,
            shard_id=config.slot,
            storage_options=config.storage_options,
            create=False,
            fsync=config.fsync,
            before_reopen=check,
        )
        try:
            await asyncio.to_thread(check)
            executor = Executor(
                pipeline,
                self._metrics.sink(store),
                run_id=config.term.run_id,
                blobs=_Blobs(store),
                max_in_flight_roots=config.concurrency,
                exhausted_after=config.exhausted_after,
                remote=self._remote,
                limits=self._limits,
                observe=self._metrics.call,
                sleep=self._metrics.pause,
                when_free=self._fill,
            )
            await executor.start()
            # Its failures are raised by the close at the latest; appends do not depend on it.
            store.spawn_periodic_cleanup(CLEANUP_S)
        except BaseException:
            await asyncio.to_thread(store.close)
            raise
        self._store, self._executor = store, executor
        self._publishing = asyncio.ensure_future(self._publish(store))
        return WorkerReport(
            slot=config.slot,
            incarnation=self._incarnation,
            writer_epoch=store.writer_epoch,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    async def _publish(self, store: DatagenStore) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            try:
                pending = await asyncio.to_thread(store.pending_generations)
            except DatagenError:
                pending = -1  # not known; whoever writes meets the same storage, and says so
            self._publish_now({PENDING: pending} if pending >= 0 else {})

    def _publish_now(self, known: Mapping[Measure, float]) -> None:
        self._metrics.publish(
            {
                QUEUED: len(self._queue),
                RUNNING: len(self._running),
                QUEUED_ROWS: 0 if self._store is None else self._store.queued_rows(),
                **known,
            }
        )

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        """Take these roots in hand; the ones that are in hand already are joined, not repeated.

        A root stays in hand until its outcome was acknowledged, here or by :meth:`collect`, so one
        that is to be retried can be offered with the acknowledgement of its failure.
        """
        store = self._ready()
        self._forget(acknowledged)
        if self._state is not WorkerState.READY:
            return
        new = [each for each in chunk if each.root_id not in self._in_hand]
        self._in_hand.update(each.root_id for each in new)
        resumed = [each.root_id for each in new if each.mode is not Mode.FRESH]
        try:
            histories: Mapping[str, Sequence[DatagenEvent]] = (
                await asyncio.to_thread(store.events_for_roots, resumed) if resumed else {}
            )
        except StorageError as error:
            self._halt(WorkerState.BROKEN, error)
            return
        self._histories.update(histories)
        self._queue.extend(new)
        self._fill()

    async def collect(self, acknowledged: int) -> Collected:
        """Outcomes after the one numbered ``acknowledged``, as soon as there are any.

        Waits no longer than :data:`POLL_S`. Outcomes up to that number are forgotten.
        """
        self._ready()
        self._forget(acknowledged)
        if not self._outcomes and not self._begun_unsaid() and self._state not in _HALTED:
            self._news.clear()
            # That nothing ended is an answer too.
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._news.wait(), POLL_S)
                await asyncio.sleep(LINGER_S)
        outcomes = tuple(self._outcomes)
        last = self._first + len(outcomes) - 1
        self._told_begun = len(self._running)
        return Collected(last, outcomes, self._state, self._reason, begun=self._told_begun)

    def _begun_unsaid(self) -> bool:
        """Whether more roots have begun than the driver knows of, who blames them for a death."""
        return len(self._running) > self._told_begun

    async def withdraw(self, most: int) -> tuple[str, ...]:
        """Give back up to ``most`` roots of which no step runs, those that came last first.

        First those that have not begun, then those that wait for a place to go on: all that these
        did is durable, so another worker goes on with them.
        """
        self._ready()
        given: list[str] = []
        while self._queue and len(given) < most:
            root_id = self._queue.pop().root_id
            self._histories.pop(root_id, None)
            given.append(root_id)
        waiting = [item for item in self._running.items() if item[1].place.asks]
        leaving = {root_id: run.task for root_id, run in waiting[::-1][: most - len(given)]}
        for root_id in leaving:
            self._running[root_id].place.refuse()
        if leaving:
            await asyncio.wait(leaving.values())
        given += [root_id for root_id, task in leaving.items() if _was_drained(task)]
        self._in_hand.difference_update(given)
        return tuple(given)

    async def drain(self, grace_s: float) -> None:
        """End: no step begins, running ones get ``grace_s`` to end; then flush and close."""
        if self._closing is None:
            if self._executor is not None:
                self._executor.drain()
            if self._state is WorkerState.READY:
                self._state = WorkerState.DRAINING
                self._reason = "told to end"
            self._queue.clear()
            self._closing = asyncio.ensure_future(self._close(grace_s))
        await asyncio.shield(self._closing)

    @property
    def state(self) -> WorkerState:
        return self._state

    async def abandoned(self) -> str:
        """Returns once the worker has halted and nobody has asked it for a while: why it halted.

        Its process can only end then. Nothing that is left in it could be acknowledged.
        """
        await self._halted.wait()
        loop = asyncio.get_running_loop()
        while (left_s := self._asked_at_s + ABANDONED_S - loop.time()) > 0:
            await asyncio.sleep(left_s)
        return self._reason or self._state.value

    def _ready(self) -> DatagenStore:
        if self._store is None:
            raise NotStartedError(f"worker {self._config.slot} has not claimed its shard")
        self._asked_at_s = asyncio.get_running_loop().time()
        return self._store

    def _forget(self, acknowledged: int) -> None:
        while self._outcomes and self._first <= acknowledged:
            self._in_hand.discard(self._outcomes.popleft().root_id)
            self._first += 1

    def _fill(self) -> None:
        while self._queue and self._state is WorkerState.READY:
            place = self._ready_executor().try_begin()
            if place is None:
                return
            assignment = self._queue.popleft()
            task = asyncio.ensure_future(self._run(assignment, place))
            self._running[assignment.root_id] = _Running(task, place)
            if self._begun_unsaid():
                self._news.set()

    async def _run(self, assignment: Assignment, place: Place) -> bool:
        """Run one root; whether it was stopped between two steps, with all that it did durable."""
        root_id = assignment.root_id
        outcome: Outcome | None = None
        try:
            outcome = await self._outcome(assignment, place)
        finally:
            place.end()
            self._running.pop(root_id, None)
            if outcome is not None:
                failed = outcome.status is OutcomeStatus.FAILED
                self._metrics.root_ended(root_id, failed=failed)
            if outcome is not None and self._state in (WorkerState.READY, WorkerState.DRAINING):
                self._outcomes.append(outcome)
                self._news.set()
        return outcome is None and self._state not in _HALTED

    async def _outcome(self, assignment: Assignment, place: Place) -> Outcome | None:
        root_id = assignment.root_id
        task = RootTask(root_id, assignment.inputs, self._histories.pop(root_id, ()))
        try:
            if assignment.mode is Mode.BURY:
                return await self._bury(task)
            return await self._execute(task, place)
        except Drained:
            return None  # whoever has it in hand next goes on where it is
        except WriterFencedError as error:
            self._halt(WorkerState.FENCED, error)
            return None
        except RunSupersededError as error:
            self._halt(WorkerState.SUPERSEDED, error)
            return None
        except (WriterPoisonedError, StorageError) as error:
            self._halt(WorkerState.BROKEN, error)
            return None
        except (DamagedLogError, InputError) as error:
            return Outcome(root_id, OutcomeStatus.FAILED, error=_one_line(error), can_retry=False)
        except Exception as error:  # noqa: BLE001 - a bug met by one root must not stop the others
            return Outcome(root_id, OutcomeStatus.FAILED, error=_one_line(error))
        except asyncio.CancelledError:
            if self._state is not WorkerState.READY:
                raise
            # Nobody here cancels a root of a worker that is to go on.
            return Outcome(root_id, OutcomeStatus.FAILED, error=SELF_CANCELLED, can_retry=False)
        except BaseException as error:
            # Without an outcome the root would be waited for without end.
            self._halt(WorkerState.BROKEN, error)
            raise

    async def _execute(self, task: RootTask, place: Place) -> Outcome:
        result = await self._ready_executor().run(task, place)
        return Outcome(
            root_id=result.root_id,
            status=OutcomeStatus(result.status),
            steps_executed=result.steps_executed,
            checkpoints=result.checkpoints,
            error=result.error,
            can_retry=result.can_retry,
        )

    async def _bury(self, task: RootTask) -> Outcome:
        """Record in the root's own stream that it kills workers; run nothing of it."""
        reason = "its worker died each time that it ran, also with nothing beside it"
        await self._ready_executor().record_failure(task, "WorkerDied", reason)
        return Outcome(
            task.root_id, OutcomeStatus.FAILED, error=f"WorkerDied: {reason}", can_retry=False
        )

    def _ready_executor(self) -> Executor:
        if self._executor is None:
            raise NotStartedError(f"worker {self._config.slot} has not claimed its shard")
        return self._executor

    def _halt(self, state: WorkerState, error: BaseException) -> None:
        """Nothing that is still running can be acknowledged: stop it all and say why."""
        if self._state in _HALTED:
            return
        self._state = state
        self._reason = _one_line(error)
        self._asked_at_s = asyncio.get_running_loop().time()
        self._halted.set()
        _LOGGER.error("%s stops, %s: %s", self._config.slot, state.value, self._reason)
        if state is WorkerState.FENCED:
            self._metrics.fenced()
            self._publish_now({})  # the process may be ended any moment
        self._queue.clear()
        current = asyncio.current_task()
        for run in self._running.values():
            if run.task is not current:
                run.task.cancel()
        self._news.set()

    async def _close(self, grace_s: float) -> None:
        running = [run.task for run in self._running.values()]
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._publishing is not None:
            self._publishing.cancel()
        if self._executor is not None:
            await self._executor.close()
        self._publish_now({PENDING: 0})
        if self._store is not None:
            await self._closed(asyncio.to_thread(self._store.close))

    async def _closed(self, closing: Awaitable[None]) -> None:
        try:
            await closing
        except (WriterFencedError, WriterPoisonedError, StorageError) as error:
            # What was reported was durable before; a writer that was taken over has no more to do.
            if self._state not in _HALTED:
                raise
            self._reason = self._reason or _one_line(error)


def _was_drained(task: asyncio.Task[bool]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
