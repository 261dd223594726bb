"""What an executor needs of the storage, said as protocols: it knows nothing of the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from datagen_ray.log.events import DatagenEvent


class EventSink(Protocol):
    """Takes batches of events and tells when they are durable.

    ``append_async`` queues the batch before it returns, so batches become durable in the order of
    the calls. What it returns resolves once the batch is durable, and raises ``StorageError``,
    ``WriterFencedError`` or ``WriterPoisonedError`` where that is not so, or not known.
    """

    @property
    def writer_epoch(self) -> str:
        """The identity of the live writer, ``<slot>:<epoch>``."""
        ...

    def append_async(self, events: Sequence[DatagenEvent]) -> Awaitable[None]: ...


class BlobLoader(Protocol):
    """Fetches the bytes of one blob value."""

    async def load(self, event_id: str) -> bytes: ...
