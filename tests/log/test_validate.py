"""The rules of append: each refused with its code, and nothing else refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from datagen_ray import (
    DatagenBlobValue,
    DatagenEvent,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenValue,
    InvalidEventError,
)
from datagen_ray.log.validate import (
    batch_size_bytes,
    check_stored_event,
    validate_append,
    validate_checkpoint,
)
from datagen_ray.log.values import blob_checksum
from tests.log.builders import (
    completed,
    created,
    field_append,
    field_set,
    row,
    stored,
    terminal,
)


def blob(content: bytes | None, size: int | None, checksum: str | None = None) -> DatagenValue:
    return DatagenValue("blob", DatagenBlobValue(content, size, checksum))


VALID = {
    "created": created(),
    "created at 0": created(0),
    "created of a sub-item": created(item_id="5/x:0/y:-1"),
    "tags": created(query_tags_json='{"a":[1,2]}'),
    "started": row("STEP_STARTED", 2),
    "started loop": row("STEP_STARTED", 2, step_kind="loop"),
    "set": field_set(2, 1),
    "append": field_append(2, "x"),
    "negative codec version": field_set(2, 1, codec_version=-1),
    "blob": field_set(2, b""),
    "blob without checksum": field_set(2, blob(b"abc", 3)),
    "blob with a checksum of another kind": field_set(2, blob(b"abc", 3, "md5:x")),
    "completed": completed(2),
    "completed root step": completed(2, step_kind="root"),
    "chosen by a selector": completed(2, enclosing_step="e", selector_step="s"),
    "failed": row("FAILED", 2),
    "failed selector": row("FAILED", 2, step_kind="router"),
    "terminal": terminal(2),
    "filtered at a step": terminal(
        2, status="filtered", step_name="s", step_kind="leaf", step_index=0, error_dump="why"
    ),
    "largest numbers": completed(2**63 - 1, attempt=2**31 - 1, step_index=2**63 - 1),
    "JSON in another's spelling": field_set(2, DatagenValue.as_stored("json", '{"b": 1e22}')),
    "any event id": created(event_id="not a uuid"),
}

REFUSED: dict[str, tuple[DatagenEvent, str]] = {
    **{
        f"empty {name}": (stored(created(), **{name: ""}), "empty_column")
        for name in ("event_id", "item_id", "root_item_id", "checkpoint_id", "run_id",
                     "writer_epoch")
    },
    **{
        f"surrogate in {name}": (stored(field_set(2, 1), **{name: "\ud800"}), "not_utf8")
        for name in ("event_id", "checkpoint_id", "run_id", "writer_epoch", "step_name",
                     "enclosing_step", "selector_step", "field_name", "field_type", "error_type",
                     "error_dump", "traceback", "item_id")
    },
    **{
        f"number as {name}": (stored(field_set(2, 1), **{name: 5}), "wrong_type")
        for name in ("event_id", "item_id", "step_name", "field_name", "error_dump")
    },
    "other root": (stored(created(), root_item_id="6"), "root_mismatch"),
    "sub-item as its own root": (
        stored(created(item_id="5/x:0"), root_item_id="5/x:0"), "root_mismatch"),
    "parent of a root": (stored(created(), parent_item_id="5"), "parent_mismatch"),
    "no parent": (stored(created(item_id="5/x:0"), parent_item_id=None), "parent_mismatch"),
    "other parent": (stored(created(item_id="5/x:0"), parent_item_id="6"), "parent_mismatch"),
    "leading zero": (created(item_id="5/x:01"), "item_id_not_canonical"),
    "no segment": (stored(created(), item_id="5/x"), "item_id_malformed_segment"),
    "bad index": (stored(created(), item_id="5/x:y"), "item_id_bad_branch_index"),
    "empty root": (stored(created(), item_id="/x:0"), "item_id_empty_root"),
    "NUL in item id": (created(item_id="5\0"), "nul_in_id"),
    "NUL in step name": (completed(2, step_name="a\0b"), "nul_in_id"),
    "negative item_seq": (created(-1), "negative_item_seq"),
    "huge item_seq": (created(2**63), "out_of_range"),
    "bool item_seq": (stored(created(), item_seq=True), "wrong_type"),
    "negative attempt": (created(attempt=-1), "negative_attempt"),
    "huge attempt": (created(attempt=2**31), "out_of_range"),
    "float attempt": (stored(created(), attempt=1.0), "wrong_type"),
    "older version": (created(schema_version=1), "schema_version"),
    "newer version": (created(schema_version=3), "schema_version"),
    "no step name": (completed(2, step_name=None), "requires_step_name"),
    "empty step name": (completed(2, step_name=""), "requires_step_name"),
    "no step kind": (completed(2, step_kind=None), "requires_step_kind"),
    "no step index": (completed(2, step_index=None), "requires_step_index"),
    "negative step index": (completed(2, step_index=-1), "negative_step_index"),
    "huge step index": (completed(2, step_index=2**63), "out_of_range"),
    "negative index of a filter": (terminal(2, step_index=-1), "negative_step_index"),
    "leaf started": (row("STEP_STARTED", 2, step_kind="leaf"), "step_kind_not_started"),
    "branch started": (row("STEP_STARTED", 2, step_kind="branch"), "step_kind_not_started"),
    "router completed": (completed(2, step_kind="router"), "step_kind_not_completed"),
    "field of a conditional": (
        field_set(2, 1, step_kind="conditional"), "step_kind_not_completed"),
    "field without name": (field_set(2, 1, field_name=None), "field_requires_name"),
    "field without type": (field_set(2, 1, field_type=""), "field_requires_type"),
    "field without version": (
        field_set(2, 1, codec_version=None), "field_requires_codec_version"),
    "field without value": (row("FIELD_SET", 2, value=None), "field_requires_value"),
    "field without step": (field_set(2, 1, step_name=None), "requires_step_name"),
    "huge codec version": (field_set(2, 1, codec_version=2**31), "out_of_range"),
    "text codec version": (stored(field_set(2, 1), codec_version="1"), "wrong_type"),
    "stray name": (created(field_name="f"), "stray_field_column"),
    "stray type": (completed(2, field_type="t"), "stray_field_column"),
    "stray version": (terminal(2, codec_version=1), "stray_field_column"),
    "stray value": (row("FAILED", 2, value=DatagenValue.of(1)), "stray_field_column"),
    "blob not loaded": (field_set(2, blob(None, 3)), "blob_without_bytes"),
    "blob of another size": (field_set(2, blob(b"abc", 4)), "blob_size_mismatch"),
    "blob without size": (field_set(2, blob(b"abc", None)), "blob_size_mismatch"),
    "blob with another's checksum": (
        field_set(2, blob(b"abc", 3, blob_checksum(b"abd"))), "blob_checksum_mismatch"),
    "unknown value kind": (
        field_set(2, DatagenValue.as_stored("date", None)), "unsupported_value_kind"),
    "number that is none": (
        field_set(2, DatagenValue.as_stored("int", None)), "wrong_type"),
    "number as text": (field_set(2, DatagenValue.as_stored("int", "1")), "wrong_type"),
    "JSON that is none": (field_set(2, DatagenValue.as_stored("json", "{")), "bad_json"),
    "unknown event type": (stored(created(), event_type="MERGED"), "unsupported_event_type"),
    "unknown step kind": (stored(completed(2), step_kind="fork"), "unsupported_step_kind"),
    "unknown status": (stored(terminal(2), status="lost"), "unsupported_status"),
    "terminal without status": (terminal(2, status=None), "terminal_requires_status"),
    "terminal running": (terminal(2, status="running"), "terminal_requires_status"),
    "terminal failed": (terminal(2, status="failed"), "terminal_requires_status"),
    "created failed": (created(status="failed"), "status_mismatch"),
    "failed running": (row("FAILED", 2, status="running"), "status_mismatch"),
    "tags that are no JSON": (created(query_tags_json="{"), "bad_json"),
    "tags that are no text": (stored(created(), query_tags_json=5), "wrong_type"),
}  # fmt: skip


@pytest.mark.parametrize("event", VALID.values(), ids=VALID)
def test_a_valid_event_is_taken_as_it_is(event: DatagenEvent) -> None:
    (checked,) = validate_append([event])
    if event.event_type in ("ITEM_CREATED", "FAILED"):
        event = replace(event, status=checked.status)
    assert checked == event


@pytest.mark.parametrize(("event", "code"), REFUSED.values(), ids=REFUSED)
def test_an_event_that_breaks_a_rule_is_refused(event: DatagenEvent, code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        validate_append([created(item_id="fine"), event])
    assert (caught.value.code, caught.value.index) == (code, 1)
    assert "\n" not in str(caught.value)


def test_only_events_are_taken() -> None:
    with pytest.raises(InvalidEventError, match="from_dict") as caught:
        validate_append([{"event_id": "e"}])  # type: ignore[list-item]
    assert caught.value.code == "wrong_type"


def test_an_absent_status_is_filled_in() -> None:
    checked = validate_append([created(), row("FAILED", 2), completed(3)])
    assert [event.status for event in checked] == [
        DatagenItemStatus.RUNNING,
        DatagenItemStatus.FAILED,
        None,
    ]


def test_tags_are_stored_canonically_and_null_not_at_all() -> None:
    spaced, null = validate_append(
        [created(query_tags_json='{ "b": 1, "a": 2 }'), created(2, query_tags_json="null")]
    )
    assert spaced.query_tags_json == '{"a":2,"b":1}'
    assert null.query_tags_json is None


def test_an_event_twice_in_a_batch_is_kept_once() -> None:
    assert validate_append([created(), field_set(2, 1), created()]) == validate_append(
        [created(), field_set(2, 1)]
    )


@pytest.mark.parametrize(
    "other",
    [
        field_set(2, 2, event_id="same"),
        field_set(3, 1, event_id="same"),
        field_set(2, 1, item_id="6", event_id="same"),
        field_set(2, 1, event_id="same", attempt=1),
    ],
)
def test_one_id_for_two_contents_in_a_batch_is_refused(other: DatagenEvent) -> None:
    with pytest.raises(InvalidEventError) as caught:
        validate_append([field_set(2, 1, event_id="same"), other])
    assert caught.value.code == "event_id_reused"


def test_blobs_of_one_id_are_compared_by_their_bytes() -> None:
    one, other = (field_set(2, blob(data, 3)) for data in (b"abc", b"abd"))
    with pytest.raises(InvalidEventError) as caught:
        validate_append([one, other])
    assert caught.value.code == "event_id_reused"


def test_two_events_at_one_place_in_a_batch_are_refused() -> None:
    with pytest.raises(InvalidEventError) as caught:
        validate_append([field_set(2, 1, event_id="a"), field_set(2, 1, event_id="b")])
    assert caught.value.code == "duplicate_item_seq_in_batch"
    assert validate_append([created(2, "a"), created(2, "b")])


def test_an_empty_batch_is_taken() -> None:
    assert validate_append([]) == []


def checkpoint(**other: Any) -> list[DatagenEvent]:
    return [
        field_set(2, 1, checkpoint_id="c"),
        field_append(3, 1, checkpoint_id="c", field_name="g", **other),
        completed(4, checkpoint_id="c"),
    ]


def test_a_checkpoint_is_fields_and_one_completion_in_any_order() -> None:
    events = checkpoint()
    assert validate_checkpoint(events) == events
    assert validate_checkpoint(events[::-1]) == events[::-1]
    assert validate_checkpoint(events[2:]) == events[2:]


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([], "checkpoint_completed_count"),
        (checkpoint()[:2], "checkpoint_completed_count"),
        ([*checkpoint(), completed(5, checkpoint_id="c")], "checkpoint_completed_count"),
        ([*checkpoint(), created()], "checkpoint_foreign_event"),
        ([*checkpoint(), row("STEP_STARTED", 1)], "checkpoint_foreign_event"),
        ([*checkpoint(), row("FAILED", 1)], "checkpoint_foreign_event"),
        ([*checkpoint(), terminal(5)], "checkpoint_foreign_event"),
        (checkpoint(run_id="r2"), "checkpoint_mixed_identity"),
        (checkpoint(writer_epoch="w2"), "checkpoint_mixed_identity"),
        (checkpoint(attempt=1), "checkpoint_mixed_identity"),
        (checkpoint(item_id="6"), "checkpoint_mixed_identity"),
        (
            [field_set(2, 1, checkpoint_id="d"), completed(3, checkpoint_id="c")],
            "checkpoint_mixed_identity",
        ),
        (checkpoint(step_name="other"), "checkpoint_step_mismatch"),
        (checkpoint(step_index=1), "checkpoint_step_mismatch"),
        (checkpoint(step_kind="branch"), "checkpoint_step_mismatch"),
        (checkpoint(enclosing_step="e"), "checkpoint_step_mismatch"),
        (checkpoint(selector_step="s"), "checkpoint_step_mismatch"),
        (checkpoint(step_name=None), "requires_step_name"),
        (checkpoint(field_type=None), "field_requires_type"),
    ],
)
def test_a_checkpoint_of_anything_else_is_refused(events: list[DatagenEvent], code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        validate_checkpoint(events)
    assert caught.value.code == code


def test_a_stored_row_may_lack_what_only_a_writer_has() -> None:
    check_stored_event(stored(created(), schema_version=1))
    check_stored_event(stored(created(), status=None))
    check_stored_event(field_set(2, blob(None, 3)))


@pytest.mark.parametrize("event", VALID.values(), ids=VALID)
def test_what_append_takes_is_sound_when_stored(event: DatagenEvent) -> None:
    check_stored_event(event)


def test_the_size_of_a_batch_grows_with_its_content() -> None:
    small = batch_size_bytes([field_set(2, "")])
    assert batch_size_bytes([field_set(2, "x" * 1000)]) == small + 1000
    assert batch_size_bytes([field_set(2, b"x" * 1000)]) == small + 1000
    assert batch_size_bytes([created(query_tags_json='"' + "x" * 998 + '"')]) == small + 1000
    assert batch_size_bytes([row("FAILED", 2, traceback="x" * 1000)]) == small + 1000
    assert DatagenStepKind.LOOP.is_driver
