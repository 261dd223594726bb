"""Placed steps on Ray: as tasks, or on pools of actors that the workers of a run share.

The actors of a pool are made by the driver (``shared_actors``); each worker calls steps through
:class:`RayCalls`.

A call is a stream of two values: *begun*, as soon as a process has the call in hand, and the
outcome. So ``timeout_s`` counts from the begin, not from the wait for a place; when it is over the
process is ended by force, for nothing less stops code that hangs. Outcomes are data (see
``pipeline.sent``), since Ray wraps what a task raises. A process that dies under a call is no
answer: the call is made again, :data:`TRIES` times in all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError, WorkerCrashedError

from datagen_ray.cluster.shared_actors import (
    ASK_AGAIN_S,
    SharedNames,
    error_line,
    ray_resources,
)
from datagen_ray.cluster.step_processes import StepSource, run_task
from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.placement import Call, Placement, StepProcessDied
from datagen_ray.pipeline.sent import Outcome
from datagen_ray.pipeline.signature import shape_of
from datagen_ray.pipeline.steps import Step
from datagen_ray.waiting import within

_LOGGER = logging.getLogger("datagen_ray.steps")

TRIES = 4
"""How often a call is made whose process dies under it."""
WAITS = 20
"""How often a call may be lost before it begins, as when a call beside it ends their process."""
AHEAD = 2
"""Calls that a worker has at one actor of a pool: one that runs, one that waits its turn."""
NOTE_S = 30.0
"""How often a wait for a place is told."""


class _Lost(Exception):
    """The process died, or cannot be reached: there is no outcome."""

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


class RayCalls:
    """Runs the placed steps of one worker, as ``RemoteCalls`` of the pipeline layer says."""

    def __init__(self, source: StepSource, shared: SharedNames) -> None:
        self._source = source
        self._shared = shared
        self._source_ref: Any = None
        self._tasks: dict[str, Any] = {}
        self._pools: dict[str, _Pool] = {}

    async def set_up(self, steps: Sequence[Step]) -> None:
        self._source_ref = ray.put(self._source)
        task = cast("Callable[..., Any]", ray.remote)(run_task)
        for step in steps:
            if step.needs_pool:
                actors = [ray.get_actor(name) for name in self._shared.pools[step.name]]
                pool = self._pools[step.name] = _Pool(step, actors)
                await pool.first_ready()
            else:
                self._tasks[step.name] = task.options(
                    num_returns="streaming",
                    max_retries=0,
                    name=f"step {step.name}",
                    **ray_resources(step.options.placement or Placement()),
                )

    async def call(self, step: Step, call: Call) -> Any:
        packed = cloudpickle.dumps(call)
        begun = waited = 0
        while True:
            try:
                outcome: Outcome = cloudpickle.loads(await self._once(step, packed, call.timeout_s))
            except _Lost as lost:
                begun += lost.begun
                waited += not lost.begun
                if begun == TRIES or waited == WAITS:
                    raise StepProcessDied(
                        f"the process of step {step.name!r} died {begun} times under this item, "
                        f"and {waited} times before: {lost}"
                    ) from lost
                _LOGGER.warning("step %r lost its process, called again: %s", step.name, lost)
                if not lost.begun:
                    await asyncio.sleep(ASK_AGAIN_S)
            else:
                return outcome.get()

    async def close(self) -> None:
        """Nothing to end here: tasks end with their calls, pools with the run."""

    async def _once(self, step: Step, packed: bytes, timeout_s: float | None) -> bytes:
        pool = self._pools.get(step.name)
        if pool is not None:
            return await pool.call(packed, timeout_s)
        stream = self._tasks[step.name].remote(self._source_ref, step.name, packed)

        def stop() -> None:
            ray.cancel(stream, force=True)

        try:
            return await _outcome_of(stream, step, timeout_s, stop)
        except asyncio.CancelledError:
            stop()
            raise


class _Pool:
    """The actors of one step, as one worker uses them: the one with the least to do is next."""

    def __init__(self, step: Step, actors: Sequence[Any]) -> None:
        self._step = step
        self._busy = dict.fromkeys(range(len(actors)), 0)
        self._actors = list(actors)
        is_async = shape_of(step.callable_shown).is_async
        each = (step.options.max_in_flight or 64) if is_async else AHEAD
        self._places = asyncio.Semaphore(each * len(actors))

    async def first_ready(self) -> None:
        """Return when one actor has its instance; the others may come later."""
        waiting = {asyncio.ensure_future(self._set_up(actor)) for actor in self._actors}
        try:
            while True:
                done, _ = await asyncio.wait(
                    waiting, timeout=NOTE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                _note_wait(self._step)
            try:
                done.pop().result().get()
            except Exception as error:
                raise PipelineError(
                    f"step {self._step.name!r} could not be set up: {type(error).__name__}: {error}"
                ) from error
        finally:
            for task in waiting:
                task.cancel()

    async def _set_up(self, actor: Any) -> Outcome:
        while True:
            try:
                outcome: Outcome = cloudpickle.loads(await actor.set_up.remote())
            except RayTaskError:
                raise
            except RayError as error:
                _LOGGER.warning(
                    "an actor of step %r is lost: %s", self._step.name, error_line(error)
                )
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                return outcome

    async def call(self, packed: bytes, timeout_s: float | None) -> bytes:
        async with self._places:
            number = min(self._busy, key=self._busy.__getitem__)
            actor = self._actors[number]
            self._busy[number] += 1
            try:
                stream = actor.call.options(num_returns="streaming").remote(packed)
                return await _outcome_of(
                    stream, self._step, timeout_s, lambda: ray.kill(actor, no_restart=False)
                )
            except _Lost:
                # Until it is restarted it would refuse the next call as well.
                await self._set_up(actor)
                raise
            finally:
                self._busy[number] -= 1


async def _outcome_of(
    stream: Any, step: Step, timeout_s: float | None, stop: Callable[[], None]
) -> bytes:
    """The outcome at the end of a call's stream; raises :class:`_Lost`, or ``TimeoutError``."""
    has_begun = False
    try:
        begun = asyncio.ensure_future(_next(stream))
        while not (await asyncio.wait([begun], timeout=NOTE_S))[0]:
            _note_wait(step)
        begun.result()
        has_begun = True
        return await within(_next(stream), timeout_s)
    except asyncio.TimeoutError:
        stop()
        raise
    except RayTaskError as error:
        # Not the step's own doing, whose errors are outcomes: its code cannot be loaded there.
        raise RuntimeError(
            f"step {step.name!r} cannot be run on Ray: {error_line(error)}"
        ) from error
    except RayError as error:
        # A task has its process for itself. One that dies at once dies before *begun* gets away.
        had_it = has_begun or isinstance(error, WorkerCrashedError)
        raise _Lost(error_line(error), begun=had_it) from error
    except StopAsyncIteration as error:
        raise _Lost("its stream ended without an outcome", begun=has_begun) from error


async def _next(stream: Any) -> bytes:
    value: bytes = await (await stream.__anext__())
    return value


def _note_wait(step: Step) -> None:
    _LOGGER.warning(
        "step %r waits for a place with %s; does the cluster have one?",
        step.name,
        step.options.placement,
    )
