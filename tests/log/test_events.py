"""Events: their columns, their exchange form, their times."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen_ray import (
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStreamPosition,
    InvalidEventError,
    InvalidItemIdError,
)
from datagen_ray.log.events import (
    format_timestamp,
    parse_timestamp,
    timestamp_from_micros,
    timestamp_micros,
)
from tests.log.builders import NOW, created, field_set, row, stored

UTC_TIMES = st.datetimes(timezones=st.just(timezone.utc))


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "event_id": "e",
        "item_id": "5",
        "root_item_id": "5",
        "item_seq": 1,
        "checkpoint_id": "c",
        "event_type": "ITEM_CREATED",
        "run_id": "r",
        "writer_epoch": "w",
        **more,
    }


def test_root_and_parent_are_derived_when_omitted() -> None:
    event = created(item_id="5/x:0/y:1")
    assert (event.root_item_id, event.parent_item_id) == ("5", "5/x:0")
    assert created(item_id="5").parent_item_id is None


def test_an_id_that_has_no_root_cannot_be_derived() -> None:
    with pytest.raises(InvalidItemIdError):
        created(item_id="")


def test_the_exchange_form_comes_back_equal() -> None:
    for event in (
        created(query_tags_json='{"a":1}'),
        field_set(2, {"a": [1.5, None]}),
        field_set(2, b"bytes"),
        row("FAILED", 3, error_dump="x", traceback="y"),
        row("TERMINAL", 4),
    ):
        again = DatagenEvent.from_dict(event.to_dict())
        assert again == event
        assert again.content() == event.content()


def test_words_of_the_exchange_form_become_members() -> None:
    event = row("STEP_COMPLETED", 1)
    assert event.event_type is DatagenEventType.STEP_COMPLETED
    assert event.step_kind is DatagenStepKind.LEAF
    assert row("TERMINAL", 1).status is DatagenItemStatus.COMPLETED


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (minimal(surprise=1), "unknown_key"),
        (minimal(value_i64=1), "unknown_key"),
        ({k: v for k, v in minimal().items() if k != "run_id"}, "missing_key"),
        (minimal(event_type="item_created"), "unsupported_event_type"),
        (minimal(event_type=5), "wrong_type"),
        (minimal(step_kind="Leaf"), "unsupported_step_kind"),
        (minimal(status="done"), "unsupported_status"),
        (minimal(item_seq="1"), "wrong_type"),
        (minimal(item_seq=None), "wrong_type"),
        (minimal(step_index=1.0), "wrong_type"),
        (minimal(item_id=5), "wrong_type"),
        (minimal(step_name="\ud800"), "not_utf8"),
        (minimal(root_item_id=""), "empty_column"),
        (minimal(event_ts="yesterday"), "bad_timestamp"),
        (minimal(event_ts=5), "wrong_type"),
        (minimal(event_ts=datetime(2024, 1, 1)), "bad_timestamp"),  # noqa: DTZ001
        ([], "wrong_type"),
    ],
)
def test_an_exchange_form_that_is_no_event_is_refused(data: Any, code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        DatagenEvent.from_dict(data)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("moment", "code"),
    [
        ("2024-01-01", "wrong_type"),
        (datetime(2024, 1, 1), "bad_timestamp"),  # noqa: DTZ001
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), "bad_timestamp"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))), "bad_timestamp"),
    ],
)
def test_an_event_needs_an_aware_time_within_range(moment: Any, code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        created(event_ts=moment)
    assert caught.value.code == code


def test_a_time_of_another_zone_is_the_same_moment_in_utc() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    event = created(event_ts=there)
    assert event.event_ts == NOW
    assert event.event_ts.tzinfo is timezone.utc
    assert event.content() == created(event_ts=NOW).content()


@given(UTC_TIMES)
def test_a_time_survives_its_text_and_its_number(moment: datetime) -> None:
    assert parse_timestamp(format_timestamp(moment)) == moment
    assert timestamp_from_micros(timestamp_micros(moment)) == moment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05+00:00"),
        ("2024-01-02 03:04:05.5z", "2024-01-02T03:04:05.500+00:00"),
        ("2024-01-02T03:04:05.1234567+02:00", "2024-01-02T01:04:05.123456+00:00"),
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00+00:00"),
    ],
)
def test_an_rfc_3339_time_is_cut_to_microseconds_in_utc(text: str, expected: str) -> None:
    assert format_timestamp(parse_timestamp(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-02T03:04:05",
        "2024-13-02T03:04:05Z",
        "2024-01-02T03:04:05+24:00",
        "0001-01-01T00:00:00+01:00",
        "\uff12024-01-02T03:04:05Z",
        "2024-01-02T03:04:05Z\n",
    ],
)
def test_a_text_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        parse_timestamp(text)
    assert caught.value.code == "bad_timestamp"


def test_a_stored_time_out_of_range_is_the_nearest_there_is() -> None:
    assert timestamp_from_micros(2**62) == datetime.max.replace(tzinfo=timezone.utc)
    assert timestamp_from_micros(-(2**62)) == datetime.min.replace(tzinfo=timezone.utc)


def test_a_position_is_all_five_parts() -> None:
    base = DatagenStreamPosition("s", DatagenStepKind.LEAF, 0)
    others = [
        DatagenStreamPosition("t", DatagenStepKind.LEAF, 0),
        DatagenStreamPosition("s", DatagenStepKind.BRANCH, 0),
        DatagenStreamPosition("s", DatagenStepKind.LEAF, 1),
        DatagenStreamPosition("s", DatagenStepKind.LEAF, 0, ""),
        DatagenStreamPosition("s", DatagenStepKind.LEAF, 0, None, ""),
    ]
    assert len({base, *others}) == 6


def test_a_position_has_an_exchange_form_of_its_own() -> None:
    data = {"step_name": "s", "step_kind": "leaf", "index": 3, "enclosing": "e"}
    position = DatagenStreamPosition.from_dict(data)
    assert position == DatagenStreamPosition("s", DatagenStepKind.LEAF, 3, "e")
    assert str(position) == "s[3] (leaf in e)"
    for change, code in (
        ({"index": "3"}, "wrong_type"),
        ({"index": True}, "wrong_type"),
        ({"step_kind": "x"}, "unsupported_step_kind"),
        ({"step_name": 5}, "wrong_type"),
        ({"enclosing": "\ud800"}, "not_utf8"),
    ):
        with pytest.raises(InvalidEventError) as caught:
            DatagenStreamPosition.from_dict({**data, **change})
        assert caught.value.code == code
    for name in ("step_name", "step_kind", "index"):
        with pytest.raises(InvalidEventError) as caught:
            DatagenStreamPosition.from_dict({key: data[key] for key in data if key != name})
        assert caught.value.code == "missing_key"


def test_an_event_that_names_no_whole_step_has_no_position() -> None:
    assert row("STEP_COMPLETED", 1).position is not None
    for name in ("step_name", "step_kind", "step_index"):
        assert stored(row("STEP_COMPLETED", 1), **{name: None}).position is None


def test_content_tells_apart_every_stored_column() -> None:
    event = stored(field_set(2, 7), parent_item_id="p", enclosing_step="e", selector_step="s")
    seen = {event.content()}
    changes: dict[str, Any] = {
        "item_id": "6",
        "item_seq": 3,
        "checkpoint_id": "d",
        "run_id": "r2",
        "writer_epoch": "w2",
        "root_item_id": "6",
        "parent_item_id": None,
        "step_name": "t",
        "step_index": 1,
        "step_kind": DatagenStepKind.BRANCH,
        "enclosing_step": None,
        "selector_step": None,
        "attempt": 1,
        "field_name": "g",
        "field_type": "x",
        "codec_version": 2,
        "value": field_set(2, 8).value,
        "query_tags_json": "1",
        "status": DatagenItemStatus.FAILED,
        "error_type": "E",
        "error_dump": "",
        "traceback": "",
        "event_ts": NOW + timedelta(microseconds=1),
        "schema_version": 1,
        "event_type": DatagenEventType.FIELD_APPEND,
    }
    assert changes.keys() | {"event_id"} == set(DatagenEvent.__dataclass_fields__)
    for name, other in changes.items():
        seen.add(stored(event, **{name: other}).content())
    assert len(seen) == 1 + len(changes)


def test_events_travel_between_processes_unchanged() -> None:
    for event in (created(), field_set(2, {"a": 1}), field_set(2, b"x"), row("FAILED", 3)):
        copy = pickle.loads(pickle.dumps(event))
        assert copy == event
        assert copy.content() == event.content()
