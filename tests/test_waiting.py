"""Waiting for something, but not for ever."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import datagen_ray
from datagen_ray.waiting import within


def trial(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    run.__name__ = test.__name__
    return run


async def never() -> None:
    await asyncio.Event().wait()


@trial
async def test_what_comes_in_time_is_returned_or_raised() -> None:
    async def fails() -> None:
        raise KeyError("x")

    assert await within(asyncio.sleep(0, "value"), 10) == "value"
    assert await within(asyncio.sleep(0, "value"), None) == "value"
    with pytest.raises(KeyError):
        await within(fails(), 10)


@trial
async def test_what_does_not_come_in_time_is_cancelled_and_has_ended() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    with pytest.raises(asyncio.TimeoutError):
        await within(slow(), 0.001)
    assert ended == ["slow"]


@trial
async def test_a_caller_that_is_cancelled_cancels_what_it_waits_for() -> None:
    inner = asyncio.ensure_future(never())
    outer = asyncio.ensure_future(within(inner, 10))
    await asyncio.sleep(0)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert inner.cancelled()


@pytest.mark.parametrize("outcome", [None, ValueError("lost")])
def test_a_cancellation_is_heard_also_when_the_answer_comes_at_the_same_time(
    outcome: Exception | None,
) -> None:
    async def scene() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outer = asyncio.ensure_future(within(answer, 10))
        await asyncio.sleep(0)
        if outcome is None:
            answer.set_result(None)
        else:
            answer.set_exception(outcome)
        await asyncio.sleep(0)  # the wait is over, and the caller has not been told yet
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(asyncio.wait_for(scene(), 30))


@trial
async def test_what_was_cancelled_by_another_is_not_called_late() -> None:
    inner = asyncio.ensure_future(never())
    outer = asyncio.ensure_future(within(inner, 10))
    await asyncio.sleep(0)
    inner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer


def test_nothing_in_the_package_waits_in_a_way_that_forgets_cancellations() -> None:
    package = Path(datagen_ray.__file__).parent
    for path in package.rglob("*.py"):
        assert not re.search(r"asyncio\.wait_for\(", path.read_text(encoding="utf-8")), path
