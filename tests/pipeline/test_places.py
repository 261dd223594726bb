"""Places: who may run user code, who waits, and that no place is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from datagen_ray.pipeline.endings import Drained
from datagen_ray.pipeline.executor import Executor, RootTask
from datagen_ray.pipeline.nodes import MapReduce, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.places import SPAN_S, Place, Places, most_begun
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import ListLog, ListSink, durable_completions, run_once


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def trial(
    test: Callable[[HandClock], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(HandClock()), 30))

    run.__name__ = test.__name__
    return run


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def begun(places: Places) -> Place:
    place = places.try_begin()
    assert place is not None
    return place


def wait_long_enough_to_matter(place: Place, clock: HandClock) -> None:
    """The root of ``place`` waits for the log, for so long that more roots are worth beginning."""
    place.leave()
    clock.now_s += SPAN_S


def test_as_many_again_may_be_begun_and_none_beside_a_single_one() -> None:
    assert [most_begun(count) for count in (1, 2, 4, 256)] == [1, 3, 7, 511]


@trial
async def test_no_more_roots_begin_than_there_are_places(clock: HandClock) -> None:
    places = Places(2, clock_s=clock)
    first = begun(places)
    begun(places)
    assert places.try_begin() is None
    waiting = asyncio.ensure_future(places.begin())
    await turns()
    assert not waiting.done()
    first.end()
    await waiting


@trial
async def test_where_the_log_takes_little_no_root_begins_while_another_waits(
    clock: HandClock,
) -> None:
    places = Places(2, clock_s=clock)
    first = begun(places)
    begun(places)
    for _ in range(100):
        clock.now_s += 10.0
        first.leave()
        clock.now_s += 0.01
        assert places.try_begin() is None
        await first.enter()


@trial
async def test_where_the_log_takes_long_another_root_begins_and_the_one_that_waited_comes_next(
    clock: HandClock,
) -> None:
    places = Places(2, clock_s=clock)
    first, second = begun(places), begun(places)
    wait_long_enough_to_matter(first, clock)
    await first.enter()
    wait_long_enough_to_matter(first, clock)
    third = begun(places)
    assert places.try_begin() is None, "as many again but for one, and not more"
    back = asyncio.ensure_future(first.enter())
    new = asyncio.ensure_future(places.begin())
    await turns()
    assert not back.done()
    second.end()
    await back
    assert not new.done(), "what was begun comes before what is new"
    third.end()
    await new


@trial
async def test_a_place_is_kept_until_the_last_stream_left_it(clock: HandClock) -> None:
    places = Places(1, clock_s=clock)
    place = begun(places)
    place.join()
    place.leave()
    other = asyncio.ensure_future(places.begin())
    await turns()
    assert not other.done()
    place.leave()
    await asyncio.gather(place.enter(), place.enter())
    place.end()
    await other


@trial
async def test_whoever_gives_places_out_is_told_when_one_is_free(clock: HandClock) -> None:
    told: list[Place | None] = []
    places = Places(1, when_free=lambda: told.append(places.try_begin()), clock_s=clock)
    begun(places).end()
    assert len(told) == 1
    assert told[0] is not None


@trial
async def test_a_root_that_is_cancelled_while_it_waits_for_a_place_takes_none(
    clock: HandClock,
) -> None:
    places = Places(1, clock_s=clock)
    first = begun(places)
    unlucky = asyncio.ensure_future(places.begin())
    granted = asyncio.ensure_future(places.begin())
    await turns()
    unlucky.cancel()
    await turns()
    first.end()
    granted.cancel()  # its turn has come, and it has not noticed yet
    with pytest.raises(asyncio.CancelledError):
        await granted
    begun(places)


@pytest.mark.parametrize("seed", range(30))
def test_no_place_is_lost_whatever_the_roots_do(seed: int) -> None:
    """Roots of several streams that run, wait, are cancelled and end, in a random order."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    inside: set[int] = set()
    most = 0

    async def stream(root: int, place: Place, users: list[int]) -> None:
        nonlocal most
        for _ in range(rng.randint(0, 4)):
            users[0] += 1
            inside.add(root)
            most = max(most, len(inside))
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            users[0] -= 1
            if not users[0]:
                inside.discard(root)
            place.leave()
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            await place.enter()
        place.leave()

    async def root(number: int, places: Places) -> None:
        place = await places.begin()
        users = [0]
        try:
            others = rng.randint(0, 2)
            for _ in range(others):
                place.join()
            await asyncio.gather(*(stream(number, place, users) for _ in range(others + 1)))
        finally:
            inside.discard(number)
            place.end()

    async def main() -> None:
        places = Places(count)
        tasks = [asyncio.ensure_future(root(number, places)) for number in range(40)]
        for task in rng.sample(tasks, 10):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        left = [places.try_begin() for _ in range(count)]
        assert None not in left, "every place is free again"
        assert places.try_begin() is None, "and none was made up"

    asyncio.run(asyncio.wait_for(main(), 60))
    assert 1 <= most <= count


class Calls:
    """A pipeline of two steps and a fan-out, and who is in them."""

    def __init__(self) -> None:
        self.inside: dict[str, int] = {}
        self.most = 0
        self.order: list[str] = []

        async def call(_: Any, ctx: Any) -> dict[str, Any]:
            root = ctx.root_id
            self.inside[root] = self.inside.get(root, 0) + 1
            self.most = max(self.most, len(self.inside))
            self.order.append(root)
            await asyncio.sleep(0.001)
            self.inside[root] -= 1
            if not self.inside[root]:
                del self.inside[root]
            return {f"v{ctx.position.step_index}": 1}

        def reduce(results: Any) -> dict[str, Any]:
            return {"count": len(results)}

        fan = MapReduce("m", split=lambda _: [{}] * 3, each=step(name="c")(call), reduce=reduce)
        self.pipeline = Pipeline("p", [step(name="a")(call), step(name="b")(call), fan])


def run_all(
    pipeline: Pipeline, count: int, sink: type[ListSink] = ListSink, **options: Any
) -> None:
    """So many roots at once, to their ends."""

    async def main() -> None:
        log = ListLog()
        executor = Executor(pipeline, sink(log), run_id="r", blobs=log, **options)
        await executor.start()
        tasks = [RootTask(str(number), {}) for number in range(count)]
        results = await asyncio.gather(*(executor.run(task) for task in tasks))
        assert [result.status for result in results] == ["completed"] * count
        await executor.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("places", [1, 2, 8])
def test_steps_of_no_more_roots_run_at_a_time_than_there_are_places(places: int) -> None:
    calls = Calls()

    run_all(calls.pipeline, 40, max_in_flight_roots=places)
    assert calls.most == places
    if places == 1:
        assert calls.order == sorted(calls.order, key=int), "one root after the other"


def test_roots_that_wait_for_a_slow_log_let_others_begin() -> None:
    calls = Calls()
    open_roots: set[str] = set()
    most = 0

    def observe(_: str, item_id: str, __: Any) -> None:
        nonlocal most
        open_roots.add(item_id.partition("/")[0])
        most = max(most, len(open_roots))

    class SlowSink(ListSink):
        def append_async(self, events: Any) -> asyncio.Future[None]:
            loop = asyncio.get_running_loop()
            taken = super().append_async(events)
            late: asyncio.Future[None] = loop.create_future()
            for event in events:
                if event.status is not None and event.item_id == event.root_item_id:
                    open_roots.discard(event.item_id)
            taken.add_done_callback(lambda _: loop.call_later(0.01, late.set_result, None))
            return late

    run_all(calls.pipeline, 60, SlowSink, max_in_flight_roots=4, observe=observe)
    assert most == most_begun(4)
    assert calls.most <= 4


@trial
async def test_time_alone_lets_another_root_begin_while_the_log_takes_long(
    clock: HandClock,
) -> None:
    places = Places(2, clock_s=clock)
    first = begun(places)
    begun(places)
    first.leave()
    assert places.try_begin() is None
    clock.now_s += SPAN_S
    begun(places)


@trial
async def test_roots_begin_in_the_order_in_which_they_asked(clock: HandClock) -> None:
    places = Places(2, clock_s=clock)
    first = begun(places)
    begun(places)
    first.leave()
    early = asyncio.ensure_future(places.begin())
    await turns()
    clock.now_s += SPAN_S  # one more is worth beginning now
    late = asyncio.ensure_future(places.begin())
    await turns()
    assert not late.done()
    await first.enter()
    first.end()
    await early
    assert not late.done()
    late.cancel()


@trial
async def test_where_no_code_is_to_begin_all_that_ask_are_drained_and_give_their_places_back(
    clock: HandClock,
) -> None:
    places = Places(2, clock_s=clock)
    running, other = begun(places), begun(places)
    wait_long_enough_to_matter(running, clock)
    begun(places)
    returning = asyncio.ensure_future(running.enter())
    new = asyncio.ensure_future(places.begin())
    await turns()
    places.close()
    for asked in (returning, new):
        with pytest.raises(Drained):
            await asked
    with pytest.raises(Drained):
        await places.begin()
    with pytest.raises(Drained):
        other.check()
    assert places.try_begin() is None
    for place in (running, other):
        place.end()


def test_a_drain_lets_the_steps_of_all_sub_items_end_and_loses_none() -> None:
    """A fan-out whose sub-items are in their first of two steps, told to end, then resumed."""
    ran: list[str] = []
    gate = asyncio.Event()

    @step
    async def one(_: Any, ctx: Any) -> dict[str, Any]:
        ran.append(f"one {ctx.item_id}")
        await gate.wait()
        return {"x": 1}

    @step
    async def two(_: Any, ctx: Any) -> None:
        ran.append(f"two {ctx.item_id}")

    def reduce(results: Any) -> dict[str, Any]:
        return {"count": len(results)}

    fan = MapReduce("m", split=lambda _: [{}] * 3, each=Sequence("s", [one, two]), reduce=reduce)
    pipeline = Pipeline("p", [fan])

    async def main() -> None:
        log = ListLog()
        executor = Executor(pipeline, ListSink(log), run_id="r", blobs=log)
        await executor.start()
        run = asyncio.ensure_future(executor.run(RootTask("5", {})))
        while len(ran) < 3:
            await asyncio.sleep(0)
        executor.drain()
        gate.set()
        with pytest.raises(Drained):
            await run
        await executor.close()
        assert sorted(ran) == [f"one 5/m:{n}" for n in range(3)]
        assert sum("one[" in at for _, at in durable_completions(log.events)) == 3

        result = await run_once(pipeline, log, None, sink=ListSink(log, epoch=2))
        assert result.status == "completed"
        assert sorted(ran)[3:] == [f"two 5/m:{n}" for n in range(3)]

    asyncio.run(asyncio.wait_for(main(), 30))
