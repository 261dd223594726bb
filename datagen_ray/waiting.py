"""Waiting for something, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(awaitable: Awaitable[T], timeout_s: float | None) -> T:
    """As ``asyncio.wait_for``, also where that forgets a cancellation: before Python 3.12.

    There, a task that is cancelled just when what it waits for is done goes on as if nothing had
    happened (python/cpython#86296), and whoever waits for its end waits for ever.

    Raises ``asyncio.TimeoutError`` after ``timeout_s`` seconds; None is without end. What is waited
    for is cancelled then, or when the caller is, and has ended when this returns.
    """
    if timeout_s is None:
        return await awaitable
    future = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait((future,), timeout=timeout_s)
        timed_out = not future.done()
        if timed_out:
            future.cancel()
            await asyncio.wait((future,))
    except asyncio.CancelledError:
        future.cancel()
        await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()  # seen; the cancellation is what the caller hears of
        raise
    if timed_out and future.cancelled():
        raise asyncio.TimeoutError
    return future.result()
