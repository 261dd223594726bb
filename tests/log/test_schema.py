"""The Arrow form of events."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa

from datagen_ray import DatagenBlobValue, DatagenValue
from datagen_ray.log.schema import (
    DATAGEN_SCHEMA,
    EVENT_COLUMNS,
    decode_batch,
    encode_events,
)
from tests.log.builders import NOW, completed, created, field_set, row, terminal

EVENTS = [
    created(query_tags_json='{"a":1}'),
    row("STEP_STARTED", 2, enclosing_step="", selector_step="s"),
    field_set(3, -(2**63)),
    field_set(4, math.nan, field_name="f"),
    field_set(5, False, field_name="g"),
    field_set(6, "", field_name="h"),
    field_set(7, None, field_name="i"),
    field_set(8, b"\0\xff", field_name="j"),
    completed(9, attempt=2**31 - 1),
    row("FAILED", 10, error_dump="", traceback="t" * 100_000),
    terminal(11, item_id="5/x:0"),
]


def test_the_schema_is_the_shared_one() -> None:
    facts = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    ours = [
        {
            "name": field.name,
            "type": str(field.type),
            "nullable": field.nullable,
            "metadata": {
                key.decode(): value.decode() for key, value in (field.metadata or {}).items()
            },
        }
        for field in DATAGEN_SCHEMA
    ]
    assert ours == facts


def test_events_come_back_from_a_batch_exactly() -> None:
    batch = encode_events(EVENTS)
    assert batch.schema.equals(DATAGEN_SCHEMA, check_metadata=True)
    assert decode_batch(batch) == EVENTS
    assert decode_batch(pa.Table.from_batches([batch, batch])) == EVENTS * 2


def test_large_batches_come_back_exactly_whatever_their_columns_repeat() -> None:
    alike = [field_set(7, "x", event_id="same") for _ in range(100)]
    for odd in EVENTS:
        for place in (0, 50, 99):
            events = [*alike[:place], odd, *alike[place + 1 :]]
            assert decode_batch(encode_events(events)) == events
    assert decode_batch(encode_events(alike)) == alike
    assert decode_batch(encode_events(EVENTS * 10)) == EVENTS * 10


def test_the_first_and_the_last_time_come_back() -> None:
    first = datetime(1, 1, 1, tzinfo=timezone.utc)
    last = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)
    events = [created(event_ts=first), created(event_ts=last)]
    assert decode_batch(encode_events(events)) == events


def test_blobs_are_lazy_where_their_column_was_not_read() -> None:
    batch = encode_events(EVENTS).select(list(EVENT_COLUMNS))
    lazy = decode_batch(batch)[7].value
    assert lazy is not None
    assert lazy.value == DatagenBlobValue(None, 2, EVENTS[7].value.value.checksum)  # type: ignore[union-attr]


def test_an_empty_batch_has_the_schema() -> None:
    assert encode_events([]).schema.equals(DATAGEN_SCHEMA)
    assert decode_batch(encode_events([])) == []


def test_times_are_utc_at_microseconds() -> None:
    (event,) = decode_batch(encode_events([created()]))
    assert event.event_ts == NOW
    assert event.event_ts.tzinfo is timezone.utc


def test_rows_that_make_no_sense_are_decoded_as_they_stand() -> None:
    batch = encode_events([field_set(1, 5)]).to_pydict()
    strange = {
        **batch,
        "event_type": ["MERGED"],
        "step_kind": ["fork"],
        "status": ["lost"],
        "value_kind": ["date"],
        "schema_version": [9],
        "event_ts": pa.array([2**62], pa.timestamp("us", tz="UTC")),
    }
    (event,) = decode_batch(pa.Table.from_pydict(strange, schema=DATAGEN_SCHEMA))
    assert (event.event_type, event.step_kind, event.status) == ("MERGED", "fork", "lost")
    assert event.value is not None
    assert (event.value.kind, event.value.value) == ("date", None)
    assert event.to_dict()["event_type"] == "MERGED"


def test_a_value_whose_column_is_null_is_no_value() -> None:
    batch = encode_events([field_set(1, 5)]).to_pydict()
    (event,) = decode_batch(
        pa.Table.from_pydict({**batch, "value_i64": [None]}, schema=DATAGEN_SCHEMA)
    )
    assert event.value is None


def test_equal_json_has_one_stored_form() -> None:
    one = DatagenValue.json({"b": [1, 2], "a": "é"})
    assert one == DatagenValue.json({"a": "é", "b": (1, 2)})
    assert one.raw == '{"a":"é","b":[1,2]}'
