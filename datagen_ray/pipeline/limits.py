"""Limits that all workers of a run share: calls a second, and calls at a time.

Vocabulary: a *limit* has a name, by default that of its step; a *gate* is one worker's way through
one limit; the *ledger* is the one place in a run that grants calls. The ledger is a plain object.
In one process gates call it directly; on a cluster it lives in an actor of the run.

A holder that dies takes its permits with it: they lapse when it has not been heard of for
:data:`LEASE_S`. Waits are told as durations, so the clocks of machines need not agree.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from datagen_ray.errors import PipelineError
from datagen_ray.waiting import within

LEASE_S = 30.0
"""After so long without a word of its holder a permit lapses."""
RENEW_S = 5.0
POLL_S = 5.0
"""How long the ledger lets a caller wait for a permit before it is asked again."""
HORIZON_S = 1.0
"""No call is promised a place further ahead, so that a pause holds for all that wait."""
NOTE_S = 10.0
"""How often a gate says that calls wait."""


@dataclass(frozen=True)
class RateLimit:
    """At most ``calls`` every ``per_s`` seconds, over all workers of the run.

    ``burst`` calls may come at once after a pause, by default 1: calls are spread evenly. Steps
    whose limits have the same ``name`` share one, as steps that ask the same service should.
    """

    calls: float
    per_s: float = 1.0
    burst: int = 1
    name: str | None = None

    def __post_init__(self) -> None:
        for label, value in (("calls", self.calls), ("per_s", self.per_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise PipelineError(f"RateLimit: {label}={value!r}; give a number above 0")
        if type(self.burst) is not int or self.burst < 1:
            raise PipelineError(f"RateLimit: burst={self.burst!r}; give a whole number from 1 on")
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise PipelineError(f"RateLimit: name={self.name!r}; give a text that is not empty")

    @property
    def interval_s(self) -> float:
        return self.per_s / self.calls

    def __str__(self) -> str:
        return f"{self.calls:g} calls every {self.per_s:g} s"


class Limits(Protocol):
    """The ledger, as gates see it, near or far."""

    async def reserve(self, name: str, limit: RateLimit, calls: int) -> list[float]:
        """The seconds to wait before the first of these calls, as far as they are soon."""
        ...

    async def pause(self, name: str, seconds: float) -> None:
        """Let no call of this rate begin for so long."""
        ...

    async def take(self, name: str, most: int, holder: str, calls: int) -> int:
        """How many of these calls may begin now; waits up to :data:`POLL_S` for the first."""
        ...

    async def give_back(self, name: str, holder: str, calls: int) -> None: ...

    async def renew(self, holder: str, held: Mapping[str, int]) -> None:
        """The holder lives, and holds these permits."""
        ...


@dataclass
class _Permits:
    held: dict[str, int] = field(default_factory=dict)
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class Ledger:
    """The state of all limits of one run. All methods belong to one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._next: dict[str, float] = {}
        self._permits: dict[str, _Permits] = {}
        self._heard: dict[str, float] = {}

    async def reserve(self, name: str, limit: RateLimit, calls: int) -> list[float]:
        waits: list[float] = []
        # A call may begin early by what a burst allows, counted from the even schedule.
        slack = limit.interval_s * (limit.burst - 1)
        for _ in range(calls):
            now = self._clock()
            due = max(self._next.get(name, now), now)
            wait = max(0.0, due - slack - now)
            if wait > HORIZON_S:
                if not waits:
                    await self._sleep(min(wait - HORIZON_S, POLL_S))
                break
            waits.append(wait)
            self._next[name] = due + limit.interval_s
        return waits

    async def pause(self, name: str, seconds: float) -> None:
        now = self._clock()
        self._next[name] = max(self._next.get(name, now), now + seconds)

    async def take(self, name: str, most: int, holder: str, calls: int) -> int:
        permits = self._permits.setdefault(name, _Permits())
        self._heard[holder] = self._clock()
        granted = self._grant(permits, most, holder, calls)
        if granted:
            return granted
        permits.freed.clear()
        try:
            await within(permits.freed.wait(), POLL_S)
        except asyncio.TimeoutError:
            self._forget_silent_holders()
        return self._grant(permits, most, holder, calls)

    def _grant(self, permits: _Permits, most: int, holder: str, calls: int) -> int:
        granted = max(0, min(calls, most - sum(permits.held.values())))
        if granted:
            permits.held[holder] = permits.held.get(holder, 0) + granted
        return granted

    async def give_back(self, name: str, holder: str, calls: int) -> None:
        permits = self._permits.setdefault(name, _Permits())
        left = permits.held.get(holder, 0) - calls
        if left > 0:
            permits.held[holder] = left
        else:
            permits.held.pop(holder, None)
        permits.freed.set()

    async def renew(self, holder: str, held: Mapping[str, int]) -> None:
        self._heard[holder] = self._clock()
        for name, count in held.items():
            # Also what a ledger that was lost and made anew has to learn.
            if count:
                self._permits.setdefault(name, _Permits()).held[holder] = count

    def _forget_silent_holders(self) -> None:
        now = self._clock()
        for holder in [each for each, heard in self._heard.items() if now - heard > LEASE_S]:
            del self._heard[holder]
            for permits in self._permits.values():
                if permits.held.pop(holder, None):
                    permits.freed.set()


def asked_limits(steps: list[Any]) -> dict[str, RateLimit]:
    """The rate limits of these steps by name; steps that share a name must mean the same."""
    found: dict[str, RateLimit] = {}
    for step in steps:
        limit: RateLimit | None = step.options.rate_limit
        if limit is None:
            continue
        name = rate_name(step.name, limit)
        known = found.setdefault(name, limit)
        if known != limit:
            raise PipelineError(
                f"step {step.name!r} has the rate limit {name!r} of {limit}, another step says "
                f"{known}; give both the same RateLimit"
            )
    return found


def rate_name(step_name: str, limit: RateLimit) -> str:
    return f"step {step_name}" if limit.name is None else limit.name
