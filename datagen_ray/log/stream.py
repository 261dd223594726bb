"""The stream writer: composes the events of one item, with their ids and numbers.

It stores nothing. What it returns goes to an append; a call that it refuses uses up no
``item_seq`` and no ordinal, so the caller may correct the call and go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import InvalidEventError
from datagen_ray.log.events import (
    DATAGEN_SCHEMA_VERSION,
    Composition,
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStreamPosition,
    in_utc,
)
from datagen_ray.log.fold import FieldShape, FoldedDatagenItem, field_conflict
from datagen_ray.log.ids import INT64_MAX, canonical_ids, event_id_of, event_id_prefix
from datagen_ray.log.validate import (
    INT32_MAX,
    check_codec_version,
    check_number,
    check_step_kind,
    check_value,
)
from datagen_ray.log.values import (
    DatagenFieldUpdate,
    DatagenValue,
    check_optional_text,
    check_text,
    json_text,
)

FIRST_ITEM_SEQ = 1
"""The ``item_seq`` of ITEM_CREATED."""


class DatagenStreamWriter:
    """Composes the events of one item, in order. Not thread safe: an item has one owner.

    Make one with :meth:`open` for a new item, or :meth:`resume` for one that was read. Its rules
    are those of append, and across calls those of the fold: nothing after TERMINAL, one
    ITEM_CREATED, no field that changes its mode, its kind, or, when appended, its codec. Append
    takes its events unchecked, but for their tags, so every rule of a row is kept here.
    """

    __slots__ = (
        "_attempt",
        "_created",
        "_item_id",
        "_next_item_seq",
        "_now",
        "_ordinal",
        "_parent",
        "_query_tags_json",
        "_root",
        "_run_id",
        "_shapes",
        "_terminated",
        "_writer_epoch",
    )

    def __init__(
        self,
        item_id: str,
        *,
        run_id: str,
        writer_epoch: str,
        attempt: int,
        next_item_seq: int,
        now: Clock,
        query_tags_json: str | None = None,
        shapes: Mapping[str, FieldShape] | None = None,
        created: bool = False,
    ) -> None:
        self._root, self._parent = canonical_ids(item_id)
        if "\0" in item_id:
            raise InvalidEventError(
                f"item_id {item_id!r} holds a NUL character; remove it", code="nul_in_id"
            )
        for name, text in (("run_id", run_id), ("writer_epoch", writer_epoch)):
            if not check_text(text, name):
                raise InvalidEventError(f"{name} must not be empty", code="empty_column")
        if attempt == INT32_MAX + 1:
            raise InvalidEventError(
                f"item {item_id!r} has used up its attempts", code="out_of_range"
            )
        check_number(attempt, "attempt", INT32_MAX)
        check_number(next_item_seq, "item_seq", INT64_MAX + 1)
        self._item_id = item_id
        self._run_id = run_id
        self._writer_epoch = writer_epoch
        self._attempt = attempt
        self._next_item_seq = next_item_seq
        self._now = now
        self._query_tags_json = query_tags_json
        self._shapes: dict[str, FieldShape] = dict(shapes or {})
        self._created = created
        self._terminated = False
        self._ordinal = 0

    @classmethod
    def open(
        cls,
        item_id: str,
        *,
        run_id: str,
        writer_epoch: str,
        query_tags: Any = None,
        now: Clock = utc_now,
    ) -> DatagenStreamWriter:
        """A writer for an item that has no events yet; its first event is :meth:`item_created`."""
        return cls(
            item_id,
            run_id=run_id,
            writer_epoch=writer_epoch,
            attempt=0,
            next_item_seq=FIRST_ITEM_SEQ,
            now=now,
            query_tags_json=None if query_tags is None else json_text(query_tags),
        )

    @classmethod
    def resume(
        cls,
        folded: FoldedDatagenItem,
        *,
        run_id: str,
        writer_epoch: str,
        now: Clock = utc_now,
    ) -> DatagenStreamWriter:
        """A writer that goes on behind the last event of ``folded``, one attempt later."""
        if folded.is_terminated:
            raise InvalidEventError(
                f"item {folded.item_id!r} is {folded.status}; nothing follows a TERMINAL",
                code="item_terminated",
            )
        return cls(
            folded.item_id,
            run_id=run_id,
            writer_epoch=writer_epoch,
            attempt=folded.last_attempt + 1,
            next_item_seq=folded.last_item_seq + 1,
            now=now,
            shapes={
                name: (state.mode, state.kind, state.field_type, state.codec_version)
                for name, state in folded.fields.items()
            },
            created=True,
        )

    # Read-only: they were checked once, and stand in rows that nobody checks again.

    @property
    def item_id(self) -> str:
        return self._item_id

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def writer_epoch(self) -> str:
        return self._writer_epoch

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def next_item_seq(self) -> int:
        """The number of the next event."""
        return self._next_item_seq

    def item_created(self) -> DatagenEvent:
        """ITEM_CREATED, the first event of an item."""
        if self._created:
            raise InvalidEventError(
                f"item {self._item_id!r} was created already", code="item_created_twice"
            )
        self._check_open(1)
        event = self._event(
            DatagenEventType.ITEM_CREATED,
            call=self._call(f"{self._item_id}\0created"),
            seq=self._next_item_seq,
            status=DatagenItemStatus.RUNNING,
            query_tags_json=self._query_tags_json,
        )
        self._created = True
        self._next_item_seq += 1
        return event

    def step_started(self, position: DatagenStreamPosition) -> DatagenEvent:
        """STEP_STARTED of a Sequence or a Loop."""
        self._check_step(DatagenEventType.STEP_STARTED, position)
        event = self._event(
            DatagenEventType.STEP_STARTED,
            call=self._at(position),
            seq=self._next_item_seq,
            position=position,
        )
        self._advance(1)
        return event

    def step_completed(
        self, position: DatagenStreamPosition, fields: Sequence[DatagenFieldUpdate] = ()
    ) -> list[DatagenEvent]:
        """One step's checkpoint: its field events, then STEP_COMPLETED, for one append."""
        self._check_step(DatagenEventType.STEP_COMPLETED, position, count=len(fields) + 1)
        shapes = self._checked_fields(fields)
        call = self._at(position, len(fields) + 1)
        events = [
            self._event(
                DatagenEventType.FIELD_SET if update.op == "set" else DatagenEventType.FIELD_APPEND,
                call=call,
                seq=self._next_item_seq + offset,
                ordinal=offset + 1,
                position=position,
                field_name=update.name,
                field_type=update.field_type,
                codec_version=update.codec_version,
                value=update.value,
            )
            for offset, update in enumerate(fields)
        ]
        events.append(
            self._event(
                DatagenEventType.STEP_COMPLETED,
                call=call,
                seq=self._next_item_seq + len(fields),
                position=position,
            )
        )
        self._shapes.update(shapes)
        self._advance(len(events))
        return events

    def item_failed(
        self,
        position: DatagenStreamPosition,
        error_type: str,
        *,
        error_dump: str | None = None,
        traceback: str | None = None,
    ) -> DatagenEvent:
        """FAILED: a step raised. The item stays running."""
        self._check_step(DatagenEventType.FAILED, position)
        check_text(error_type, "error_type")
        check_optional_text(error_dump, "error_dump")
        check_optional_text(traceback, "traceback")
        event = self._event(
            DatagenEventType.FAILED,
            call=self._at(position),
            seq=self._next_item_seq,
            position=position,
            status=DatagenItemStatus.FAILED,
            error_type=error_type,
            error_dump=error_dump,
            traceback=traceback,
        )
        self._advance(1)
        return event

    def item_terminal(
        self,
        status: DatagenItemStatus | str,
        *,
        position: DatagenStreamPosition | None = None,
        error_type: str | None = None,
        error_dump: str | None = None,
    ) -> DatagenEvent:
        """TERMINAL: the item is ``completed`` or ``filtered``; nothing may follow.

        For a filter ``position`` says which step dropped the item, ``error_dump`` why.
        """
        if status not in ("completed", "filtered"):
            raise InvalidEventError(
                f"an item ends completed or filtered, not {status!r}", code="bad_terminal"
            )
        self._check_open(1)
        if position is not None:
            self._check_position(position)
        check_optional_text(error_type, "error_type")
        check_optional_text(error_dump, "error_dump")
        event = self._event(
            DatagenEventType.TERMINAL,
            call=self._call(f"{self._item_id}\0terminal\0{self._next_item_seq}"),
            seq=self._next_item_seq,
            position=position,
            status=DatagenItemStatus(status),
            error_type=error_type,
            error_dump=error_dump,
        )
        self._terminated = True
        self._next_item_seq += 1
        return event

    def _check_open(self, count: int) -> None:
        if self._terminated:
            raise InvalidEventError(
                f"item {self._item_id!r} has ended; nothing follows a TERMINAL",
                code="item_terminated",
            )
        if self._next_item_seq + count - 1 > INT64_MAX:
            raise InvalidEventError(
                f"item {self._item_id!r} has used up its item_seq numbers", code="out_of_range"
            )

    def _check_step(
        self, event_type: DatagenEventType, position: DatagenStreamPosition, count: int = 1
    ) -> None:
        self._check_open(count)
        self._check_position(position)
        check_step_kind(event_type, position.step_kind)

    def _check_position(self, position: DatagenStreamPosition) -> None:
        if not check_text(position.step_name, "step_name") or "\0" in position.step_name:
            raise InvalidEventError(
                f"step_name {position.step_name!r} is empty or holds NUL; rename the step",
                code="requires_step_name" if not position.step_name else "nul_in_id",
            )
        if not isinstance(position.step_kind, DatagenStepKind):
            raise InvalidEventError(
                f"step_kind must be a DatagenStepKind, not {position.step_kind!r}",
                code="wrong_type",
            )
        check_number(position.step_index, "step_index", INT64_MAX)
        check_optional_text(position.enclosing_step, "enclosing_step")
        check_optional_text(position.selector_step, "selector_step")

    def _checked_fields(self, fields: Sequence[DatagenFieldUpdate]) -> dict[str, FieldShape]:
        shapes: dict[str, FieldShape] = {}
        for update in fields:
            if update.op not in ("set", "append"):
                raise InvalidEventError(
                    f"field {update.name!r}: op must be 'set' or 'append', not {update.op!r}",
                    code="bad_field_op",
                )
            if not check_text(update.name, "field name"):
                raise InvalidEventError("a field needs a name", code="field_requires_name")
            if not check_text(update.field_type, "field_type"):
                raise InvalidEventError(
                    f"field {update.name!r} needs a field_type", code="field_requires_type"
                )
            check_codec_version(update.codec_version, update.name)
            check_value(update.value, update.name)
            shape = (update.op, update.value.kind, update.field_type, update.codec_version)
            known = shapes.get(update.name) or self._shapes.get(update.name)
            problem = field_conflict(update.name, known, shape) if known else None
            if problem is not None:
                code, text = problem
                raise InvalidEventError(f"item {self._item_id!r}: {text}", code=code)
            shapes[update.name] = shape
        return shapes

    def _at(self, position: DatagenStreamPosition, checkpoint_events: int = 0) -> Composition:
        return self._call(
            f"{self._item_id}\0{self._attempt}\0{position.step_name}\0{position.step_index}"
            f"\0{self._ordinal}",
            checkpoint_events,
        )

    def _call(self, checkpoint_id: str, checkpoint_events: int = 0) -> Composition:
        prefix = event_id_prefix(self._item_id, checkpoint_id)
        return Composition(checkpoint_id, prefix, in_utc(self._now()), checkpoint_events)

    def _advance(self, count: int) -> None:
        self._next_item_seq += count
        self._ordinal += 1

    def _event(
        self,
        event_type: DatagenEventType,
        *,
        call: Composition,
        seq: int,
        ordinal: int = 0,
        position: DatagenStreamPosition | None = None,
        field_name: str | None = None,
        field_type: str | None = None,
        codec_version: int | None = None,
        value: DatagenValue | None = None,
        query_tags_json: str | None = None,
        status: DatagenItemStatus | None = None,
        error_type: str | None = None,
        error_dump: str | None = None,
        traceback: str | None = None,
    ) -> DatagenEvent:
        return DatagenEvent.composed(
            call,
            event_id_of(call.id_prefix, ordinal),
            self._item_id,
            seq,
            call.checkpoint_id,
            event_type,
            self._run_id,
            self._writer_epoch,
            self._root,
            self._parent,
            None if position is None else position.step_name,
            None if position is None else position.step_kind,
            None if position is None else position.step_index,
            None if position is None else position.enclosing_step,
            None if position is None else position.selector_step,
            self._attempt,
            field_name,
            field_type,
            codec_version,
            value,
            query_tags_json,
            status,
            error_type,
            error_dump,
            traceback,
            call.moment,
            DATAGEN_SCHEMA_VERSION,
        )
