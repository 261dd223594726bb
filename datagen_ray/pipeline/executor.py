"""Runs roots, each with its whole tree, in one event loop.

Roles: an *executor* belongs to one pipeline, one sink and one run; a *task* is one root to run,
with what the log already has of it; a *walk* (see ``walk``) is one stream of that root's tree.

A root ends ``completed`` or ``filtered``, with a TERMINAL row, or ``failed``: it stays running in
the log, its FAILED rows say why, and running it again resumes it. Trouble of the storage is not a
failure of a root: it is raised, and the caller must claim and read before it runs that root again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import ConfigError, DamagedLogError, InputError, InternalError
from datagen_ray.log.events import (
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStreamPosition,
)
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.log.values import DatagenFieldUpdate
from datagen_ray.pipeline.births import birth_events
from datagen_ray.pipeline.calls import Sleep, UserCode
from datagen_ray.pipeline.emitter import Emitter, Tally
from datagen_ray.pipeline.endings import Ending
from datagen_ray.pipeline.environment import Environment, Observe
from datagen_ray.pipeline.exhaustion import EXHAUSTED_AFTER, exhausting_failures, summary_of
from datagen_ray.pipeline.failures import Redact, storable
from datagen_ray.pipeline.fields import input_updates, merged
from datagen_ray.pipeline.interpreter import INTERPRETER
from datagen_ray.pipeline.item import Reader
from datagen_ray.pipeline.limits import Ledger, Limits
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import RemoteCalls
from datagen_ray.pipeline.places import Place, Places
from datagen_ray.pipeline.replay import INPUT_POSITION, RecordedStream, read_tree
from datagen_ray.pipeline.sink import BlobLoader, EventSink
from datagen_ray.pipeline.threads import StepThreads
from datagen_ray.pipeline.walk import StreamWalk

_LOGGER = logging.getLogger("datagen_ray.pipeline")

RootStatus = Literal["completed", "filtered", "failed"]


@dataclass(frozen=True)
class RootTask:
    """One root to run. ``history`` are all events of its tree; none means that it is fresh."""

    root_id: str
    inputs: Mapping[str, Any] | None
    history: Sequence[DatagenEvent] = ()


@dataclass(frozen=True)
class RootResult:
    """How one run of a root ended. ``error`` is one line.

    ``can_retry`` where it failed and running it again may help: a step raised, and not something
    that says that it would again, as ``Permanent`` does.
    """

    root_id: str
    status: RootStatus
    steps_executed: int
    checkpoints: int
    failures: int
    error: str | None = None
    can_retry: bool = False


class Executor:
    """Runs the roots of one pipeline. Use it in one event loop: ``start``, ``run`` ..., ``close``.

    ``exhausted_after`` is the number of FAILED rows in one stream after which its root counts as
    exhausted; None for never. ``max_threads`` bounds the plain functions that run at a time.
    ``limits`` are what the workers of a run share, by default this executor's own; ``remote`` runs
    placed steps, which are refused without it. ``redact`` is by default the pipeline's.
    ``observe`` is told of every call of user code, ``sleep`` waits between retries.

    User code of up to ``max_in_flight_roots`` roots runs at a time; what waits for the log beside
    them is told in ``places``. ``when_free`` is called when :meth:`try_begin` would give a place.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sink: EventSink,
        *,
        run_id: str,
        blobs: BlobLoader,
        now: Clock = utc_now,
        max_in_flight_roots: int = 256,
        exhausted_after: int | None = EXHAUSTED_AFTER,
        max_threads: int = 64,
        seed: int | None = None,
        redact: Redact | None = None,
        limits: Limits | None = None,
        remote: RemoteCalls | None = None,
        observe: Observe | None = None,
        sleep: Sleep = asyncio.sleep,
        when_free: Callable[[], None] | None = None,
    ) -> None:
        for name, value in (
            ("max_in_flight_roots", max_in_flight_roots),
            ("max_threads", max_threads),
            ("exhausted_after", 1 if exhausted_after is None else exhausted_after),
        ):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        self.pipeline = pipeline
        self._sink = sink
        self._run_id = run_id
        self._blobs = blobs
        self._now = now
        self._max_in_flight_roots = max_in_flight_roots
        self._exhausted_after = exhausted_after
        self._max_threads = max_threads
        self._seed = pipeline.seed if seed is None else seed
        self._redact = redact or pipeline.redact
        self._limits = limits
        self._remote = remote
        self._observe = observe or _unobserved
        self._sleep = sleep
        self._env: Environment | None = None
        self._threads: StepThreads | None = None
        self._when_free = when_free
        self._places: Places | None = None

    async def start(self) -> None:
        """Make the user's code ready; class steps are built here, once.

        Raises ``PipelineError`` naming the step whose class could not be built.
        """
        if self._env is not None:
            return
        self._threads = StepThreads(self._max_threads)
        self._places = Places(self._max_in_flight_roots, when_free=self._when_free)
        code = UserCode(
            self._threads,
            limits=self._limits or Ledger(sleep=self._sleep),
            remote=self._remote,
            sleep=self._sleep,
        )
        await code.set_up(self.pipeline.steps())
        self._env = Environment(
            pipeline=self.pipeline,
            sink=self._sink,
            code=code,
            reader=Reader(self.pipeline.types, self._blobs, asyncio.get_running_loop()),
            run_id=self._run_id,
            now=self._now,
            redact=self._redact,
            base_seed=self._seed,
            observe=self._observe,
        )
        INTERPRETER.begin()

    async def close(self) -> None:
        """Close class steps that have a ``close()``, and let the threads go."""
        env, self._env = self._env, None
        if env is not None:
            INTERPRETER.end()
            await env.code.tear_down()
        if self._threads is not None:
            self._threads.close()

    @property
    def notices(self) -> list[str]:
        """What a person should know of this run, such as steps that were skipped."""
        return sorted(self._env.notices) if self._env else []

    def try_begin(self) -> Place | None:
        """A place for one more root, if one may begin now; it is for :meth:`run`."""
        return self._places_of_run().try_begin()

    def drain(self) -> None:
        """Let no step begin any more. Steps that run may end, and their roots with ``Drained``."""
        self._places_of_run().close()

    async def run(self, task: RootTask, place: Place | None = None) -> RootResult:
        """Run one root to its end, from wherever the log has it.

        It begins when it has a place, and holds it while user code of it runs or could run: not
        while it waits for the log, and not for its last rows, which are durable when this returns.

        Raises storage errors as they are, and ``Drained`` after :meth:`drain` where the root has
        steps left; whatever else is wrong with the root is in the result.
        """
        env = self._started()
        place = place or await self._places_of_run().begin()
        tally = Tally()
        final = False
        try:
            try:
                status, error_text, walk, final = await self._walked(env, task, tally, place)
            finally:
                place.end()
            if walk is not None:
                await walk.emitter.finish()
        except (DamagedLogError, InputError) as error:
            _LOGGER.warning("root %s: %s", task.root_id, error)
            status, error_text = "failed", f"{type(error).__name__}: {error}"
        return RootResult(
            task.root_id,
            status,
            tally.steps_executed,
            tally.checkpoints,
            tally.failures,
            error_text,
            can_retry=status == "failed" and tally.failures > 0 and not final,
        )

    async def record_failure(self, task: RootTask, error_type: str, message: str) -> None:
        """Write a FAILED row for a root that could not be run, such as one that kills its worker.

        It stands in the root's own stream, at the innermost frame that is open.
        """
        env = self._started()
        root = read_tree(task.root_id, task.history)
        if root is not None and root.terminal is not None:
            return
        if root is None:
            writer, events = await self._born(env, task)
        else:
            writer, events = self._resumed(env, root), []
        position = root.innermost_frame() if root is not None else INPUT_POSITION
        events.append(writer.item_failed(position, error_type, error_dump=storable(message)))
        await Emitter(self._sink, Tally()).commit(events)

    def _started(self) -> Environment:
        if self._env is None:
            raise InternalError("the executor was not started, or was closed; await start() first")
        return self._env

    def _places_of_run(self) -> Places:
        self._started()
        assert self._places is not None  # noqa: S101 - set together with the environment
        return self._places

    async def _walked(
        self, env: Environment, task: RootTask, tally: Tally, place: Place
    ) -> tuple[RootStatus, str | None, StreamWalk | None, bool]:
        """How the root ends, why it failed, and the walk whose last rows may be on their way.

        Then, whether running it again would fail in the same way.
        """
        root = read_tree(task.root_id, task.history)
        if root is not None and root.terminal is not None:
            return _status(root.terminal), None, None, False
        if root is not None:
            exhausted = self._exhausted(root)
            if exhausted is not None:
                return "failed", exhausted, None, True
            await self._compare_inputs(env, task)
            walk = StreamWalk(
                env,
                tally,
                place=place,
                body=self.pipeline.body,
                writer=self._resumed(env, root),
                recorded=root,
                cells=root.cells(),
            )
        else:
            writer, born = await self._born(env, task)
            walk = StreamWalk(
                env,
                tally,
                place=place,
                body=self.pipeline.body,
                writer=writer,
                recorded=None,
                cells=merged({}, born),
            )
            walk.emitter.queue(born, checkpoint=True)
        ending: Ending = await walk.walk()
        if ending.terminal is None:
            details = ending.details
            summary, final = (details.summary, details.final) if details else (None, False)
            return "failed", summary, walk, final
        return _status(ending.terminal), None, walk, False

    async def _born(
        self, env: Environment, task: RootTask
    ) -> tuple[DatagenStreamWriter, list[DatagenEvent]]:
        if task.inputs is None:
            raise InternalError(f"root {task.root_id!r} is not in the log and has no inputs")
        updates = await input_updates(env.reader, task.inputs)
        writer = DatagenStreamWriter.open(
            task.root_id, run_id=self._run_id, writer_epoch=self._sink.writer_epoch, now=self._now
        )
        return writer, birth_events(writer, updates)

    def _resumed(self, env: Environment, root: RecordedStream) -> DatagenStreamWriter:
        return DatagenStreamWriter.resume(
            root.folded, run_id=env.run_id, writer_epoch=self._sink.writer_epoch, now=self._now
        )

    def _exhausted(self, root: RecordedStream) -> str | None:
        if self._exhausted_after is None:
            return None
        failed = exhausting_failures(root, self._exhausted_after)
        if not failed:
            return None
        return (
            f"exhausted: {summary_of(failed)}; it is left alone until a run retries exhausted "
            "roots (--retry-exhausted, retry_exhausted=True)"
        )

    async def _compare_inputs(self, env: Environment, task: RootTask) -> None:
        """The recorded inputs win; a source row that was edited since is worth a warning."""
        if task.inputs is None:
            return
        recorded: dict[str, list[object]] = {}
        for event in task.history:
            if (
                event.item_id == task.root_id
                and event.value is not None
                and event.position == INPUT_POSITION
                and event.event_type is not DatagenEventType.STEP_COMPLETED
            ):
                recorded.setdefault(event.field_name or "", []).append(event.value.identity())
        given: dict[str, list[object]] = {}
        try:
            updates: list[DatagenFieldUpdate] = await input_updates(env.reader, task.inputs)
        except InputError as error:
            env.notice(f"root {task.root_id!r}: its source row cannot be read now: {error}")
            return
        for update in updates:
            given.setdefault(update.name, []).append(update.value.identity())
        if given != recorded:
            names = sorted(
                name for name in {*given, *recorded} if given.get(name) != recorded.get(name)
            )
            env.notice(
                f"root {task.root_id!r}: its source row changed since it was recorded "
                f"({', '.join(names)}); the recorded inputs are used"
            )


def _unobserved(kind: str, item_id: str, position: DatagenStreamPosition) -> None:
    """What observes calls of user code where nobody does."""


def _status(terminal: DatagenEvent) -> RootStatus:
    return "filtered" if terminal.status is DatagenItemStatus.FILTERED else "completed"
