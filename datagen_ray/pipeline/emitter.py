"""The rows of one stream on their way into the log, in the order of their ``item_seq``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from datagen_ray.errors import ConfigError, StorageError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.sink import EventSink


@dataclass
class Tally:
    """What one run of a root did."""

    steps_executed: int = 0
    checkpoints: int = 0
    failures: int = 0


class Emitter:
    """Hands batches to the sink; each is waited for, now or by a later :meth:`settle`, or queued.

    A result is emitted, and waited for before user code is called again: where an item ends with
    it, its end is in the log with one wait for both.

    Once a batch is not known to be durable, every later call raises the same error: the stream
    must write nothing more until somebody has claimed the shard and read the log.
    """

    def __init__(self, sink: EventSink, tally: Tally) -> None:
        self._sink = sink
        self._tally = tally
        self._broken: BaseException | None = None
        self._unsettled: asyncio.Future[None] | None = None

    def check(self) -> None:
        """Raise what became of a queued batch, if that was an error."""
        if self._broken is not None:
            raise self._broken

    def _append(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        self.check()
        try:
            return asyncio.ensure_future(self._sink.append_async(events))
        except ConfigError as error:
            # The sink was closed under a walk: nothing that the item could be blamed for.
            raise StorageError(f"the log cannot be written to any more: {error}") from error

    def emit(self, events: Sequence[DatagenEvent]) -> None:
        """Hand over a checkpoint that has to be durable before user code is called again."""
        self._unsettled = self._queued(events, checkpoint=True)

    async def settle(self) -> None:
        """Return when all that was emitted is durable; to be awaited before user code is called."""
        future, self._unsettled = self._unsettled, None
        if future is not None:
            # Also of one that is done: the callback that notes its error may not have run yet.
            await self._outcome(future)
        self.check()

    def queue(self, events: Sequence[DatagenEvent], *, checkpoint: bool = False) -> None:
        """Hand the batch over without waiting: the shard writes in order."""
        self._queued(events, checkpoint=checkpoint)

    def _queued(self, events: Sequence[DatagenEvent], *, checkpoint: bool) -> asyncio.Future[None]:
        future = self._append(events)

        def settled(done: asyncio.Future[None]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                self._broken = self._broken or error
            elif checkpoint:
                self._tally.checkpoints += 1

        future.add_done_callback(settled)
        return future

    async def commit(self, events: Sequence[DatagenEvent], *, checkpoint: bool = False) -> None:
        """Return when the batch, and so all before it, is durable."""
        await self._outcome(self._append(events))
        self._unsettled = None
        self.check()
        if checkpoint:
            self._tally.checkpoints += 1

    async def _outcome(self, future: asyncio.Future[None]) -> None:
        """Wait until it is known, also when cancelled.

        The numbers of the rows are used up, and whoever runs the item next has to be able to read
        what became of them.
        """
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                await asyncio.wait([future])
            raise
