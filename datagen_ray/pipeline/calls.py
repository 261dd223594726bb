"""Calling user code: threads, retries, timeouts, permits, set-up of class steps, batches.

A permit (of ``max_in_flight``, of a thread) is held by a call that runs, never by one that waits:
not between retries, and never by an item that waits for its sub-items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.batching import Batcher
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.failures import StepAborted
from datagen_ray.pipeline.item import Item
from datagen_ray.pipeline.signature import Shape, shape_of
from datagen_ray.pipeline.steps import Step
from datagen_ray.pipeline.threads import StepThreads

MakeContext = Callable[[int], StepContext]
"""From the number of the retry to the context of that call."""


class _Runner:
    """One step in this process: its callable, made ready, and its permits."""

    def __init__(self, step: Step, function: Callable[..., Any], threads: StepThreads) -> None:
        self.step = step
        self.function = function
        self.shape = shape_of(function)
        self._threads = threads
        limit = step.options.max_in_flight
        self._permits = asyncio.Semaphore(limit) if limit is not None else None
        options = step.options
        self._batcher = (
            Batcher(self._call_batch, options.batch_size, options.max_wait_ms / 1000, step.name)
            if options.batch_size is not None
            else None
        )

    async def once(self, item: Item, ctx: StepContext) -> Any:
        if self._batcher is not None:
            return await self._batcher.submit(item, ctx)
        return await self._permitted((item,), ctx)

    async def _call_batch(self, items: list[Any], contexts: list[StepContext]) -> Any:
        return await self._permitted((items,), contexts)

    async def _permitted(self, args: tuple[Any, ...], ctx: Any) -> Any:
        if self._permits is None:
            return await self._timed(args, ctx)
        async with self._permits:
            return await self._timed(args, ctx)

    async def _timed(self, args: tuple[Any, ...], ctx: Any) -> Any:
        timeout_s = self.step.options.timeout_s
        keywords = {"ctx": ctx} if self.shape.takes_ctx else {}
        try:
            if not self.shape.is_async:
                return await self._threads.run(
                    _call, self.function, args, keywords, timeout_s=timeout_s
                )
            call = _call_async(self.function(*args, **keywords))
            return await (call if timeout_s is None else asyncio.wait_for(call, timeout_s))
        except asyncio.TimeoutError as error:
            if timeout_s is None or str(error):
                raise
            raise TimeoutError(f"no result within timeout_s={timeout_s:g}") from error


class UserCode:
    """Everything of a pipeline that users wrote, ready to be called in one event loop."""

    def __init__(self, threads: StepThreads) -> None:
        self._threads = threads
        self._runners: dict[int, _Runner] = {}
        self._shapes: dict[int, tuple[Callable[..., Any], Shape]] = {}

    async def set_up(self, steps: list[Step]) -> None:
        """Build the instances of class steps, one after the other, in a thread."""
        for step in steps:
            function = step.function
            if step.arguments is not None:
                args, keywords = step.arguments
                try:
                    function = await self._threads.run(_call, function, args, keywords)
                except Exception as error:
                    raise PipelineError(
                        f"step {step.name!r} could not be set up: {type(error).__name__}: {error}"
                    ) from error
            self._runners[id(step)] = _Runner(step, function, self._threads)

    async def tear_down(self) -> None:
        """Call ``close()`` of the instances that have one."""
        for runner in self._runners.values():
            close = getattr(runner.function, "close", None)
            if runner.step.is_class and callable(close):
                await self._threads.run(close)
        self._runners.clear()

    async def call_step(self, step: Step, item: Item, make_context: MakeContext) -> Any:
        """One leaf, with its retries; raises what its last call raised.

        A retried error tells the number of retries in ``__datagen_retries__``.
        """
        runner = self._runners[id(step)]
        retry = step.options.retry
        if retry is None:
            return await runner.once(item, make_context(0))
        calls = 0

        async def once(number: int) -> Any:
            nonlocal calls
            calls = number
            return await runner.once(item, make_context(number))

        try:
            return await retry.call(once, seed=make_context(0).seed)
        except Exception as error:
            if calls:
                note_retries(error, calls)
            raise

    async def call_inline(
        self, function: Callable[..., Any], item: Item, ctx: StepContext, *more: Any
    ) -> Any:
        """A predicate, key or loop test: in the event loop, unless reading a blob may block."""
        shape = self.shape(function)
        args = (item, *more)[: max(1, shape.positional)]
        keywords = {"ctx": ctx} if shape.takes_ctx else {}
        if shape.is_async:
            return await _call_async(function(*args, **keywords))
        if item.holds_blob:
            return await self._threads.run(_call, function, args, keywords)
        return _call(function, args, keywords)

    async def call_heavy(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        ctx: StepContext,
        *,
        as_list: bool = False,
    ) -> Any:
        """A split or a reducer: plain functions in a thread, where generators are run out too."""
        shape = self.shape(function)
        keywords = {"ctx": ctx} if shape.takes_ctx else {}
        if shape.is_async:
            result = await _call_async(function(*args, **keywords))
            return _listed(result) if as_list else result
        call = _call_listed if as_list else _call
        return await self._threads.run(call, function, args, keywords)

    def shape(self, function: Callable[..., Any]) -> Shape:
        known = self._shapes.get(id(function))
        if known is None:
            # The function is kept beside its shape, so that its id stays its own.
            known = self._shapes[id(function)] = (function, shape_of(function))
        return known[1]


def note_retries(error: BaseException, retries: int) -> None:
    """Remember on the error how often its step was tried again."""
    try:
        error.__datagen_retries__ = retries  # type: ignore[attr-defined]
    except AttributeError:
        return  # an exception with slots cannot carry the note, and does without


def noted_retries(error: BaseException) -> int:
    """What :func:`note_retries` left."""
    return int(getattr(error, "__datagen_retries__", 0))


def _call(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    try:
        return function(*args, **keywords)
    except (SystemExit, GeneratorExit, StopIteration, asyncio.CancelledError) as error:
        # These mean something to the event loop and to threads; from user code they are failures.
        raise StepAborted(f"{type(error).__name__}: {error}") from error


def _call_listed(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    return _call(lambda: _listed(function(*args, **keywords)), (), {})


def _listed(result: Any) -> Any:
    """An iterable as a list; what nobody means as a list of sub-items stays what it is."""
    if isinstance(result, Iterable) and not isinstance(result, (Mapping, str, bytes)):
        return list(result)
    return result


async def _call_async(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except SystemExit as error:
        raise StepAborted(f"{type(error).__name__}: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        cancelling = getattr(task, "cancelling", None)  # from Python 3.11 on
        if cancelling is None or cancelling():
            raise
        raise StepAborted("the step's own task was cancelled") from error
