"""The Arrow schema of the log, and the translation of events to record batches and back.

The schema is shared with other programs that read these logs: names, types, nullability and the
metadata of ``event_id`` (the LSM primary key) are fixed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from datagen_ray.log.events import (
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    timestamp_from_micros,
    timestamp_micros,
)
from datagen_ray.log.values import DatagenBlobValue, DatagenValue

_TEXT = pa.string()
_LONG_TEXT = pa.large_string()
_TIME = pa.timestamp("us", tz="UTC")

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
_plain_columns = attrgetter(*_PLAIN_COLUMNS)
_RAW_COLUMN = {
    "int": "value_i64",
    "float": "value_f64",
    "bool": "value_bool",
    "str": "value_str",
    "json": "value_json",
    "blob": BLOB_COLUMN,
}
_VALUE_COLUMNS = ("value_kind", *_RAW_COLUMN.values(), "payload_size", "payload_checksum")


def encode_events(events: Sequence[DatagenEvent]) -> pa.RecordBatch:
    """One record batch with a row for each event, in order; shape ``(len(events), 34)``."""
    count = len(events)
    rows = map(_plain_columns, events)
    columns: dict[str, Sequence[Any]] = dict(
        zip(_PLAIN_COLUMNS, zip(*rows, strict=True), strict=False)  # without events no columns
    )
    values: dict[str, list[Any]] = defaultdict(lambda: [None] * count)
    for row, event in enumerate(events):
        value = event.value
        if value is None:
            continue
        values["value_kind"][row] = value.kind
        raw = value.raw
        if isinstance(raw, DatagenBlobValue):
            values[BLOB_COLUMN][row] = raw.bytes
            values["payload_size"][row] = raw.size
            values["payload_checksum"][row] = raw.checksum
        elif value.kind in _RAW_COLUMN:  # else a word of another version, which has no column
            values[_RAW_COLUMN[value.kind]][row] = raw
    columns.update(values)
    columns["event_ts"] = [timestamp_micros(event.event_ts) for event in events]
    arrays = [_array(columns.get(field.name), field.type, count) for field in DATAGEN_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=DATAGEN_SCHEMA)


def _array(column: Sequence[Any] | None, type_: pa.DataType, count: int) -> pa.Array:
    """A column as an array; columns without a value, which most are, cost next to nothing."""
    if column is None or column.count(None) == count:
        return pa.nulls(count, type_)
    if type_ == _TIME:
        return pa.array(column, pa.int64()).cast(_TIME)
    return pa.array(column, type_)


def decode_batch(batch: pa.RecordBatch | pa.Table) -> list[DatagenEvent]:
    """The events of a batch or table, as they are stored: nothing is derived, checked or refused.

    Blobs stay lazy where ``value_blob`` was not read. A type, kind or status that this package
    does not know stays the stored string, which the fold of that item refuses.
    """
    names = set(batch.schema.names)
    columns = {name: batch.column(name).to_pylist() for name in _PLAIN_COLUMNS}
    columns["event_type"] = _members(columns["event_type"], DatagenEventType)
    columns["step_kind"] = _members(columns["step_kind"], DatagenStepKind)
    columns["status"] = _members(columns["status"], DatagenItemStatus)
    columns["event_ts"] = [
        timestamp_from_micros(micros)
        for micros in batch.column("event_ts").cast(pa.int64()).to_pylist()
    ]
    value_columns = {
        name: batch.column(name).to_pylist() for name in _VALUE_COLUMNS if name in names
    }
    columns["value"] = [
        None if kind is None else _value(kind, row, value_columns)
        for row, kind in enumerate(value_columns["value_kind"])
    ]
    names_in_order = tuple(columns)
    return [
        DatagenEvent.as_stored(names_in_order, row) for row in zip(*columns.values(), strict=True)
    ]


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
