"""The rows of one stream on their way into the log, in the order of their ``item_seq``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datagen_ray.errors import ConfigError, StorageError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.validate import batch_size_bytes
from datagen_ray.pipeline.endings import Drained
from datagen_ray.pipeline.places import Place
from datagen_ray.pipeline.sink import EventSink

if TYPE_CHECKING:
    _Future = asyncio.Future[None]
else:
    _Future = asyncio.Future  # the class itself, as a base, is not subscripted at run time

MOST_HELD_BYTES = 1 << 16
"""A larger batch goes alone, so that a limit of the sink is met by the step that is to blame."""


@dataclass
class Tally:
    """What one run of a root did."""

    steps_executed: int = 0
    checkpoints: int = 0
    failures: int = 0


class _Known(_Future):
    """Resolves once an outcome is known. A cancelled task waits for it all the same.

    The numbers of the rows are used up, and whoever runs the item next has to be able to read
    what became of them. The task's cancellation is raised when the wait is over.
    """

    def cancel(self, msg: Any = None) -> bool:  # noqa: ARG002 - the signature of a future
        return False


class Emitter:
    """Hands batches to the sink, and waits for those that have to be durable.

    What is emitted or queued is held until user code is to be called, and so goes with all that
    follows it without user code: where an item ends with a result, one batch holds both. What was
    emitted, such as a result, is waited for then.

    While it waits the stream is not within its root's ``place``.

    Once a batch is not known to be durable, every later call raises the same error: the stream
    must write nothing more until somebody has claimed the shard and read the log.
    """

    def __init__(self, sink: EventSink, tally: Tally, place: Place | None = None) -> None:
        self._sink = sink
        self._tally = tally
        self._place = place
        self._broken: BaseException | None = None
        self._held: list[DatagenEvent] = []
        self._held_checkpoints = 0
        self._owed = False
        self._last: asyncio.Future[None] | None = None
        self._unsettled: asyncio.Future[None] | None = None
        self._waiter: _Known | None = None

    def check(self) -> None:
        """Raise what became of a batch, if that was an error."""
        if self._broken is not None:
            raise self._broken

    def queue(self, events: Sequence[DatagenEvent], *, checkpoint: bool = False) -> None:
        """Take on what nobody has to wait for: the shard writes in order."""
        self.check()
        self._held += events
        self._held_checkpoints += checkpoint

    def emit(self, events: Sequence[DatagenEvent], *, checkpoint: bool = True) -> None:
        """Take on what has to be durable before user code is called again.

        Raises what the sink has against a large batch, which is not held.
        """
        if batch_size_bytes(events) > MOST_HELD_BYTES:
            self._append(events, int(checkpoint), owed=True)
        else:
            self.queue(events, checkpoint=checkpoint)
            self._owed = True

    async def settle(self) -> None:
        """Return when all that was emitted is durable; to be awaited before user code is called.

        Raises ``Drained`` where no user code is to be called any more. Then all that was handed
        over is durable, since another worker may go on with the item at once.
        """
        self._hand_over()
        try:
            await self._outcome(self._place)
            if self._place is not None:
                self._place.check()
        except Drained:
            await self._everything_durable()
            raise

    async def finish(self) -> None:
        """Leave the place for good, and return when all that was emitted is durable."""
        self._hand_over()
        if self._place is not None:
            self._place.leave()
        await self._outcome(None)

    async def commit(self, events: Sequence[DatagenEvent], *, checkpoint: bool = False) -> None:
        """Return when the batch, and so all before it, is durable."""
        self._append(events, int(checkpoint), owed=True)
        await self._outcome(self._place)

    async def _everything_durable(self) -> None:
        if self._last is not None:
            # The shard writes in order, so the last batch stands for all.
            self._unsettled = self._last
            await self._outcome(None)

    def _hand_over(self) -> None:
        if self._held:
            self._append((), 0, owed=self._owed)

    def _append(self, events: Sequence[DatagenEvent], checkpoints: int, *, owed: bool) -> None:
        """Hand over what is held and the events behind it, as one batch; ``owed`` is waited for."""
        self.check()
        try:
            future = asyncio.ensure_future(self._sink.append_async([*self._held, *events]))
        except ConfigError as error:
            # The sink was closed under a walk: nothing that the item could be blamed for.
            raise StorageError(f"the log cannot be written to any more: {error}") from error
        checkpoints += self._held_checkpoints
        self._held = []
        self._held_checkpoints = 0
        self._owed = False
        self._last = future
        if owed:
            self._unsettled = future

        def settled(done: asyncio.Future[None]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                self._broken = self._broken or error
            else:
                self._tally.checkpoints += checkpoints
            if self._last is done:
                self._last = None
            if self._unsettled is done:
                self._unsettled = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(None)

        future.add_done_callback(settled)

    async def _outcome(self, place: Place | None) -> None:
        if self._unsettled is not None:
            self._waiter = _Known(loop=asyncio.get_running_loop())
            if place is not None:
                place.leave()
            await self._waiter
            if place is not None and self._broken is None:
                await place.enter()
        self.check()
