"""Micro-batches: calls that wait a moment for others, to share one call of the user's function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from datagen_ray.errors import CodecError
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.results import Filtered

_Waiting = tuple[Any, StepContext, "asyncio.Future[Any]"]


class Batcher:
    """Collects up to ``size`` calls for at most ``wait_s`` seconds.

    The function returns one result an item, in order; a ``Filtered`` among the results filters
    that item alone, and an exception that is raised fails (or filters) all of the batch.
    """

    def __init__(
        self,
        call: Callable[[list[Any], list[StepContext]], Awaitable[Any]],
        size: int,
        wait_s: float,
        step_name: str,
    ) -> None:
        self._call = call
        self._size = size
        self._wait_s = wait_s
        self._step_name = step_name
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, item: Any, ctx: StepContext) -> Any:
        """The result for one item."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((item, ctx, future))
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        return await future

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [entry for entry in self._waiting if not entry[2].done()]
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[_Waiting]) -> None:
        try:
            results = await self._call([item for item, _, _ in batch], [ctx for _, ctx, _ in batch])
            if not isinstance(results, (list, tuple)) or len(results) != len(batch):
                raise CodecError(
                    f"step {self._step_name!r} was given {len(batch)} items and returned "
                    f"{_shape(results)}; return a list with one result an item"
                )
        except BaseException as error:  # carried to everyone who waits
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Filtered):
                future.set_exception(result)
            else:
                future.set_result(result)


def _shape(results: Any) -> str:
    if isinstance(results, (list, tuple)):
        return f"{len(results)} results"
    return f"a {type(results).__name__}"
