"""Placed steps run in this process after all: to try a pipeline that is made for a cluster."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.placement import Call
from datagen_ray.pipeline.runner import call_async, call_plain
from datagen_ray.pipeline.steps import Step
from datagen_ray.pipeline.threads import StepThreads
from datagen_ray.waiting import within


class HereCalls:
    """A :class:`RemoteCalls` of threads. What a step asks for is not reserved.

    A pool is one instance for each of its actors, used by one call at a time. A timeout leaves
    the thread to itself, as with steps that are not placed.
    """

    def __init__(self, max_threads: int = 16) -> None:
        self._threads = StepThreads(max_threads)
        self._pools: dict[str, asyncio.Queue[Callable[..., Any]]] = {}

    async def set_up(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if not step.needs_pool:
                continue
            placement = step.options.placement
            pool = self._pools[step.name] = asyncio.Queue()
            for _ in range((placement.num_actors if placement else None) or 1):
                try:
                    pool.put_nowait(await self._threads.run(call_plain, step.make, (), {}))
                except Exception as error:
                    raise PipelineError(
                        f"step {step.name!r} could not be set up: {type(error).__name__}: {error}"
                    ) from error

    async def call(self, step: Step, call: Call) -> Any:
        pool = self._pools.get(step.name)
        if pool is None:
            return await self._run(step.function, call)
        actor = await pool.get()
        try:
            return await self._run(actor, call)
        finally:
            pool.put_nowait(actor)

    async def _run(self, function: Callable[..., Any], call: Call) -> Any:
        result = await self._threads.run(
            call_plain, function, call.args, call.keywords, timeout_s=call.timeout_s
        )
        if inspect.isawaitable(result):
            return await within(call_async(result), call.timeout_s)
        return result

    async def close(self) -> None:
        for pool in self._pools.values():
            while not pool.empty():
                close = getattr(pool.get_nowait(), "close", None)
                if callable(close):
                    await self._threads.run(close)
        self._threads.close()
