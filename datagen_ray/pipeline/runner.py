"""One step, as this process calls it: permits, shared limits, batches, timeouts, placement.

A permit (of ``max_in_flight``, of a thread) is held by a call that runs, never by one that waits:
not between retries, and never by an item that waits for its sub-items.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from datagen_ray.pipeline.batching import Batcher
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.endings import NOT_THE_ITEMS_FAULT
from datagen_ray.pipeline.failures import StepAborted, text_of
from datagen_ray.pipeline.gate import Gate, Holder
from datagen_ray.pipeline.item import Item
from datagen_ray.pipeline.limits import rate_name
from datagen_ray.pipeline.placement import Call, RemoteCalls
from datagen_ray.pipeline.retry import asked_wait_s
from datagen_ray.pipeline.sent import sendable
from datagen_ray.pipeline.signature import shape_of
from datagen_ray.pipeline.steps import Step
from datagen_ray.pipeline.threads import StepThreads
from datagen_ray.waiting import within


class Runner:
    """One step in this process. ``remote`` is given for placed steps, and runs them elsewhere."""

    def __init__(
        self,
        step: Step,
        function: Callable[..., Any],
        threads: StepThreads,
        *,
        holder: Holder,
        remote: RemoteCalls | None,
    ) -> None:
        self.step = step
        self.function = function
        options = step.options
        self._threads = threads
        self._remote = remote
        # The class of a placed step is not called here, so its signature is that of its method.
        self.shape = shape_of(function if remote is None else step.callable_shown)
        limit = options.max_in_flight
        self._permits = asyncio.Semaphore(limit) if limit is not None else None
        self._gate = gate_of(step, holder)
        self._is_plain = self._permits is None and self._gate is None
        self._batcher = (
            Batcher(self._call_batch, options.batch_size, options.max_wait_ms / 1000, step.name)
            if options.batch_size is not None
            else None
        )

        self.needs_ctx = self.shape.takes_ctx or self._batcher is not None
        self._is_direct = (
            self._is_plain
            and self._batcher is None
            and self._remote is None
            and self.shape.is_async
            and options.timeout_s is None
        )

    def once(self, item: Item, ctx: StepContext | None) -> Awaitable[Any]:
        """One call for one item, which may share the call with others.

        ``ctx`` may be None where the step does not need it.
        """
        if self._is_direct:
            # What most steps are; each coroutine on the way would be entered at every wake-up.
            return call_async(self.function(item, **self._keywords(ctx)))
        if self._batcher is not None and ctx is not None:
            return self._batcher.submit(item, ctx)
        return self._permitted((item,), ctx)

    async def _call_batch(self, items: list[Any], contexts: list[StepContext]) -> Any:
        return await self._permitted((items,), contexts)

    async def _permitted(self, args: tuple[Any, ...], ctx: Any) -> Any:
        if self._is_plain:
            return await self._timed(args, ctx)
        async with AsyncExitStack() as held:
            if self._permits is not None:
                await held.enter_async_context(self._permits)
            if self._gate is None:
                return await self._timed(args, ctx)
            await held.enter_async_context(self._gate.one_call())
            try:
                return await self._timed(args, ctx)
            except Exception as error:
                await self._gate.pause(asked_wait_s(error))
                raise

    async def _timed(self, args: tuple[Any, ...], ctx: Any) -> Any:
        timeout_s = self.step.options.timeout_s
        keywords = self._keywords(ctx)
        try:
            if self._remote is not None:
                sent = await _sent(args)
                return await self._remote.call(self.step, Call(sent, keywords, timeout_s))
            if not self.shape.is_async:
                return await self._threads.run(
                    call_plain, self.function, args, keywords, timeout_s=timeout_s
                )
            return await within(call_async(self.function(*args, **keywords)), timeout_s)
        except asyncio.TimeoutError as error:
            if timeout_s is None or str(error):
                raise
            raise TimeoutError(f"no result within timeout_s={timeout_s:g}") from error

    def _keywords(self, ctx: Any) -> dict[str, Any]:
        return {"ctx": ctx} if self.shape.takes_ctx else {}


def gate_of(step: Step, holder: Holder) -> Gate | None:
    """The way through the step's shared limits; None where it has none."""
    rate, most = step.options.rate_limit, step.options.max_in_flight_run
    if rate is None and most is None:
        return None
    return Gate(
        step.name,
        holder,
        rate=None if rate is None else (rate_name(step.name, rate), rate),
        in_flight=None if most is None else (f"step {step.name}", most),
    )


async def _sent(args: tuple[Any, ...]) -> tuple[Any, ...]:
    (given,) = args
    if isinstance(given, Item):
        return (await sendable(given),)
    return ([await sendable(item) for item in given],)


def call_plain(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """A plain function; what would end more than its step becomes a failure of it."""
    try:
        return function(*args, **keywords)
    except BaseException as error:  # noqa: BLE001 - raised again, as what it means
        _raise_meaning(error)


async def call_async(call: Awaitable[Any]) -> Any:
    """As :func:`call_plain`, for what an async function returned."""
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        cancelling = getattr(task, "cancelling", None)  # from Python 3.11 on
        if cancelling is None or cancelling():
            raise
        raise StepAborted("the step's own task was cancelled") from error
    except GeneratorExit as error:
        if not _in_a_task():
            raise  # the coroutine is being thrown away
        raise StepAborted("GeneratorExit: raised by the step") from error
    except BaseException as error:  # noqa: BLE001 - raised again, as what it means
        _raise_meaning(error)


def _raise_meaning(error: BaseException) -> NoReturn:
    """Raise what user code raised, as what it means; most of it is what it is.

    ``SystemExit``, ``StopIteration`` and whatever else means something to the event loop or to
    threads, or would be taken for trouble of this log, is a failure of the step.
    """
    is_plain = isinstance(error, Exception) and not isinstance(
        error, (StopIteration, asyncio.CancelledError, *NOT_THE_ITEMS_FAULT)
    )
    if is_plain or (isinstance(error, KeyboardInterrupt) and _in_main_thread()):
        raise error
    raise StepAborted(f"{type(error).__name__}: {text_of(error)}") from error


def _in_main_thread() -> bool:
    """Where Ctrl-C arrives; a KeyboardInterrupt anywhere else was raised by somebody."""
    return threading.current_thread() is threading.main_thread()


def _in_a_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False
