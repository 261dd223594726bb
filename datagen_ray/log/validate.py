"""What an append must satisfy. Nothing that passes here may ever break a read.

``append`` takes any mix of events; ``append_checkpoint`` takes the field events of one step and
its one STEP_COMPLETED. Both are checked before a row is handed to the writer, so one caller's
mistake cannot fail the others that share its WAL entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from datagen_ray.errors import DamagedLogError, InvalidEventError, InvalidItemIdError
from datagen_ray.log.events import (
    DATAGEN_OLDEST_READABLE_VERSION,
    DATAGEN_SCHEMA_VERSION,
    OPTIONAL_TEXT_COLUMNS,
    TEXT_COLUMNS,
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    parse_enum,
)
from datagen_ray.log.ids import INT64_MAX, canonical_ids
from datagen_ray.log.values import (
    DatagenBlobValue,
    DatagenValue,
    blob_matches,
    check_optional_text,
    check_text,
    json_text,
    json_value,
)

INT32_MAX = 2**31 - 1

_T = DatagenEventType
_FIELD_EVENTS = (_T.FIELD_SET, _T.FIELD_APPEND)
_STEP_EVENTS = (*_FIELD_EVENTS, _T.STEP_STARTED, _T.STEP_COMPLETED, _T.FAILED)
_CHECKPOINT_EVENTS = (*_FIELD_EVENTS, _T.STEP_COMPLETED)
# The parent is compared with the one that the id has, which no other text equals.
_OPTIONAL_TEXT = tuple(name for name in OPTIONAL_TEXT_COLUMNS if name != "parent_item_id")
_STORED_STATUS = {
    _T.ITEM_CREATED: DatagenItemStatus.RUNNING,
    _T.FAILED: DatagenItemStatus.FAILED,
}


def validate_append(events: Iterable[DatagenEvent]) -> list[DatagenEvent]:
    """The events as they are to be stored, or :class:`InvalidEventError` for the first bad one.

    An absent status of ITEM_CREATED and FAILED is filled in, and an event that the batch holds
    twice, identically, is kept once. Nothing else changes.
    """
    given = _listed(events)
    if _are_composed(given):
        return given
    checked: list[DatagenEvent] = []
    by_id: dict[str, DatagenEvent] = {}
    seqs: dict[tuple[str, int], str] = {}
    for index, event in enumerate(given):
        try:
            event = _checked_event(event)
        except InvalidItemIdError as error:
            raise InvalidEventError(str(error), code=error.code, index=index) from error
        except InvalidEventError as error:
            if error.index is None:
                error.index = index
            raise
        same = by_id.get(event.event_id)
        if same is not None:
            if same.content() != event.content() or same.value != event.value:
                raise InvalidEventError(
                    f"event_id {event.event_id!r} stands twice in the batch with other content; "
                    "an id names one event",
                    code="event_id_reused",
                    index=index,
                )
            continue
        by_id[event.event_id] = event
        place = (event.item_id, event.item_seq)
        if place in seqs:
            raise InvalidEventError(
                f"item {event.item_id!r} has two events at item_seq {event.item_seq} in one batch",
                code="duplicate_item_seq_in_batch",
                index=index,
            )
        seqs[place] = event.event_id
        checked.append(event)
    return checked


def _listed(events: Iterable[DatagenEvent]) -> list[DatagenEvent]:
    if isinstance(events, DatagenEvent | str) or not isinstance(events, Iterable):
        raise InvalidEventError(
            f"append takes a list of DatagenEvent objects, not {type(events).__name__}",
            code="wrong_type",
        )
    return list(events)


def _are_composed(events: Sequence[DatagenEvent]) -> bool:
    """Whether all were composed by stream writers and have ids and places of their own.

    Then there is nothing left to check: see `DatagenEvent.composed`. Tags can come from elsewhere.
    """
    for event in events:
        if getattr(event, "composition", None) is None or event.query_tags_json is not None:
            return False
    count = len(events)
    return (
        len({event.event_id for event in events}) == count
        and len({(event.item_id, event.item_seq) for event in events}) == count
    )


def validate_checkpoint(events: Iterable[DatagenEvent]) -> list[DatagenEvent]:
    """As :func:`validate_append`, and the batch is exactly one step's checkpoint."""
    given = _listed(events)
    if _is_composed_checkpoint(given):
        return given
    _check_checkpoint(given)
    return validate_append(given)


def _is_composed_checkpoint(events: Sequence[DatagenEvent]) -> bool:
    """Whether they are all that one call of a stream writer composed as a checkpoint."""
    call = getattr(events[0], "composition", None) if events else None
    count = len(events)
    if call is None or call.checkpoint_events != count:
        return False
    for event in events:
        if getattr(event, "composition", None) is not call:
            return False
    # So many different objects of that call are all there are: copies lose their mark.
    return len(set(map(id, events))) == count


def _check_checkpoint(given: list[DatagenEvent]) -> None:
    for index, event in enumerate(given):
        _check_type(event, index)
    completions = [event for event in given if event.event_type is _T.STEP_COMPLETED]
    for index, event in enumerate(given):
        if event.event_type not in _CHECKPOINT_EVENTS:
            raise InvalidEventError(
                f"a checkpoint holds FIELD_SET, FIELD_APPEND and STEP_COMPLETED, not "
                f"{event.event_type}; write that with append",
                code="checkpoint_foreign_event",
                index=index,
            )
    if len(completions) != 1:
        raise InvalidEventError(
            f"a checkpoint holds exactly one STEP_COMPLETED, this one has {len(completions)}",
            code="checkpoint_completed_count",
        )
    completed = completions[0]
    for index, event in enumerate(given):
        for name in ("item_id", "checkpoint_id", "run_id", "writer_epoch", "attempt"):
            if getattr(event, name) != getattr(completed, name):
                raise InvalidEventError(
                    f"a checkpoint has one {name}; found {getattr(event, name)!r} beside "
                    f"{getattr(completed, name)!r}",
                    code="checkpoint_mixed_identity",
                    index=index,
                )
        if event.position != completed.position and event.position is not None:
            raise InvalidEventError(
                f"a checkpoint has one step; found {event.position} beside {completed.position}",
                code="checkpoint_step_mismatch",
                index=index,
            )


def check_stored_event(event: DatagenEvent) -> None:
    """Raise for a row of a log that append would refuse.

    What only a writer must have is not asked for: the bytes of blobs, the current version. Raises
    :class:`InvalidEventError` and :class:`InvalidItemIdError`.
    """
    if event.schema_version < DATAGEN_OLDEST_READABLE_VERSION:
        raise InvalidEventError(
            f"schema_version {event.schema_version} never was one", code="schema_version"
        )
    _check_row(event, stored=True)
    _checked_tags(_checked_status(event))


def _checked_event(event: DatagenEvent) -> DatagenEvent:
    _check_type(event)
    if event.schema_version != DATAGEN_SCHEMA_VERSION:
        raise InvalidEventError(
            f"schema_version {event.schema_version!r} cannot be written; this package writes "
            f"{DATAGEN_SCHEMA_VERSION}",
            code="schema_version",
        )
    _check_row(event, stored=False)
    return _checked_tags(_checked_status(event))


def _check_type(event: object, index: int | None = None) -> None:
    if not isinstance(event, DatagenEvent):
        raise InvalidEventError(
            f"append takes DatagenEvent objects, not {type(event).__name__}; "
            "DatagenEvent.from_dict makes one",
            code="wrong_type",
            index=index,
        )


def _check_row(event: DatagenEvent, *, stored: bool) -> None:
    """The rules between the columns of one row, but for its status and its tags."""
    for name in TEXT_COLUMNS:
        if not check_text(getattr(event, name), name):
            raise InvalidEventError(f"{name} must not be empty", code="empty_column")
    for name in _OPTIONAL_TEXT:
        check_optional_text(getattr(event, name), name)
    # An event that was read may hold words of a newer format, which stay strings.
    parse_enum(DatagenEventType, event.event_type, "event type")
    if event.status is not None:
        parse_enum(DatagenItemStatus, event.status, "status")
    if event.step_kind is not None:
        parse_enum(DatagenStepKind, event.step_kind, "step kind")
    _check_identity(event)
    check_number(event.item_seq, "item_seq", INT64_MAX)
    check_number(event.attempt, "attempt", INT32_MAX)
    if event.event_type in _STEP_EVENTS:
        _check_step(event)
    elif event.step_index is not None:
        check_number(event.step_index, "step_index", INT64_MAX)
    _check_fields(event, stored=stored)


def _check_identity(event: DatagenEvent) -> None:
    if "\0" in event.item_id:
        raise InvalidEventError(
            f"item_id {event.item_id!r} holds a NUL character; remove it", code="nul_in_id"
        )
    root, parent = canonical_ids(event.item_id)
    if event.root_item_id != root:
        raise InvalidEventError(
            f"root_item_id {event.root_item_id!r} is not the root of item {event.item_id!r}; "
            f"write {root!r} or leave it out",
            code="root_mismatch",
        )
    if event.parent_item_id != parent:
        raise InvalidEventError(
            f"parent_item_id {event.parent_item_id!r} is not the parent of item "
            f"{event.item_id!r}; write {parent!r} or leave it out",
            code="parent_mismatch",
        )


def check_number(value: object, name: str, limit: int) -> None:
    """A whole number within 0..limit."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidEventError(
            f"{name} must be an integer, not {type(value).__name__}", code="wrong_type"
        )
    if value < 0:
        raise InvalidEventError(
            f"{name} must not be negative, got {value}", code=f"negative_{name}"
        )
    if value > limit:
        raise InvalidEventError(f"{name} {value} is over {limit}", code="out_of_range")


def _check_step(event: DatagenEvent) -> None:
    if not event.step_name:
        raise InvalidEventError(f"{event.event_type} needs a step_name", code="requires_step_name")
    if "\0" in event.step_name:
        raise InvalidEventError(
            f"step_name {event.step_name!r} holds a NUL character; rename the step",
            code="nul_in_id",
        )
    if event.step_kind is None:
        raise InvalidEventError(f"{event.event_type} needs a step_kind", code="requires_step_kind")
    if event.step_index is None:
        raise InvalidEventError(
            f"{event.event_type} needs a step_index", code="requires_step_index"
        )
    check_number(event.step_index, "step_index", INT64_MAX)
    check_step_kind(event.event_type, event.step_kind)


def check_step_kind(event_type: DatagenEventType, kind: DatagenStepKind) -> None:
    """Only drivers start frames, and a selector has no row of its own but its failures."""
    if event_type is _T.STEP_STARTED and not kind.is_driver:
        raise InvalidEventError(
            f"STEP_STARTED opens a sequence or a loop, not a {kind}", code="step_kind_not_started"
        )
    if event_type in _CHECKPOINT_EVENTS and kind.is_selector:
        raise InvalidEventError(
            f"a {kind} writes no {event_type}; its chosen child does, with selector_step",
            code="step_kind_not_completed",
        )


def _check_fields(event: DatagenEvent, *, stored: bool) -> None:
    if event.event_type in _FIELD_EVENTS:
        if not event.field_name:
            raise InvalidEventError("a field event needs a field_name", code="field_requires_name")
        if not event.field_type:
            raise InvalidEventError(
                f"field {event.field_name!r} needs a field_type", code="field_requires_type"
            )
        if event.codec_version is None:
            raise InvalidEventError(
                f"field {event.field_name!r} needs a codec_version",
                code="field_requires_codec_version",
            )
        check_codec_version(event.codec_version, event.field_name)
        if event.value is None:
            raise InvalidEventError(
                f"field {event.field_name!r} needs a value", code="field_requires_value"
            )
        check_value(event.value, event.field_name, stored=stored)
        return
    for name in ("field_name", "field_type", "codec_version", "value"):
        if getattr(event, name) is not None:
            raise InvalidEventError(
                f"{event.event_type} cannot carry {name}; only field events do",
                code="stray_field_column",
            )


def check_codec_version(version: int, field_name: str) -> None:
    """Any 32-bit integer: what the number means is the codec's affair."""
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidEventError(
            f"codec_version of field {field_name!r} must be an integer, not {version!r}",
            code="wrong_type",
        )
    if not -INT32_MAX - 1 <= version <= INT32_MAX:
        raise InvalidEventError(
            f"codec_version {version} of field {field_name!r} does not fit 32 bits",
            code="out_of_range",
        )


def check_value(value: DatagenValue, field_name: str, *, stored: bool = False) -> None:
    """A value that is to be written has its bytes, if a blob, and their true size."""
    raw = value.raw
    value.check()
    if not isinstance(raw, DatagenBlobValue) or stored:
        return
    if raw.bytes is None:
        raise InvalidEventError(
            f"blob field {field_name!r} has no bytes; load it before writing it again",
            code="blob_without_bytes",
        )
    if raw.size != len(raw.bytes):
        raise InvalidEventError(
            f"blob field {field_name!r} declares {raw.size} bytes but holds {len(raw.bytes)}",
            code="blob_size_mismatch",
        )
    if not blob_matches(raw.bytes, raw.checksum):
        raise InvalidEventError(
            f"blob field {field_name!r} has the checksum of other bytes; leave it out, or make "
            "the value with DatagenValue.of",
            code="blob_checksum_mismatch",
        )


def _checked_status(event: DatagenEvent) -> DatagenEvent:
    kind = event.event_type
    if kind is _T.TERMINAL:
        if event.status is None or not event.status.is_terminal:
            raise InvalidEventError(
                f"TERMINAL needs status completed or filtered, not {event.status}",
                code="terminal_requires_status",
            )
        return event
    expected = _STORED_STATUS.get(kind)
    if expected is None or event.status is expected:
        return event
    if event.status is None:
        return replace(event, status=expected)
    raise InvalidEventError(
        f"{kind} has status {event.status}; write {expected} or leave it out",
        code="status_mismatch",
    )


def _checked_tags(event: DatagenEvent) -> DatagenEvent:
    """The tags in their canonical text, so that every read can parse them; null is absent."""
    text = event.query_tags_json
    if text is None:
        return event
    try:
        value = json_value(check_text(text, "query_tags_json"))
    except DamagedLogError as error:
        raise InvalidEventError(
            f"query_tags_json of item {event.item_id!r} is not JSON; from_dict takes any value",
            code="bad_json",
        ) from error
    canonical = None if value is None else json_text(value)
    return event if canonical == text else replace(event, query_tags_json=canonical)


def batch_size_bytes(events: Sequence[DatagenEvent]) -> int:
    """A rough size of the variable-length content of a batch, for limits and back-pressure."""
    size = 0
    for event in events:
        size += 400 + len(event.error_dump or "") + len(event.traceback or "")
        size += len(event.query_tags_json or "")
        if event.value is not None:
            raw = event.value.raw
            if isinstance(raw, str):
                size += len(raw)
            elif isinstance(raw, DatagenBlobValue) and raw.bytes is not None:
                size += len(raw.bytes)
    return size
