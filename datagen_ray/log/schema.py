"""The Arrow schema of the log, and the translation of events to record batches and back.

The schema is shared with other programs that read these logs: names, types, nullability and the
metadata of ``event_id`` (the LSM primary key) are fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any

import pyarrow as pa

from datagen_ray.log.events import (
    EPOCH,
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    timestamp_from_micros,
)
from datagen_ray.log.values import DatagenBlobValue, DatagenValue

_TEXT = pa.string()
_LONG_TEXT = pa.large_string()
_TIME = pa.timestamp("us", tz="UTC")
_SINCE_EPOCH = pa.duration("us")

DATAGEN_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field(
            "event_id",
            _TEXT,
            nullable=False,
            metadata={"lance-schema:unenforced-primary-key": "true"},
        ),
        pa.field("item_id", _TEXT, nullable=False),
        pa.field("root_item_id", _TEXT, nullable=False),
        pa.field("parent_item_id", _TEXT),
        pa.field("item_seq", pa.int64(), nullable=False),
        pa.field("checkpoint_id", _TEXT, nullable=False),
        pa.field("event_type", _TEXT, nullable=False),
        pa.field("step_name", _TEXT),
        pa.field("step_kind", _TEXT),
        pa.field("step_index", pa.int64()),
        pa.field("enclosing_step", _TEXT),
        pa.field("selector_step", _TEXT),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("run_id", _TEXT, nullable=False),
        pa.field("writer_epoch", _TEXT, nullable=False),
        pa.field("field_name", _TEXT),
        pa.field("field_type", _TEXT),
        pa.field("codec_version", pa.int32()),
        pa.field("value_kind", _TEXT),
        pa.field("value_i64", pa.int64()),
        pa.field("value_f64", pa.float64()),
        pa.field("value_bool", pa.bool_()),
        pa.field("value_str", _LONG_TEXT),
        pa.field("value_json", _LONG_TEXT),
        pa.field("value_blob", pa.large_binary()),
        pa.field("payload_size", pa.int64()),
        pa.field("payload_checksum", _TEXT),
        pa.field("query_tags_json", _LONG_TEXT),
        pa.field("status", _TEXT),
        pa.field("error_type", _TEXT),
        pa.field("error_dump", _LONG_TEXT),
        pa.field("traceback", _LONG_TEXT),
        pa.field("event_ts", _TIME, nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
    ]
)

BLOB_COLUMN = "value_blob"

EVENT_COLUMNS: tuple[str, ...] = tuple(name for name in DATAGEN_SCHEMA.names if name != BLOB_COLUMN)
"""All that an event needs but the bytes of blobs; what normal reads ask for."""

_PLAIN_COLUMNS = (
    "event_id",
    "item_id",
    "root_item_id",
    "parent_item_id",
    "item_seq",
    "checkpoint_id",
    "event_type",
    "step_name",
    "step_kind",
    "step_index",
    "enclosing_step",
    "selector_step",
    "attempt",
    "run_id",
    "writer_epoch",
    "field_name",
    "field_type",
    "codec_version",
    "query_tags_json",
    "status",
    "error_type",
    "error_dump",
    "traceback",
    "schema_version",
)
_row_of = attrgetter(*_PLAIN_COLUMNS, "event_ts", "value")
_COLUMNS_OF = tuple(attrgetter(name) for name in (*_PLAIN_COLUMNS, "event_ts", "value"))
_RAW_COLUMN = {
    "int": "value_i64",
    "float": "value_f64",
    "bool": "value_bool",
    "str": "value_str",
    "json": "value_json",
    "blob": BLOB_COLUMN,
}
_EVENT_FIELDS = tuple(field.name for field in fields(DatagenEvent))
_VALUE_COLUMNS = ("value_kind", *_RAW_COLUMN.values(), "payload_size", "payload_checksum")


_FIELDS = tuple((field.name, field.type) for field in DATAGEN_SCHEMA)
_REPEATABLE = frozenset(
    name
    for name, type_ in _FIELDS
    if name in _PLAIN_COLUMNS and type_ in (_TEXT, pa.int32(), pa.int64())
)
_BY_COLUMN_FROM = 256
"""From so many rows on, as many tuples would set off Python's search for cycles each time."""

_REPEATED_FROM = 32
"""From so many rows on, looking for columns that hold one value only pays."""


def encode_events(events: Sequence[DatagenEvent]) -> pa.RecordBatch:
    """One record batch with a row for each event, in order; shape ``(len(events), 34)``."""
    count = len(events)
    if not count:
        return pa.RecordBatch.from_pylist([], schema=DATAGEN_SCHEMA)
    columns_in_order: Iterable[Sequence[Any]]
    if count < _BY_COLUMN_FROM:
        columns_in_order = zip(*map(_row_of, events), strict=True)
    else:
        columns_in_order = (list(map(of, events)) for of in _COLUMNS_OF)
    *plain, times, values = columns_in_order
    columns: dict[str, Sequence[Any]] = dict(zip(_PLAIN_COLUMNS, plain, strict=True))
    columns.update(_value_columns(values))
    arrays = [
        _times(times) if name == "event_ts" else _array(name, columns.get(name), type_, count)
        for name, type_ in _FIELDS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DATAGEN_SCHEMA)


def _value_columns(values: Sequence[DatagenValue | None]) -> dict[str, list[Any]]:
    """The columns that the values of a batch use: mostly their kind and that of one kind."""
    kinds = [None if value is None else value.kind for value in values]
    columns: dict[str, list[Any]] = {"value_kind": kinds}
    for kind in set(kinds):
        if kind is None or kind not in _RAW_COLUMN:
            continue  # no value, or a word of another version, which has no column
        raws = [value.raw if value is not None and value.kind == kind else None for value in values]
        if kind != "blob":
            columns[_RAW_COLUMN[kind]] = raws
            continue
        blobs = [raw if isinstance(raw, DatagenBlobValue) else _NO_BLOB for raw in raws]
        columns[BLOB_COLUMN] = [blob.bytes for blob in blobs]
        columns["payload_size"] = [blob.size for blob in blobs]
        columns["payload_checksum"] = [blob.checksum for blob in blobs]
    return columns


_NO_BLOB = DatagenBlobValue(None)


def _times(moments: Sequence[datetime]) -> pa.Array:
    """Times as an array: as what has passed since the epoch, which Arrow reads far quicker."""
    return pa.array([moment - EPOCH for moment in moments], _SINCE_EPOCH).view(_TIME)


def _array(name: str, column: Sequence[Any] | None, type_: pa.DataType, count: int) -> pa.Array:
    """A column as an array; one without a value, which most are, costs next to nothing.

    Nor does one that holds the same in every row, such as the run's id.
    """
    if column is None:
        return pa.nulls(count, type_)
    first = column[0]
    if first is column[-1]:
        if first is None:
            if column.count(None) == count:
                return pa.nulls(count, type_)
        elif count >= _REPEATED_FROM and name in _REPEATABLE and column.count(first) == count:
            return pa.repeat(pa.scalar(first, type_), count)
    return pa.array(column, type_)


def decode_batch(batch: pa.RecordBatch | pa.Table) -> list[DatagenEvent]:
    """The events of a batch or table, as they are stored: nothing is derived, checked or refused.

    Blobs stay lazy where ``value_blob`` was not read. A type, kind or status that this package
    does not know stays the stored string, which the fold of that item refuses.
    """
    names = set(batch.schema.names)
    columns = {name: _column(batch, name) for name in _PLAIN_COLUMNS}
    columns["event_type"] = _members(columns["event_type"], DatagenEventType)
    columns["step_kind"] = _members(columns["step_kind"], DatagenStepKind)
    columns["status"] = _members(columns["status"], DatagenItemStatus)
    columns["event_ts"] = list(
        map(timestamp_from_micros, batch.column("event_ts").cast(pa.int64()).to_pylist())
    )
    values = {name: _column(batch, name) for name in _VALUE_COLUMNS if name in names}
    columns["value"] = [
        None if kind is None else _value(kind, row, values)
        for row, kind in enumerate(values["value_kind"])
    ]
    return list(map(DatagenEvent.of_row, *(columns[name] for name in _EVENT_FIELDS)))


def _column(batch: pa.RecordBatch | pa.Table, name: str) -> list[Any]:
    column = batch.column(name)
    # Most columns of most batches are null throughout.
    return [None] * len(column) if column.null_count == len(column) else column.to_pylist()


def _members(stored: Iterable[str | None], enum: type[Any]) -> list[Any]:
    """The members that stored strings spell; what is unknown stays a string, for the fold to name.

    One row that a newer program wrote must not keep the rows of other items from being read.
    """
    known = {None: None, **{member.value: member for member in enum}}
    return [known.get(text, text) for text in stored]


def _value(kind: str, row: int, columns: dict[str, list[Any]]) -> DatagenValue | None:
    if kind == "blob":
        content = columns[BLOB_COLUMN][row] if BLOB_COLUMN in columns else None
        return DatagenValue.as_stored(
            "blob",
            DatagenBlobValue(
                content, columns["payload_size"][row], columns["payload_checksum"][row]
            ),
        )
    column = _RAW_COLUMN.get(kind)
    if column is None:
        return DatagenValue.as_stored(kind, None)
    raw = columns[column][row]
    return None if raw is None else DatagenValue.as_stored(kind, raw)
