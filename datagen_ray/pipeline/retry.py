"""When a step that raised is called again, and after how long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import tenacity

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.endings import OwnTrouble
from datagen_ray.pipeline.failures import StepAborted, is_final

T = TypeVar("T")

MAX_ASKED_WAIT_S = 3600.0
"""The longest wait that a service is believed to ask for."""


@dataclass(frozen=True)
class Retry:
    """Call a step up to ``attempts`` times, with exponential waits between the calls.

    Only exceptions of the types in ``on`` are retried, and of those never ``Filtered``,
    ``Permanent`` or an error of this package other than ``StorageError``. The wait before call
    k+1 is ``wait_s * multiplier ** k``, at most ``max_wait_s``, spread by up to ``jitter`` of
    itself. An exception that says how long to wait (``retry_after`` in seconds, or the
    ``Retry-After`` header of its ``response``) is believed where that is longer.
    """

    attempts: int = 3
    on: type[BaseException] | tuple[type[BaseException], ...] = (Exception,)
    wait_s: float = 0.5
    multiplier: float = 2.0
    max_wait_s: float = 60.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        kinds = (self.on,) if isinstance(self.on, type) else tuple(self.on)
        object.__setattr__(self, "on", kinds)
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise PipelineError(f"Retry(attempts={self.attempts!r}): give a whole number of calls")
        if self.attempts < 1:
            raise PipelineError(f"Retry(attempts={self.attempts}): at least one call is needed")
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise PipelineError(f"Retry(on={self.on!r}): give exception classes")
        if min(self.wait_s, self.max_wait_s) < 0 or self.multiplier < 1 or self.jitter < 0:
            raise PipelineError(
                "Retry: wait_s, max_wait_s and jitter cannot be negative, multiplier not below 1"
            )

    def retries(self, error: BaseException) -> bool:
        """Whether this error is worth another call."""
        if isinstance(error, StepAborted) and error.__cause__ is not None:
            error = error.__cause__
        final = is_final(error)
        if final or isinstance(error, (OwnTrouble, asyncio.CancelledError)):
            return False
        return isinstance(error, self.on)

    def wait_after(self, error: BaseException | None, failed_calls: int, seed: int) -> float:
        """Seconds to wait after ``failed_calls`` calls; the same for the same ``seed``."""
        base = min(self.wait_s * self.multiplier ** (failed_calls - 1), self.max_wait_s)
        # The seed already is a hash, so its bits spread items without drawing from any clock.
        spread = ((seed >> (failed_calls % 32)) & 0xFFFF) / 0xFFFF
        return max(base * (1 + self.jitter * spread), asked_wait_s(error))

    async def call(
        self,
        function: Callable[[int], Awaitable[T]],
        *,
        seed: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> T:
        """Await ``function(retry)`` until it returns, or raise its last error."""

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return self.wait_after(error, state.attempt_number, seed)

        calls = 0

        async def once() -> T:
            nonlocal calls
            calls += 1
            return await function(calls - 1)

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=wait,
            retry=tenacity.retry_if_exception(self.retries),
            reraise=True,
            sleep=sleep,
        )
        return await retrying(once)


def asked_wait_s(error: BaseException | None, now: Clock = utc_now) -> float:
    """How long the error itself asks to wait, 0 where it does not say.

    It may say so in seconds, or, as HTTP servers do, as a date.
    """
    asked: Any = getattr(error, "retry_after", None)
    if asked is None:
        headers: Any = getattr(getattr(error, "response", None), "headers", None)
        asked = headers.get("Retry-After") if isinstance(headers, Mapping) else None
    if asked is None:
        return 0.0
    try:
        seconds = float(asked)
    except (TypeError, ValueError):
        seconds = _seconds_until(str(asked), now)
    # NaN and infinities are no answer; a wait without a bound would be a run without an end.
    return min(max(0.0, seconds), MAX_ASKED_WAIT_S) if math.isfinite(seconds) else 0.0


def _seconds_until(date: str, now: Clock) -> float:
    try:
        moment = parsedate_to_datetime(date)
        return max(0.0, (moment - now()).total_seconds())
    except (TypeError, ValueError):
        return 0.0  # no date either, or one without a zone: the exponential wait has to do
