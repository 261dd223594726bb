"""One worker's way through the limits of one step that all workers of the run share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from datagen_ray.pipeline.limits import NOTE_S, RENEW_S, Limits, RateLimit

_LOGGER = logging.getLogger("datagen_ray.limits")

T = TypeVar("T")


class Holder:
    """This worker, as a holder of permits: says that it lives for as long as it holds any."""

    def __init__(self, limits: Limits) -> None:
        self.name = secrets.token_hex(8)
        self.limits = limits
        self._held: dict[str, int] = {}
        self._renewing: asyncio.Task[None] | None = None

    def count(self, name: str, change: int) -> None:
        self._held[name] = self._held.get(name, 0) + change
        if self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.limits.renew(self.name, dict(self._held))

    def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None


class Gate:
    """Lets calls of one step begin when its shared limits allow; those that wait ask together."""

    def __init__(
        self,
        step_name: str,
        holder: Holder,
        *,
        rate: tuple[str, RateLimit] | None,
        in_flight: tuple[str, int] | None,
    ) -> None:
        self._step_name = step_name
        self._holder = holder
        self._limits = holder.limits
        self._rate = rate
        self._in_flight = in_flight
        self._reservations = _Together(self._reserve)
        self._permits = _Together(self._take, lambda _: self._give_back())
        self._waiting = 0
        self._passed = 0
        self._noted = time.monotonic()

    @asynccontextmanager
    async def one_call(self) -> AsyncIterator[None]:
        """The time of one call: begins when it may, ends with its permit given back."""
        self._waiting += 1
        try:
            if self._in_flight is not None:
                await self._permits.get()
            try:
                if self._rate is not None:
                    await asyncio.sleep(await self._reservations.get())
            except BaseException:
                await self._give_back()
                raise
        finally:
            self._waiting -= 1
        self._passed += 1
        try:
            yield
        finally:
            await self._give_back()

    async def pause(self, seconds: float) -> None:
        """A call was told to come back later: so are all others of the same rate."""
        if self._rate is not None and seconds > 0:
            await self._limits.pause(self._rate[0], seconds)

    async def _give_back(self) -> None:
        if self._in_flight is not None:
            name = self._in_flight[0]
            self._holder.count(name, -1)
            await asyncio.shield(self._limits.give_back(name, self._holder.name, 1))

    async def _reserve(self, calls: int) -> list[float]:
        assert self._rate is not None  # noqa: S101 - asked only with a rate
        name, limit = self._rate
        waits = await self._limits.reserve(name, limit, calls)
        self._note()
        return waits

    async def _take(self, calls: int) -> list[None]:
        assert self._in_flight is not None  # noqa: S101 - asked only with such a limit
        name, most = self._in_flight
        granted = await self._limits.take(name, most, self._holder.name, calls)
        self._holder.count(name, granted)
        self._note()
        return [None] * granted

    def _note(self) -> None:
        """Say now and then that calls wait, so that a wait does not look like a stall."""
        now = time.monotonic()
        if now - self._noted >= NOTE_S:
            self._noted = now
            what = str(self._rate[1]) if self._rate else f"{self._in_flight[1]} at a time"  # type: ignore[index]
            _LOGGER.warning(
                "step %r: %d calls wait for its limit of %s; %d have begun",
                self._step_name,
                self._waiting,
                what,
                self._passed,
            )


class _Together(Generic[T]):
    """Callers that want one thing each, asked for in one go: a far ledger is asked rarely.

    What is got for somebody who has gone away meanwhile is handed to ``unwanted``.
    """

    def __init__(
        self,
        ask: Callable[[int], Awaitable[list[T]]],
        unwanted: Callable[[T], Awaitable[None]] | None = None,
    ) -> None:
        self._ask = ask
        self._unwanted = unwanted
        self._wanting: deque[asyncio.Future[T]] = deque()
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._wanting.append(future)
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._serve())
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                await self._return(future.result())
            raise

    async def _serve(self) -> None:
        try:
            while self._trim():
                for thing in await self._ask(len(self._wanting)):
                    if self._trim():
                        self._wanting.popleft().set_result(thing)
                    else:
                        await self._return(thing)
        except BaseException as error:  # carried to everyone who waits
            while self._trim():
                self._wanting.popleft().set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._asking = None

    def _trim(self) -> bool:
        """Leave out who has gone away meanwhile; whether anybody is left."""
        while self._wanting and self._wanting[0].done():
            self._wanting.popleft()
        return bool(self._wanting)

    async def _return(self, thing: T) -> None:
        if self._unwanted is not None:
            await self._unwanted(thing)
