"""The fold: from the events of one item to its current state.

Pure and order-free: events are put in order of ``(item_seq, event_id)`` first, so neither the
order of arrival, nor times, nor attempts decide anything. Two lenses look at the same events.
*Lifecycle* is what :func:`fold_datagen_events` gives: running until a TERMINAL. *Failure* is
:func:`item_failures`: the FAILED rows, 0..N of them, which lifecycle ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from datagen_ray.errors import InternalError, InvalidItemIdError, ItemViolationError
from datagen_ray.log.events import (
    DATAGEN_SCHEMA_VERSION,
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStreamPosition,
)
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.log.values import VALUE_KINDS, DatagenValue, ValueKind, json_value

_T = DatagenEventType
# Looking a member up costs as much as the comparison; the fold does it for every event.
_ITEM_CREATED, _TERMINAL = _T.ITEM_CREATED, _T.TERMINAL
_STEP_STARTED, _STEP_COMPLETED = _T.STEP_STARTED, _T.STEP_COMPLETED
_FIELD_SET, _FIELD_APPEND = _T.FIELD_SET, _T.FIELD_APPEND


@dataclass(frozen=True, slots=True)
class DatagenStepCursor:
    """A position and the ``item_seq`` of the event that stands there."""

    position: DatagenStreamPosition
    item_seq: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.position.to_dict(), "item_seq": self.item_seq}


@dataclass(frozen=True, slots=True)
class DatagenErrorInfo:
    """What a step raised. ``error_dump`` is its message, ``traceback`` its text."""

    error_type: str | None
    error_dump: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class DatagenFailure:
    """One FAILED row: where, in which attempt of which run, and what."""

    item_id: str
    at: DatagenStepCursor | None
    attempt: int
    run_id: str
    error: DatagenErrorInfo

    def to_dict(self) -> dict[str, Any]:
        return {
            "at": None if self.at is None else self.at.to_dict(),
            "attempt": self.attempt,
            "error_type": self.error.error_type,
            "error_dump": self.error.error_dump,
            "traceback": self.error.traceback,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, slots=True)
class DatagenTrajectory:
    """Which steps an item went through.

    ``ordered`` has one cursor for each completion, in order; ``started`` and ``completed`` are the
    sets of positions with a STEP_STARTED and with a STEP_COMPLETED.
    """

    ordered: tuple[DatagenStepCursor, ...] = ()
    started: frozenset[DatagenStreamPosition] = frozenset()
    completed: frozenset[DatagenStreamPosition] = frozenset()

    @property
    def open_frames(self) -> frozenset[DatagenStreamPosition]:
        """The driver frames that were open at the last event: started minus completed."""
        return self.started - self.completed


@dataclass(frozen=True, slots=True)
class DatagenField:
    """The folded state of one field.

    ``values`` holds one value in mode ``set`` and all of them, in order, in mode ``append``.
    ``event_ids`` names the event of each value, which is what loads a blob.
    """

    mode: Literal["set", "append"]
    kind: ValueKind
    field_type: str
    codec_version: int
    values: tuple[DatagenValue, ...]
    event_ids: tuple[str, ...]

    @property
    def value(self) -> DatagenValue:
        """The last value."""
        return self.values[-1]

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "mode": self.mode,
            "field_type": self.field_type,
            "codec_version": self.codec_version,
        }
        if self.mode == "set":
            data["value"] = self.value.to_dict()
        else:
            data["values"] = [value.to_dict() for value in self.values]
        return data


@dataclass(frozen=True, slots=True)
class FoldedDatagenItem:
    """The state of one item. ``status`` is a lifecycle value, never ``failed``.

    A resume writes on at ``last_item_seq + 1`` with attempt ``last_attempt + 1``.
    """

    item_id: str
    root_item_id: str
    parent_item_id: str | None
    status: DatagenItemStatus
    fields: Mapping[str, DatagenField]
    trajectory: DatagenTrajectory
    last_item_seq: int
    last_attempt: int
    query_tags_json: str | None = None

    @property
    def query_tags(self) -> Any:
        return None if self.query_tags_json is None else json_value(self.query_tags_json)

    @property
    def blob_event_ids(self) -> dict[str, str]:
        """For each blob field the event that holds its (last) bytes."""
        return {
            name: field.event_ids[-1] for name, field in self.fields.items() if field.kind == "blob"
        }

    @property
    def is_terminated(self) -> bool:
        return self.status.is_terminal

    def to_dict(self) -> dict[str, Any]:
        """The exchange form; ``started`` and ``completed`` are sets, listed in a stable order."""
        return {
            "item_id": self.item_id,
            "root_item_id": self.root_item_id,
            "parent_item_id": self.parent_item_id,
            "status": self.status.value,
            "fields": {name: field.to_dict() for name, field in sorted(self.fields.items())},
            "blob_event_ids": self.blob_event_ids,
            "started": positions_to_list(self.trajectory.started),
            "completed": positions_to_list(self.trajectory.completed),
            "trajectory": [cursor.to_dict() for cursor in self.trajectory.ordered],
            "last_item_seq": self.last_item_seq,
            "last_attempt": self.last_attempt,
            "query_tags": self.query_tags,
        }


def positions_to_list(positions: Iterable[DatagenStreamPosition]) -> list[dict[str, Any]]:
    """A set of positions as exchange forms, in a stable order."""
    return [
        position.to_dict()
        for position in sorted(
            positions,
            key=lambda p: (
                p.enclosing_step or "",
                p.step_name,
                p.step_index,
                p.step_kind.value,
                p.selector_step or "",
            ),
        )
    ]


def order_events(events: Iterable[DatagenEvent]) -> list[DatagenEvent]:
    """The events of one item by ``(item_seq, event_id)``, identical copies once.

    Raises :class:`ItemViolationError` where one ``event_id`` has two contents, where two events
    share an ``item_seq``, or where an event was written by a newer version of the format or holds
    a word that the format does not have.
    """
    stream = list(events)
    if _is_plain(stream):
        return stream
    by_id: dict[str, DatagenEvent] = {}
    for event in stream:
        known = by_id.setdefault(event.event_id, event)
        if known is not event and known.content() != event.content():
            raise ItemViolationError(
                f"item {event.item_id!r}: event {event.event_id} has two different contents; "
                "the first stands, find the second writer",
                code="event_id_reused",
                item_id=event.item_id,
                event_ids=(event.event_id,),
            )
    ordered = sorted(by_id.values(), key=lambda event: (event.item_seq, event.event_id))
    previous: DatagenEvent | None = None
    for event in ordered:
        if previous is not None and previous.item_seq == event.item_seq:
            raise ItemViolationError(
                f"item {event.item_id!r} has different events at item_seq {event.item_seq}: two "
                "writers owned it at once",
                code="conflicting_item_seq",
                item_id=event.item_id,
                event_ids=(previous.event_id, event.event_id),
            )
        if event.schema_version > DATAGEN_SCHEMA_VERSION:
            raise ItemViolationError(
                f"item {event.item_id!r} was written by format version {event.schema_version}; "
                f"this package reads up to {DATAGEN_SCHEMA_VERSION}, upgrade it",
                code="schema_version_newer",
                item_id=event.item_id,
                event_ids=(event.event_id,),
            )
        unknown = _unknown_word(event)
        if unknown is not None:
            raise ItemViolationError(
                f"item {event.item_id!r}: {unknown} at item_seq {event.item_seq} is not known to "
                "this package; if a newer version wrote it, upgrade",
                code="unknown_word",
                item_id=event.item_id,
                event_ids=(event.event_id,),
            )
        previous = event
    return ordered


def _is_plain(stream: list[DatagenEvent]) -> bool:
    """Whether events are in order already, each once, and hold nothing unknown; nearly all do."""
    last = None
    for event in stream:
        seq, step_kind, status, value = event.item_seq, event.step_kind, event.status, event.value
        if (
            (last is not None and seq <= last)
            or event.schema_version > DATAGEN_SCHEMA_VERSION
            or type(event.event_type) is not DatagenEventType
            or (step_kind is not None and type(step_kind) is not DatagenStepKind)
            or (status is not None and type(status) is not DatagenItemStatus)
            or (value is not None and value.kind not in VALUE_KINDS)
        ):
            return False
        last = seq
    return len({event.event_id for event in stream}) == len(stream)


def _unknown_word(event: DatagenEvent) -> str | None:
    """What a row says that the format does not have; such words stay strings when decoded."""
    if type(event.event_type) is not DatagenEventType:
        return f"the event type {event.event_type!r}"
    if event.step_kind is not None and type(event.step_kind) is not DatagenStepKind:
        return f"the step kind {event.step_kind!r}"
    if event.status is not None and type(event.status) is not DatagenItemStatus:
        return f"the status {event.status!r}"
    if event.value is not None and event.value.kind not in VALUE_KINDS:
        return f"the value kind {event.value.kind!r}"
    return None


@dataclass(slots=True)
class _FieldState:
    mode: Literal["set", "append"]
    kind: ValueKind
    field_type: str
    codec_version: int
    values: list[DatagenValue] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)

    def frozen(self) -> DatagenField:
        return DatagenField(
            self.mode,
            self.kind,
            self.field_type,
            self.codec_version,
            tuple(self.values),
            tuple(self.event_ids),
        )


def fold_datagen_events(events: Iterable[DatagenEvent]) -> FoldedDatagenItem | None:
    """The state of the one item that all ``events`` belong to; None if it never started.

    Raises :class:`ItemViolationError` (``code`` says which rule) for events that no correct
    writer leaves: see :func:`order_events`, plus ITEM_CREATED that is not the first event,
    FIELD_SET mixed with FIELD_APPEND, a field that changes its kind, an appended field that
    changes codec.
    """
    ordered = order_events(events)
    if not ordered:
        return None
    first = ordered[0]
    if first.event_type is not _ITEM_CREATED:
        if all(event.event_type is not _ITEM_CREATED for event in ordered):
            return None
        raise ItemViolationError(
            f"item {first.item_id!r} has {first.event_type} at item_seq {first.item_seq}, before "
            "its ITEM_CREATED",
            code="created_not_first",
            item_id=first.item_id,
            event_ids=(first.event_id,),
        )
    fields: dict[str, _FieldState] = {}
    cursors: list[DatagenStepCursor] = []
    started: set[DatagenStreamPosition] = set()
    completed: set[DatagenStreamPosition] = set()
    status = DatagenItemStatus.RUNNING
    tags = first.query_tags_json
    attempt = first.attempt
    for event in ordered:
        if event.attempt > attempt:
            attempt = event.attempt
        kind = event.event_type
        if kind is _FIELD_SET or kind is _FIELD_APPEND:
            _fold_field(fields, event)
        elif kind is _STEP_COMPLETED:
            position = _position(event)
            completed.add(position)
            cursors.append(DatagenStepCursor(position, event.item_seq))
        elif kind is _STEP_STARTED:
            started.add(_position(event))
        elif kind is _ITEM_CREATED:
            status, tags = DatagenItemStatus.RUNNING, event.query_tags_json
        elif kind is _TERMINAL:
            status = _terminal_status(event)
        # FAILED belongs to the failure lens only.
    return FoldedDatagenItem(
        item_id=first.item_id,
        root_item_id=first.root_item_id,
        parent_item_id=first.parent_item_id,
        status=status,
        fields=MappingProxyType({name: state.frozen() for name, state in fields.items()}),
        trajectory=DatagenTrajectory(tuple(cursors), frozenset(started), frozenset(completed)),
        last_item_seq=ordered[-1].item_seq,
        last_attempt=attempt,
        query_tags_json=tags,
    )


def _position(event: DatagenEvent) -> DatagenStreamPosition:
    position = event.position
    if position is None:
        raise ItemViolationError(
            f"item {event.item_id!r}: {event.event_type} at item_seq {event.item_seq} names no "
            "step",
            code="step_missing",
            item_id=event.item_id,
            event_ids=(event.event_id,),
        )
    return position


def _terminal_status(event: DatagenEvent) -> DatagenItemStatus:
    if event.status is None or not event.status.is_terminal:
        raise ItemViolationError(
            f"item {event.item_id!r}: TERMINAL at item_seq {event.item_seq} has status "
            f"{event.status}",
            code="terminal_requires_status",
            item_id=event.item_id,
            event_ids=(event.event_id,),
        )
    return event.status


def _fold_field(fields: dict[str, _FieldState], event: DatagenEvent) -> None:
    value, name = event.value, event.field_name
    if value is None or name is None or event.field_type is None or event.codec_version is None:
        raise ItemViolationError(
            f"item {event.item_id!r}: {event.event_type} at item_seq {event.item_seq} has no "
            "field_name, field_type, codec_version or value",
            code="field_incomplete",
            item_id=event.item_id,
            event_ids=(event.event_id,),
        )
    mode: Literal["set", "append"] = "set" if event.event_type is _T.FIELD_SET else "append"
    state = fields.get(name)
    problem = (
        None
        if state is None
        else field_conflict(
            name,
            (state.mode, state.kind, state.field_type, state.codec_version),
            (mode, value.kind, event.field_type, event.codec_version),
        )
    )
    if problem is not None:
        code, text = problem
        raise ItemViolationError(
            f"item {event.item_id!r}: {text}",
            code=code,
            item_id=event.item_id,
            event_ids=(event.event_id,),
        )
    if state is None or mode == "set":
        state = _FieldState(mode, value.kind, event.field_type, event.codec_version)
        fields[name] = state
    state.values.append(value)
    state.event_ids.append(event.event_id)


FieldShape = tuple[str, str, str, int]
"""``(mode, kind, field_type, codec_version)`` of a field."""


def field_conflict(name: str, known: FieldShape, new: FieldShape) -> tuple[str, str] | None:
    """Why a field cannot take a further event: ``(code, text)``, or None when it can."""
    if known[0] != new[0]:
        return "mixed_set_append", f"field {name!r} mixes FIELD_SET and FIELD_APPEND"
    if known[1] != new[1]:
        return (
            "field_kind_change",
            f"field {name!r} changes its kind from {known[1]} to {new[1]}",
        )
    if new[0] == "append" and known[2:] != new[2:]:
        return (
            "append_codec_change",
            f"appended field {name!r} changes its codec: {known[2]}@{known[3]}, {new[2]}@{new[3]}",
        )
    return None


def item_failures(events: Iterable[DatagenEvent]) -> list[DatagenFailure]:
    """The FAILED rows among the events of one item, in order; also of one that never started."""
    return [failure_of(event) for event in order_events(events) if event.event_type is _T.FAILED]


def failure_of(event: DatagenEvent) -> DatagenFailure:
    """The failure that a FAILED event records."""
    if event.event_type is not _T.FAILED:
        raise InternalError(f"{event.event_type} is not a failure")
    position = event.position
    return DatagenFailure(
        item_id=event.item_id,
        at=None if position is None else DatagenStepCursor(position, event.item_seq),
        attempt=event.attempt,
        run_id=event.run_id,
        error=DatagenErrorInfo(event.error_type, event.error_dump, event.traceback),
    )


@dataclass(frozen=True, slots=True)
class DatagenItemNode:
    """An item of a tree and the ids of its direct sub-items, in id order."""

    item: FoldedDatagenItem
    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DatagenItemTree:
    """A root's items. ``roots`` are those whose parent is not among them; normally one.

    ``violations`` holds the items that could not be folded; the rest of the tree is whole.
    """

    nodes: Mapping[str, DatagenItemNode]
    roots: tuple[str, ...]
    violations: tuple[ItemViolationError, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "roots": list(self.roots),
            "nodes": {
                item_id: {"children": list(node.children), "item": node.item.to_dict()}
                for item_id, node in self.nodes.items()
            },
        }


def group_by_item(events: Iterable[DatagenEvent]) -> dict[str, list[DatagenEvent]]:
    """Events by ``item_id``, in order of first sight."""
    grouped: dict[str, list[DatagenEvent]] = {}
    for event in events:
        grouped.setdefault(event.item_id, []).append(event)
    return grouped


def tree_order(item_id: str) -> DatagenItemId:
    """The key that puts items in tree order; an id that cannot be parsed stands as a root."""
    try:
        return DatagenItemId.parse(item_id)
    except InvalidItemIdError:
        return DatagenItemId(item_id)


def fold_tree(events: Iterable[DatagenEvent]) -> DatagenItemTree:
    """The tree of all items among ``events``, which belong to one root."""
    items: dict[str, FoldedDatagenItem] = {}
    violations: list[ItemViolationError] = []
    for item_id, stream in group_by_item(events).items():
        try:
            item = fold_datagen_events(stream)
        except ItemViolationError as error:
            violations.append(error)
            continue
        if item is not None:
            items[item_id] = item
    ordered = sorted(items, key=tree_order) if len(items) > 1 else list(items)
    children: dict[str, list[str]] = {item_id: [] for item_id in ordered}
    roots: list[str] = []
    for item_id in ordered:
        parent = items[item_id].parent_item_id
        siblings = roots if parent is None else children.get(parent, roots)
        siblings.append(item_id)
    nodes = {
        item_id: DatagenItemNode(items[item_id], tuple(children[item_id])) for item_id in ordered
    }
    return DatagenItemTree(MappingProxyType(nodes), tuple(roots), tuple(violations))
