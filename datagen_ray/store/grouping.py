"""Many callers' batches made into the rows of one WAL entry.

One caller's mistake fails that caller alone: a batch whose ids were used for other content, or
whose values cannot be encoded, is refused and the rest goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from datagen_ray.errors import InvalidEventError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.schema import encode_events
from datagen_ray.store.registry import UnflushedRows
from datagen_ray.store.waiters import Append

_ENCODING_ERRORS = (
    InvalidEventError,
    pa.ArrowException,
    AttributeError,
    OverflowError,
    TypeError,
    ValueError,
)


@dataclass(slots=True)
class Group:
    """The appends that stand, the refused ones, and the rows to write (None when none are new)."""

    accepted: list[Append]
    refused: list[tuple[Append, InvalidEventError]] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    batch: pa.RecordBatch | None = None
    duplicates: int = 0


def group_appends(appends: list[Append], registry: UnflushedRows) -> Group:
    """Combine batches, in order, leaving out rows that are written or come twice."""
    group = Group(appends)
    events = [event for append in appends for event in append.events]
    ids = [event.event_id for event in events]
    distinct = set(ids)
    if len(distinct) != len(ids) or not registry.knows_none_of(distinct):
        events = _sift(group, registry)
        ids = [event.event_id for event in events]
    if not events:
        return group
    try:
        group.batch = encode_events(events)
    except _ENCODING_ERRORS as error:
        return _without_the_unsound(group, registry, error)
    group.event_ids = ids
    return group


def _sift(group: Group, registry: UnflushedRows) -> list[DatagenEvent]:
    appends, group.accepted = group.accepted, []
    fresh: dict[str, DatagenEvent] = {}
    for append in appends:
        try:
            new = registry.without_known(append.events, fresh)
        except InvalidEventError as error:
            group.refused.append((append, error))
            continue
        group.duplicates += len(append.events) - len(new)
        fresh.update((event.event_id, event) for event in new)
        group.accepted.append(append)
    return list(fresh.values())


def _without_the_unsound(group: Group, registry: UnflushedRows, failure: Exception) -> Group:
    """Find whose batch it is that cannot be encoded, and combine the others."""
    sound = []
    refused = group.refused
    for append in group.accepted:
        try:
            encode_events(append.events)
        except _ENCODING_ERRORS as error:
            reason = InvalidEventError(
                f"an append cannot be stored: {error}; check the types of its values",
                code="cannot_encode",
            )
            reason.__cause__ = error
            refused.append((append, reason))
        else:
            sound.append(append)
    if len(sound) == len(group.accepted):
        raise failure  # no batch is to blame, so it is ours
    smaller = group_appends(sound, registry)
    smaller.refused = refused + smaller.refused
    return smaller
