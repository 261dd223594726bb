"""Those who wait for an append: threads on a future, coroutines on their loop's future.

One WAL entry serves many appends. Waking a loop from another thread costs a system call, so all
waiters of one loop are woken by one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeAlias

from datagen_ray.log.events import DatagenEvent

Waiter: TypeAlias = "Future[None] | asyncio.Future[None]"


@dataclass(eq=False, slots=True)
class Append:
    """One caller's batch in the queue, and the future that tells its outcome."""

    events: Sequence[DatagenEvent]
    size_bytes: int
    waiter: Waiter


def settle(appends: Iterable[Append], error: BaseException | None = None) -> None:
    """Tell the outcome to every waiter: durable, or why not. Callable from any thread."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for append in appends:
        waiter = append.waiter
        if isinstance(waiter, asyncio.Future):
            loops.setdefault(waiter.get_loop(), []).append(waiter)
        else:
            _settle_future(waiter, error)
    for loop, waiters in loops.items():
        try:
            loop.call_soon_threadsafe(_settle_on_loop, waiters, error)
        except RuntimeError:
            # The loop is closed, so nobody can be waiting on it any more.
            if not loop.is_closed():
                raise


def _settle_future(waiter: Future[None], error: BaseException | None) -> None:
    try:
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
    except InvalidStateError:
        # Cancelled by its caller, who does not ask for the outcome any more.
        if not waiter.cancelled():
            raise


def _settle_on_loop(waiters: list[asyncio.Future[None]], error: BaseException | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue  # cancelled by its caller; the rows are written all the same
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
