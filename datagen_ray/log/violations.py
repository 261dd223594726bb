"""What a log must not hold: the kinds of violation, and finding them in rows and in items.

Writing is strict, reading is tolerant: a row that another program wrote is read as far as it makes
sense, and what is wrong with it is listed here, by item. :func:`row_violation` looks at one row,
:func:`item_violations` at all events of one item, :func:`tree_violations` at the items of one root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from datagen_ray.errors import InvalidEventError, InvalidItemIdError, ItemViolationError
from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.fold import fold_datagen_events
from datagen_ray.log.validate import check_stored_event

_T = DatagenEventType

MAX_EVENT_IDS = 20
"""Ids that one violation names; an item with more of the same kind is found by its id."""


class LogViolationKind(str, Enum):
    """What is wrong. ``meaning`` explains it, ``cure`` says what to do."""

    CREATED_NOT_FIRST = "created_not_first"
    NEVER_CREATED = "never_created"
    CREATED_TWICE = "created_twice"
    AFTER_TERMINAL = "after_terminal"
    ITEM_SEQ_GAP = "item_seq_gap"
    CONFLICTING_ITEM_SEQ = "conflicting_item_seq"
    EVENT_ID_REUSED = "event_id_reused"
    MIXED_SET_APPEND = "mixed_set_append"
    FIELD_KIND_CHANGE = "field_kind_change"
    APPEND_CODEC_CHANGE = "append_codec_change"
    BAD_ITEM_ID = "bad_item_id"
    ROOT_OR_PARENT_MISMATCH = "root_or_parent_mismatch"
    PARENT_MISSING = "parent_missing"
    NEWER_FORMAT = "newer_format"
    ROW_BREAKS_RULE = "row_breaks_rule"
    UNREADABLE_VALUE = "unreadable_value"
    BLOB_MISMATCH = "blob_mismatch"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def meaning(self) -> str:
        return _TEXTS[self][0]

    @property
    def cure(self) -> str:
        return _TEXTS[self][1]


_K = LogViolationKind
_NOT_RUN = "the item is left alone by runs; give its row a new key to run it again"
_TEXTS: Mapping[LogViolationKind, tuple[str, str]] = {
    _K.CREATED_NOT_FIRST: (
        "events lie before the item's ITEM_CREATED, so it has no beginning to fold from",
        _NOT_RUN,
    ),
    _K.NEVER_CREATED: (
        "the item has events but no ITEM_CREATED, so it counts as never started",
        "running it from scratch would number its events again; give its row a new key",
    ),
    _K.CREATED_TWICE: (
        "the item was opened again after it had begun; the fold takes it for running from there",
        "the writer must look the item up and resume it instead of opening it",
    ),
    _K.AFTER_TERMINAL: (
        "events follow the item's TERMINAL; all but FAILED ones still change its state",
        "the writer must stop at TERMINAL; look at what came later, then decide which state counts",
    ),
    _K.ITEM_SEQ_GAP: (
        "numbers are missing among the item's events: some may be lost, or not yet be visible",
        "verify again when nothing writes; a program that counts with gaps leaves them for good",
    ),
    _K.CONFLICTING_ITEM_SEQ: (
        "two different events have one item_seq: two writers owned the item at once",
        "find the second writer, which did not claim the shard before it wrote; " + _NOT_RUN,
    ),
    _K.EVENT_ID_REUSED: (
        "one event_id has two contents; a log never replaces an event",
        "the oldest copy stands; find the writer that gave an id out twice",
    ),
    _K.MIXED_SET_APPEND: ("one field has both FIELD_SET and FIELD_APPEND", _NOT_RUN),
    _K.FIELD_KIND_CHANGE: ("one field has values of two kinds", _NOT_RUN),
    _K.APPEND_CODEC_CHANGE: ("the values of an appended field have two codecs", _NOT_RUN),
    _K.BAD_ITEM_ID: (
        "the item id is not one, or is spelled otherwise than ids are stored",
        "the writer must compose ids with DatagenItemId",
    ),
    _K.ROOT_OR_PARENT_MISMATCH: (
        "root_item_id or parent_item_id is not what the item id says, so trees miss the row",
        "the writer must leave both out, so that they are derived from the item id",
    ),
    _K.PARENT_MISSING: (
        "the sub-item's parent never started",
        "its events may be lost, or not yet be visible: verify again when nothing writes",
    ),
    _K.NEWER_FORMAT: (
        "a newer version of the format, or another program, wrote what this package cannot read",
        "upgrade this package",
    ),
    _K.ROW_BREAKS_RULE: (
        "the row breaks a rule that append enforces; it is read as far as it makes sense",
        "whoever wrote it must go through append",
    ),
    _K.UNREADABLE_VALUE: (
        "a value or a column that the event needs is missing or cannot be parsed",
        _NOT_RUN,
    ),
    _K.BLOB_MISMATCH: (
        "the bytes of a blob do not fit the size or the checksum of their row",
        "restore the file that holds them; loading the blob raises an error until then",
    ),
}

_KIND_OF_CODE: Mapping[str, LogViolationKind] = {
    **{kind.value: kind for kind in _K},
    "schema_version_newer": _K.NEWER_FORMAT,
    "unknown_word": _K.NEWER_FORMAT,
    "unsupported_event_type": _K.NEWER_FORMAT,
    "unsupported_step_kind": _K.NEWER_FORMAT,
    "unsupported_status": _K.NEWER_FORMAT,
    "unsupported_value_kind": _K.NEWER_FORMAT,
    "item_id_not_canonical": _K.BAD_ITEM_ID,
    "item_id_malformed_segment": _K.BAD_ITEM_ID,
    "item_id_bad_branch_index": _K.BAD_ITEM_ID,
    "item_id_empty_root": _K.BAD_ITEM_ID,
    "root_mismatch": _K.ROOT_OR_PARENT_MISMATCH,
    "parent_mismatch": _K.ROOT_OR_PARENT_MISMATCH,
    "step_missing": _K.UNREADABLE_VALUE,
    "field_incomplete": _K.UNREADABLE_VALUE,
    "terminal_requires_status": _K.UNREADABLE_VALUE,
    "bad_json": _K.UNREADABLE_VALUE,
    "field_requires_name": _K.UNREADABLE_VALUE,
    "field_requires_type": _K.UNREADABLE_VALUE,
    "field_requires_codec_version": _K.UNREADABLE_VALUE,
    "field_requires_value": _K.UNREADABLE_VALUE,
    "requires_step_name": _K.UNREADABLE_VALUE,
    "requires_step_kind": _K.UNREADABLE_VALUE,
    "requires_step_index": _K.UNREADABLE_VALUE,
}


@dataclass(frozen=True, slots=True)
class LogViolation:
    """One thing that is wrong with one item. ``message`` says what was found, in one line."""

    kind: LogViolationKind
    item_id: str
    event_ids: tuple[str, ...]
    message: str

    @property
    def meaning(self) -> str:
        return self.kind.meaning

    @property
    def cure(self) -> str:
        return self.kind.cure

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "item_id": self.item_id,
            "event_ids": list(self.event_ids),
            "message": self.message,
            "meaning": self.meaning,
            "cure": self.cure,
        }

    @classmethod
    def of_error(cls, error: ItemViolationError) -> LogViolation:
        """The violation that refused a fold."""
        return cls(_kind(error.code), error.item_id, error.event_ids, str(error))


def _kind(code: str) -> LogViolationKind:
    return _KIND_OF_CODE.get(code, _K.ROW_BREAKS_RULE)


def row_violation(event: DatagenEvent) -> LogViolation | None:
    """What append would refuse about a stored row; the first rule that it breaks."""
    try:
        check_stored_event(event)
    except (InvalidEventError, InvalidItemIdError) as error:
        return LogViolation(_kind(error.code), event.item_id, (event.event_id,), str(error))
    return None


def item_violations(events: Iterable[DatagenEvent]) -> list[LogViolation]:
    """What is wrong among the events of one item, beyond the single rows."""
    stream = sorted(
        {event.event_id: event for event in events}.values(),
        key=lambda event: (event.item_seq, event.event_id),
    )
    found: list[LogViolation] = []
    try:
        fold_datagen_events(events)
    except ItemViolationError as error:
        found.append(LogViolation.of_error(error))
    created = [event for event in stream if event.event_type is _T.ITEM_CREATED]
    if not created:
        found.append(_of(_K.NEVER_CREATED, stream, f"{len(stream)} events, none ITEM_CREATED"))
    if len(created) > 1:
        found.append(_of(_K.CREATED_TWICE, created[1:], f"{len(created)} times ITEM_CREATED"))
    ends = [event.item_seq for event in stream if event.event_type is _T.TERMINAL]
    late = [event for event in stream if ends and event.item_seq > ends[0]]
    if late:
        found.append(
            _of(_K.AFTER_TERMINAL, late, f"{len(late)} events after TERMINAL at item_seq {ends[0]}")
        )
    gaps = [
        (before.item_seq, after)
        for before, after in pairwise(stream)
        if after.item_seq > before.item_seq + 1
    ]
    if gaps:
        before_seq, after = gaps[0]
        found.append(
            _of(
                _K.ITEM_SEQ_GAP,
                [event for _, event in gaps],
                f"{len(gaps)} gaps, the first between item_seq {before_seq} and {after.item_seq}",
            )
        )
    return found


def tree_violations(items: Mapping[str, Sequence[DatagenEvent]]) -> list[LogViolation]:
    """Sub-items, among the items of one root, whose parent never started."""
    started = {
        item_id
        for item_id, events in items.items()
        if any(event.event_type is _T.ITEM_CREATED for event in events)
    }
    return [
        _of(_K.PARENT_MISSING, events[:1], f"no ITEM_CREATED of its parent {parent!r}")
        for item_id, events in items.items()
        if (parent := item_id.rpartition("/")[0]) and item_id in started and parent not in started
    ]


def _of(kind: LogViolationKind, events: Sequence[DatagenEvent], message: str) -> LogViolation:
    item_id = events[0].item_id
    ids = tuple(event.event_id for event in events[:MAX_EVENT_IDS])
    return LogViolation(kind, item_id, ids, f"item {item_id!r}: {message}")
