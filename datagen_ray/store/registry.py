"""The rows that a writer put and that no SSTable holds yet, by event id.

A retry of an append whose outcome was unknown brings the same ids again. If the content is the
same, there is nothing to write; if it is not, that must be refused before anything is written,
since the log never replaces a row. The encoded batches are kept rather than digests of rows: a
batch shares its buffers with what Lance was handed, and costs nothing until an id does come back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from datagen_ray.errors import InvalidEventError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.schema import decode_batch


@dataclass(eq=False, slots=True)
class Entry:
    """One WAL entry: its rows, and its position once it is durable."""

    first_row: int
    batch: pa.RecordBatch
    event_ids: list[str]
    position: int | None = None


class UnflushedRows:
    """Every row of the entries that are not known to be in an SSTable. Used by one thread."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._entries: list[Entry] = []
        self._next_row = 0

    def __len__(self) -> int:
        return len(self._rows)

    def knows_none_of(self, event_ids: Iterable[str]) -> bool:
        return self._rows.keys().isdisjoint(event_ids)

    def add(self, batch: pa.RecordBatch, event_ids: list[str]) -> Entry:
        """Register rows, whose ids must all be new, before they are put."""
        entry = Entry(self._next_row, batch, event_ids)
        end = self._next_row + len(event_ids)
        self._rows.update(zip(event_ids, range(self._next_row, end), strict=True))
        self._next_row = end
        self._entries.append(entry)
        return entry

    def find(self, event_id: str) -> DatagenEvent | None:
        """The registered row of an id, decoded."""
        row = self._rows.get(event_id)
        if row is None:
            return None
        index = bisect_right(self._entries, row, key=lambda entry: entry.first_row) - 1
        entry = self._entries[index]
        return decode_batch(entry.batch.slice(row - entry.first_row, 1))[0]

    def forget_flushed(self, replay_after: int) -> None:
        """Drop the entries that SSTables hold, by the position that a manifest names."""
        kept = []
        for entry in self._entries:
            if entry.position is not None and entry.position <= replay_after:
                for event_id in entry.event_ids:
                    del self._rows[event_id]
            else:
                kept.append(entry)
        self._entries = kept

    def forget(self, entry: Entry) -> None:
        """Drop an entry that was refused and so never written."""
        for event_id in entry.event_ids:
            del self._rows[event_id]
        self._entries.remove(entry)

    def without_known(
        self, events: Sequence[DatagenEvent], others: dict[str, DatagenEvent]
    ) -> list[DatagenEvent]:
        """The events that are not written yet; ``others`` are about to be, in the same entry.

        Raises InvalidEventError (code ``conflicting_retry``) when an id comes back with other
        content.
        """
        fresh: dict[str, DatagenEvent] = {}
        for index, event in enumerate(events):
            event_id = event.event_id
            earlier = others.get(event_id) or fresh.get(event_id) or self.find(event_id)
            if earlier is None:
                fresh[event_id] = event
            elif earlier.content() != event.content() or earlier.value != event.value:
                raise InvalidEventError(
                    f"event {event_id} of item {event.item_id} was appended before with other "
                    "content; a retry must bring the identical event, also its event_ts and "
                    "writer_epoch",
                    code="conflicting_retry",
                    index=index,
                )
        return list(fresh.values())
