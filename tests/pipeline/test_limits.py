"""Limits that the workers of a run share: rates, permits, pauses, holders that die."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from datagen_ray.pipeline import gate as gates
from datagen_ray.pipeline import limits
from datagen_ray.pipeline.gate import Gate, Holder
from datagen_ray.pipeline.limits import LEASE_S, Ledger, RateLimit
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.retry import Retry, asked_wait_s
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import run


class Time:
    """A clock that runs on when somebody sleeps on it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def waits_of(limit: RateLimit, asks: list[int]) -> list[float]:
    time = Time()
    ledger = Ledger(time, time.sleep)

    async def ask() -> list[float]:
        got: list[float] = []
        for calls in asks:
            left = calls
            while left:
                waits = await ledger.reserve("s", limit, left)
                left -= len(waits)
                got += [round(time.now + wait, 6) for wait in waits]
        return got

    return asyncio.run(ask())


def test_calls_are_spread_evenly() -> None:
    assert waits_of(RateLimit(4), [3, 3]) == [0, 0.25, 0.5, 0.75, 1.0, 1.25]
    assert waits_of(RateLimit(10, per_s=60), [3]) == [0, 6, 12]


def test_a_burst_comes_at_once_and_is_paid_for() -> None:
    assert waits_of(RateLimit(1, burst=3), [5]) == [0, 0, 0, 1, 2]


def test_no_place_is_promised_far_ahead_so_a_pause_holds_for_all() -> None:
    time = Time()
    ledger = Ledger(time, time.sleep)
    limit = RateLimit(1)

    async def ask() -> tuple[list[float], float]:
        first = await ledger.reserve("s", limit, 100)
        await ledger.pause("s", 60)
        while not (second := await ledger.reserve("s", limit, 1)):
            pass
        return first, time.now + second[0]

    first, second = asyncio.run(ask())
    assert first == [0, 1]
    assert second == 60


def test_permits_are_shared_and_given_back() -> None:
    async def play() -> None:
        ledger = Ledger()
        assert await ledger.take("s", 3, "a", 2) == 2
        assert await ledger.take("s", 3, "b", 5) == 1
        waiting = asyncio.ensure_future(ledger.take("s", 3, "b", 5))
        await asyncio.sleep(0)
        assert not waiting.done()
        await ledger.give_back("s", "a", 1)
        assert await waiting == 1

    asyncio.run(play())


def test_permits_of_a_holder_that_died_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POLL_S", 0)

    async def play() -> None:
        time = Time()
        ledger = Ledger(time)
        assert await ledger.take("s", 1, "dead", 1) == 1
        time.now = LEASE_S - 1
        await ledger.renew("dead", {"s": 1})
        time.now = LEASE_S + 1
        assert await ledger.take("s", 1, "b", 1) == 0
        time.now = 3 * LEASE_S
        assert await ledger.take("s", 1, "b", 1) == 1

    asyncio.run(play())


def test_a_new_ledger_learns_who_holds_what() -> None:
    async def play() -> None:
        ledger = Ledger()
        await ledger.renew("a", {"s": 2})
        assert await ledger.take("s", 3, "b", 5) == 1

    asyncio.run(play())


def in_gate(play: Callable[[Gate, Ledger], Awaitable[None]], **options: Any) -> None:
    async def all_of_it() -> None:
        ledger = Ledger()
        holder = Holder(ledger)
        options.setdefault("rate", None)
        await play(Gate("s", holder, in_flight=("s", 2), **options), ledger)
        holder.close()
        # All that was taken was given back, whoever was cancelled when.
        assert await ledger.take("s", 2, "other", 2) == 2

    asyncio.run(all_of_it())


def test_a_gate_lets_no_more_through_than_its_limit() -> None:
    async def play(gate: Gate, ledger: Ledger) -> None:
        inside = most = 0

        async def call() -> None:
            nonlocal inside, most
            async with gate.one_call():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(call() for _ in range(20)))
        assert most == 2

    in_gate(play)


@pytest.mark.parametrize("turns", range(8))
def test_a_cancelled_call_leaves_no_permit_behind(turns: int) -> None:
    async def play(gate: Gate, ledger: Ledger) -> None:
        async def call() -> None:
            async with gate.one_call():
                await asyncio.sleep(0)

        calls = [asyncio.ensure_future(call()) for _ in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in calls[::2]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    in_gate(play)


def test_a_wait_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gates, "NOTE_S", -1)

    async def play(gate: Gate, ledger: Ledger) -> None:
        async with gate.one_call():
            pass

    with caplog.at_level(logging.WARNING):
        in_gate(play, rate=("s", RateLimit(1000)))
    assert "1 calls wait for its limit of 1000 calls every 1 s" in caplog.text


def test_steps_run_through_their_limits() -> None:
    inside: list[int] = [0, 0]

    @step(max_in_flight_run=1, rate_limit=RateLimit(10_000, name="service"))
    async def ask(item: Any) -> None:
        inside[0] += 1
        inside[1] = max(inside)
        await asyncio.sleep(0)
        inside[0] -= 1

    from datagen_ray.pipeline.nodes import MapReduce

    fan = MapReduce("m", split=lambda item: [{}] * 9, each=ask, reduce=lambda r: {"n": len(r)})
    result, log = run(Pipeline("p", [fan]))
    assert (result.status, log.fields()["n"], inside[1]) == ("completed", 9, 1)


def test_what_a_service_asks_for_pauses_the_rate_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[tuple[str, float]] = []

    async def pause(self: Ledger, name: str, seconds: float) -> None:
        paused.append((name, seconds))

    monkeypatch.setattr(Ledger, "pause", pause)

    class Busy(Exception):
        retry_after = 0.001

    calls: list[int] = []

    @step(rate_limit=1000, retry=Retry(attempts=2, wait_s=0))
    async def ask(item: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Busy

    result, _ = run(Pipeline("p", [ask]))
    assert (result.status, len(calls)) == ("completed", 2)
    assert paused == [("step ask", 0.001)]


def test_retry_after_may_be_a_date() -> None:
    class Busy(Exception):
        retry_after = "Wed, 21 Oct 2015 07:28:30 GMT"

    now = datetime(2015, 10, 21, 7, 28, 0, tzinfo=timezone.utc)
    assert asked_wait_s(Busy(), lambda: now) == 30
    Busy.retry_after = "soon"
    assert asked_wait_s(Busy(), lambda: now) == 0
