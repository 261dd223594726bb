"""Calling user code: set-up of class steps, retries, predicates, splits and reducers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.gate import Holder
from datagen_ray.pipeline.item import Item
from datagen_ray.pipeline.limits import Limits
from datagen_ray.pipeline.placement import RemoteCalls, refuse_placed
from datagen_ray.pipeline.runner import Runner, call_async, call_plain
from datagen_ray.pipeline.signature import Shape, shape_of
from datagen_ray.pipeline.steps import Step
from datagen_ray.pipeline.threads import StepThreads

Sleep = Callable[[float], Awaitable[None]]

MakeContext = Callable[[int], StepContext]
"""From the number of the retry to the context of that call."""


class UserCode:
    """Everything of a pipeline that users wrote, ready to be called in one event loop."""

    def __init__(
        self,
        threads: StepThreads,
        *,
        limits: Limits,
        remote: RemoteCalls | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self._threads = threads
        self._holder = Holder(limits)
        self._remote = remote
        self._runners: dict[int, Runner] = {}
        self._shapes: dict[int, tuple[Callable[..., Any], Shape]] = {}

    async def set_up(self, steps: list[Step]) -> None:
        """Build the instances of class steps, one after the other, in a thread."""
        placed = [step for step in steps if step.options.placement is not None]
        if self._remote is None:
            refuse_placed(placed)
        elif placed:
            await self._remote.set_up(placed)
        for step in steps:
            remote = self._remote if step.options.placement is not None else None
            function = step.function
            if step.is_class and remote is None:
                try:
                    function = await self._threads.run(call_plain, step.make, (), {})
                except Exception as error:
                    raise PipelineError(
                        f"step {step.name!r} could not be set up: {type(error).__name__}: {error}"
                    ) from error
            self._runners[id(step)] = Runner(
                step, function, self._threads, holder=self._holder, remote=remote
            )

    async def tear_down(self) -> None:
        """Call ``close()`` of the instances that have one."""
        for runner in self._runners.values():
            close = getattr(runner.function, "close", None)
            # Of a placed step this is the class, whose instances are ended by whoever runs them.
            if (
                runner.step.is_class
                and callable(close)
                and runner.function is not runner.step.function
            ):
                await self._threads.run(close)
        self._runners.clear()
        self._holder.close()
        if self._remote is not None:
            await self._remote.close()

    async def call_step(self, step: Step, item: Item, make_context: MakeContext) -> Any:
        """One leaf, with its retries; raises what its last call raised.

        A retried error tells the number of retries in ``__datagen_retries__``.
        """
        runner = self._runners[id(step)]
        retry = step.options.retry
        if retry is None:
            return await runner.once(item, make_context(0) if runner.needs_ctx else None)
        calls = 0

        async def once(number: int) -> Any:
            nonlocal calls
            calls = number
            return await runner.once(item, make_context(number))

        try:
            return await retry.call(once, seed=make_context(0).seed, sleep=self._sleep)
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
            return await call_async(function(*args, **keywords))
        if item.holds_blob:
            return await self._threads.run(call_plain, function, args, keywords)
        return call_plain(function, args, keywords)

    async def call_heavy(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        ctx: StepContext,
        *,
        most: int | None = None,
    ) -> Any:
        """A split or a reducer: plain functions in a thread, where generators are run out too.

        With ``most`` an iterable comes back as a list, cut off behind one more than that.
        """
        shape = self.shape(function)
        keywords = {"ctx": ctx} if shape.takes_ctx else {}
        if shape.is_async:
            result = await call_async(function(*args, **keywords))
            return result if most is None else _listed(result, most)
        if most is None:
            return await self._threads.run(call_plain, function, args, keywords)
        return await self._threads.run(_call_listed, function, args, keywords, most)

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


def _call_listed(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], most: int
) -> Any:
    return call_plain(lambda: _listed(function(*args, **keywords), most), (), {})


def _listed(result: Any, most: int) -> Any:
    """An iterable as a list; what nobody means as a list of sub-items stays what it is.

    One more than ``most`` is taken of an iterator, which may have no end: enough to refuse it.
    """
    if isinstance(result, Iterable) and not isinstance(result, (Mapping, str, bytes)):
        return list(itertools.islice(result, most + 1))
    return result
