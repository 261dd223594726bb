"""The rows of one stream on their way to the sink: what goes together, what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from datagen_ray.errors import ConfigError, InvalidEventError, StorageError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.emitter import MOST_HELD_BYTES, Emitter, Tally
from datagen_ray.pipeline.endings import Drained
from datagen_ray.pipeline.places import Places
from tests.log.builders import created, field_set

A, B, C, D = (created(seq) for seq in (1, 2, 3, 4))
LARGE = field_set(5, "x" * MOST_HELD_BYTES)


class HeldSink:
    """Keeps every batch until the test says what becomes of it."""

    writer_epoch = "slot:1"

    def __init__(self) -> None:
        self.batches: list[list[DatagenEvent]] = []
        self.futures: list[asyncio.Future[None]] = []
        self.refuse: Exception | None = None

    def append_async(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        if self.refuse is not None:
            raise self.refuse
        self.batches.append(list(events))
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]


def trial(
    test: Callable[[Emitter, HeldSink, Tally], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        sink, tally = HeldSink(), Tally()
        asyncio.run(test(Emitter(sink, tally), sink, tally))

    run.__name__ = test.__name__
    return run


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@trial
async def test_all_that_is_taken_on_before_user_code_runs_goes_as_one_batch(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.queue([A], checkpoint=True)
    emitter.emit([B])
    emitter.queue([C])
    await turns()
    assert not sink.batches
    settled = asyncio.ensure_future(emitter.settle())
    await turns()
    assert sink.batches == [[A, B, C]]
    assert not settled.done()
    sink.futures[0].set_result(None)
    await settled
    assert tally.checkpoints == 2


@trial
async def test_a_large_batch_is_handed_over_at_once_with_what_is_held(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.queue([A])
    emitter.emit([LARGE])
    assert sink.batches == [[A, LARGE]]
    sink.futures[0].set_result(None)
    await emitter.settle()
    assert tally.checkpoints == 1


@trial
async def test_queued_rows_are_handed_over_before_user_code_runs_and_not_waited_for(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.queue([A], checkpoint=True)
    await emitter.settle()
    assert sink.batches == [[A]]
    assert tally.checkpoints == 0


@trial
async def test_a_large_result_is_waited_for_and_what_is_queued_behind_it_is_not(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.emit([LARGE])
    emitter.queue([B])
    settled = asyncio.ensure_future(emitter.settle())
    await turns()
    assert sink.batches == [[LARGE], [B]]
    assert not settled.done()
    sink.futures[0].set_result(None)
    await settled
    assert tally.checkpoints == 1


@trial
async def test_a_cancelled_wait_goes_on_until_the_outcome_is_known(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    waiting = asyncio.ensure_future(emitter.commit([A], checkpoint=True))
    await turns()
    waiting.cancel()
    await turns()
    assert not waiting.done()
    assert not sink.futures[0].cancelled()
    sink.futures[0].set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tally.checkpoints == 1


@trial
async def test_nothing_is_handed_over_after_a_batch_that_failed(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.emit([A])
    emitter.queue([B])
    settled = asyncio.ensure_future(emitter.settle())
    await turns()
    sink.futures[0].set_exception(StorageError("full"))
    with pytest.raises(StorageError):
        await settled
    for call in (lambda: emitter.queue([C]), lambda: emitter.emit([C]), emitter.check):
        with pytest.raises(StorageError, match="full"):
            call()
    with pytest.raises(StorageError, match="full"):
        await emitter.commit([D])
    assert tally.checkpoints == 0


@trial
async def test_rows_that_are_refused_do_not_take_queued_rows_with_them(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    emitter.queue([A])
    sink.refuse = InvalidEventError("too large", code="x")
    with pytest.raises(InvalidEventError):
        emitter.emit([LARGE])
    sink.refuse = None
    emitter.emit([C])
    settled = asyncio.ensure_future(emitter.settle())
    await turns()
    assert sink.batches == [[A, C]]
    sink.futures[0].set_result(None)
    await settled


@trial
async def test_a_closed_sink_is_trouble_of_the_storage(
    emitter: Emitter, sink: HeldSink, tally: Tally
) -> None:
    sink.refuse = ConfigError("closed")
    emitter.emit([A])
    with pytest.raises(StorageError, match="cannot be written to any more"):
        await emitter.settle()


def refused_stream(
    test: Callable[[asyncio.Task[None], HeldSink], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Settling a queued row of a root that is to have no place any more."""

    async def scene() -> None:
        sink, place = HeldSink(), Places(1).try_begin()
        assert place is not None
        emitter = Emitter(sink, Tally(), place)
        place.refuse()
        emitter.queue([A])
        settled = asyncio.create_task(emitter.settle())
        await turns()
        assert sink.batches == [[A]]
        assert not settled.done()
        await test(settled, sink)

    def run() -> None:
        asyncio.run(scene())

    run.__name__ = test.__name__
    return run


@refused_stream
async def test_a_stream_that_is_drained_has_all_its_rows_in_the_log(
    settled: asyncio.Task[None], sink: HeldSink
) -> None:
    """Another worker may go on with it at once, and must not find a row come in later."""
    sink.futures[0].set_result(None)
    with pytest.raises(Drained):
        await settled


@refused_stream
async def test_a_stream_whose_last_rows_are_in_doubt_is_not_called_drained(
    settled: asyncio.Task[None], sink: HeldSink
) -> None:
    sink.futures[0].set_exception(StorageError("full"))
    with pytest.raises(StorageError):
        await settled
