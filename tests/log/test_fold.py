"""The fold: what a list of events comes to."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen_ray import (
    DatagenEvent,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStreamPosition,
    DatagenValue,
    FoldedDatagenItem,
    InternalError,
    ItemViolationError,
    fold_datagen_events,
)
from datagen_ray.log.fold import (
    failure_of,
    fold_tree,
    item_failures,
    order_events,
)
from tests.log.builders import (
    completed,
    created,
    field_append,
    field_set,
    row,
    stored,
    terminal,
)


def fold(*events: DatagenEvent) -> FoldedDatagenItem:
    folded = fold_datagen_events(events)
    assert folded is not None
    return folded


def test_nothing_and_no_item_created_never_started() -> None:
    assert fold_datagen_events([]) is None
    assert fold_datagen_events([row("FAILED", 1), completed(2)]) is None


def test_an_item_runs_until_its_terminal() -> None:
    assert fold(created(), row("FAILED", 2)).status is DatagenItemStatus.RUNNING
    assert fold(created(), terminal(2)).status is DatagenItemStatus.COMPLETED
    assert fold(created(), terminal(2, status="filtered")).status is DatagenItemStatus.FILTERED
    assert fold(created(), terminal(2)).is_terminated


def test_a_set_replaces_and_an_append_adds_in_order() -> None:
    item = fold(
        created(),
        field_set(2, 1),
        field_append(3, "a", field_name="log"),
        field_set(4, 2, codec_version=7),
        field_append(5, "b", field_name="log"),
    )
    assert item.fields["score"].value == DatagenValue.of(2)
    assert item.fields["score"].codec_version == 7
    assert item.fields["score"].event_ids == ("5#4",)
    assert [value.value for value in item.fields["log"].values] == ["a", "b"]
    assert item.fields["log"].event_ids == ("5#3", "5#5")


def test_every_value_of_an_appended_blob_has_its_own_event() -> None:
    item = fold(created(), *(field_append(n, b"%d" % n) for n in (2, 3, 4)))
    assert item.fields["score"].event_ids == ("5#2", "5#3", "5#4")
    assert item.blob_event_ids == {"score": "5#4"}


def test_the_trajectory_has_the_open_frames() -> None:
    outer = {"step_name": "main", "step_kind": "sequence"}
    inner = {"step_name": "loop", "step_kind": "loop", "enclosing_step": "main"}
    item = fold(
        created(),
        row("STEP_STARTED", 2, **outer),
        row("STEP_STARTED", 3, **inner),
        completed(4),
        completed(5, **inner),
        row("FAILED", 6),
    )
    assert [cursor.item_seq for cursor in item.trajectory.ordered] == [4, 5]
    assert item.trajectory.open_frames == {
        DatagenStreamPosition("main", DatagenStepKind.SEQUENCE, 0)
    }


def test_last_numbers_are_the_largest() -> None:
    item = fold(created(), completed(2, attempt=3), completed(9, attempt=1))
    assert (item.last_item_seq, item.last_attempt) == (9, 3)


def test_failures_are_a_lens_of_their_own() -> None:
    failures = item_failures(
        [row("FAILED", 3, error_type="B"), row("FAILED", 2, error_type="A", attempt=1), created()]
    )
    assert [failure.error.error_type for failure in failures] == ["A", "B"]
    assert item_failures([created()]) == []


def test_only_a_failed_event_is_a_failure() -> None:
    assert failure_of(row("FAILED", 2)).at is not None
    with pytest.raises(InternalError):
        failure_of(created())


@given(st.randoms(use_true_random=False))
def test_the_order_of_arrival_and_copies_change_nothing(shuffle: random.Random) -> None:
    events = [
        created(query_tags_json='{"a":1}'),
        field_set(2, 1),
        field_append(3, "a", field_name="log"),
        completed(4),
        row("FAILED", 5),
        field_append(6, "b", field_name="log"),
        completed(7, step_index=1),
        terminal(8),
    ]
    mixed = events + shuffle.sample(events, shuffle.randint(0, len(events)))
    shuffle.shuffle(mixed)
    assert fold_datagen_events(mixed) == fold_datagen_events(events)
    assert order_events(mixed) == events


VIOLATIONS: dict[str, tuple[list[DatagenEvent], str, tuple[str, ...]]] = {
    "other content under an id": (
        [created(), field_set(2, 1), field_set(2, 2)], "event_id_reused", ("5#2",)),
    "two events at one place": (
        [created(), field_set(2, 1, event_id="a"), field_set(2, 1, event_id="b")],
        "conflicting_item_seq", ("a", "b")),
    "not created first": ([row("FAILED", 1), created(2)], "created_not_first", ("5#1",)),
    "append after set": (
        [created(), field_set(2, 1), field_append(3, 1)], "mixed_set_append", ("5#3",)),
    "set after append": (
        [created(), field_append(2, 1), field_set(3, 1)], "mixed_set_append", ("5#3",)),
    "kind change by set": (
        [created(), field_set(2, 1), field_set(3, 1.0)], "field_kind_change", ("5#3",)),
    "kind change by append": (
        [created(), field_append(2, 1), field_append(3, "1")], "field_kind_change", ("5#3",)),
    "append of another codec": (
        [created(), field_append(2, 1), field_append(3, 1, field_type="x")],
        "append_codec_change", ("5#3",)),
    "append of another codec version": (
        [created(), field_append(2, 1), field_append(3, 1, codec_version=2)],
        "append_codec_change", ("5#3",)),
    "newer version": (
        [created(), stored(completed(2), schema_version=3)], "schema_version_newer", ("5#2",)),
    "unknown type": (
        [created(), stored(completed(2), event_type="MERGED")], "unknown_word", ("5#2",)),
    "unknown kind": (
        [created(), stored(completed(2), step_kind="fork")], "unknown_word", ("5#2",)),
    "unknown status": (
        [created(), stored(terminal(2), status="lost")], "unknown_word", ("5#2",)),
    "unknown value kind": (
        [created(), field_set(2, DatagenValue.as_stored("date", None))], "unknown_word",
        ("5#2",)),
    "step without name": (
        [created(), stored(completed(2), step_name=None)], "step_missing", ("5#2",)),
    "start without index": (
        [created(), stored(row("STEP_STARTED", 2), step_index=None)], "step_missing", ("5#2",)),
    "field without value": (
        [created(), stored(field_set(2, 1), value=None)], "field_incomplete", ("5#2",)),
    "field without type": (
        [created(), stored(field_set(2, 1), field_type=None)], "field_incomplete", ("5#2",)),
    "field without version": (
        [created(), stored(field_set(2, 1), codec_version=None)], "field_incomplete", ("5#2",)),
    "field without name": (
        [created(), stored(field_set(2, 1), field_name=None)], "field_incomplete", ("5#2",)),
    "step without kind": (
        [created(), stored(completed(2), step_kind=None)], "step_missing", ("5#2",)),
    "terminal without status": (
        [created(), stored(terminal(2), status=None)], "terminal_requires_status", ("5#2",)),
    "terminal running": (
        [created(), stored(terminal(2), status=DatagenItemStatus.RUNNING)],
        "terminal_requires_status", ("5#2",)),
}  # fmt: skip


@pytest.mark.parametrize(("events", "code", "ids"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_events_that_no_correct_writer_leaves_are_a_violation(
    events: list[DatagenEvent], code: str, ids: tuple[str, ...]
) -> None:
    with pytest.raises(ItemViolationError) as caught:
        fold_datagen_events(events)
    assert (caught.value.code, caught.value.item_id) == (code, "5")
    assert caught.value.event_ids == ids
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([created(), terminal(2), field_set(3, 1)], "completed"),
        ([created(), terminal(2), created(3)], "running"),
        ([created(), terminal(2), terminal(3, status="filtered")], "filtered"),
        ([created(), created(2)], "running"),
        ([stored(created(), status=DatagenItemStatus.FAILED)], "running"),
        ([stored(created(), status=None, schema_version=1)], "running"),
        ([created(), stored(completed(2), step_index=-1)], "running"),
        ([created(), stored(completed(2), field_name="x", value=DatagenValue.of(1))], "running"),
        ([created(), stored(completed(2), step_kind=DatagenStepKind.ROUTER)], "running"),
        ([created(), completed(9)], "running"),
    ],
)
def test_oddities_of_other_writers_are_read(events: list[DatagenEvent], status: str) -> None:
    assert fold(*events).status == status


def test_the_last_item_created_gives_the_tags() -> None:
    events = [created(query_tags_json='{"a":1}'), created(2, query_tags_json='{"a":2}')]
    assert fold(*events).query_tags == {"a": 2}
    assert fold(*events, created(3)).query_tags is None


def test_a_tree_links_sub_items_and_carries_on_around_damage() -> None:
    tree = fold_tree(
        [
            created(item_id="5"),
            created(item_id="5/x:10"),
            created(item_id="5/x:9"),
            terminal(2, item_id="5/x:9"),
            completed(0, item_id="5/y:0"),
            created(1, item_id="5/y:0"),
            row("FAILED", 1, item_id="5/z:0"),
        ]
    )
    assert tree.roots == ("5",)
    assert tree.nodes["5"].children == ("5/x:9", "5/x:10")
    assert tree.nodes["5/x:9"].item.status is DatagenItemStatus.COMPLETED
    assert [error.item_id for error in tree.violations] == ["5/y:0"]
    assert "5/z:0" not in tree.nodes


def test_a_tree_with_ids_that_cannot_be_parsed_is_still_a_tree() -> None:
    tree = fold_tree([stored(created(), item_id=bad) for bad in ("a/b", "a/x:y", "/x", "a")])
    assert set(tree.nodes) == {"a/b", "a/x:y", "/x", "a"}


def test_folded_state_shows_as_the_exchange_form() -> None:
    data: dict[str, Any] = fold(created(), field_set(2, 1), completed(3)).to_dict()
    assert data["fields"] == {
        "score": {
            "mode": "set",
            "field_type": "int",
            "codec_version": 1,
            "value": {"kind": "int", "value": 1},
        }
    }
    assert data["trajectory"][0]["item_seq"] == 3
