"""Each row of the table that decides where we differ from the reference, against the real store.

``decides`` notes which rows a test is about; the last test holds the list to be whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from datagen_ray import (
    Damaged,
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenItemId,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStore,
    DatagenStreamPosition,
    DatagenValue,
    Found,
    InvalidEventError,
    InvalidItemIdError,
    ItemViolationError,
    LogViolationKind,
    NeverStarted,
    WriterFencedError,
    datagen_event_id,
)
from datagen_ray.log.validate import validate_append
from datagen_ray.store.writer import ShardOwner
from tests.log.builders import (
    FRAME,
    LEAF,
    NOW,
    completed,
    created,
    field_append,
    field_set,
    row,
    stored,
    terminal,
)

_Test = TypeVar("_Test", bound=Callable[..., None])
COVERED: dict[str, list[str]] = {}


def decides(*quirks: str) -> Callable[[_Test], _Test]:
    """Says which rows of the table a test is about."""

    def note(test: _Test) -> _Test:
        for quirk in quirks:
            COVERED.setdefault(quirk, []).append(test.__name__)
        return test

    return note


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatagenStore]:
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as opened:
        yield opened


def put(store: DatagenStore, *events: DatagenEvent) -> None:
    """Store rows as another program would, past our checks."""
    store._writer().submit(list(events)).result()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((InvalidEventError, InvalidItemIdError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value.code)


def damaged(store: DatagenStore, item_id: str) -> str:
    found = store.fold_item(item_id)
    assert isinstance(found, Damaged)
    with pytest.raises(ItemViolationError):
        found.folded()
    return found.violation.code


def kinds(store: DatagenStore) -> list[str]:
    return [violation.kind.value for violation in store.verify().violations]


def status(store: DatagenStore, item_id: str = "5") -> str:
    found = store.fold_item(item_id)
    assert isinstance(found, Found)
    return found.item.status.value


def update(name: str, value: Any, op: Any = "set") -> DatagenFieldUpdate:
    return DatagenFieldUpdate(name, op, DatagenValue.of(value), "t")


@decides("Q01")
def test_an_item_whose_created_is_not_first_is_damaged_not_never_started(
    store: DatagenStore,
) -> None:
    store.append([completed(1), created(2), created(1, "6")])
    assert damaged(store, "5") == "created_not_first"
    statuses = store.root_item_statuses()
    assert set(statuses) == {"6"}
    assert set(statuses.violations) == {"5"}
    assert "created_not_first" in kinds(store)
    with pytest.raises(ItemViolationError):
        store.resume_stream("5", run_id="r")


@decides("Q02")
def test_after_terminal_the_writer_refuses_the_fold_reads_and_verify_lists(
    store: DatagenStore,
) -> None:
    writer = store.open_stream("5", run_id="r")
    store.append([writer.item_terminal("completed")])
    assert refused(lambda: writer.step_started(FRAME)) == "item_terminated"
    assert refused(lambda: store.resume_stream("5", run_id="r")) == "item_terminated"
    store.append([field_set(3, 1), row("FAILED", 4)])
    assert status(store) == "completed"
    assert store.fold_item("5").folded().fields["score"].value.value == 1  # type: ignore[union-attr]
    (violation,) = store.verify().violations
    assert violation.kind is LogViolationKind.AFTER_TERMINAL
    assert violation.event_ids == ("5#3", "5#4")


@decides("Q03")
def test_item_created_twice_the_writer_refuses_the_fold_reopens_and_verify_lists(
    store: DatagenStore,
) -> None:
    writer = store.open_stream("5", run_id="r")
    assert refused(writer.item_created) == "item_created_twice"
    store.append([terminal(2), created(3, query_tags_json="7")])
    assert status(store) == "running"
    assert store.fold_item("5").folded().query_tags == 7  # type: ignore[union-attr]
    assert kinds(store) == ["created_twice", "after_terminal"]


@decides("Q04")
def test_status_is_checked_and_filled_in_on_append_and_tolerated_in_the_fold(
    store: DatagenStore,
) -> None:
    assert refused(lambda: store.append([created(status="failed")])) == "status_mismatch"
    assert refused(lambda: store.append([row("FAILED", 2, status="running")])) == "status_mismatch"
    store.append([created(), row("FAILED", 2)])
    assert [event.status for event in store.events_for_item("5")] == ["running", "failed"]
    put(store, stored(created(1, "6"), status=DatagenItemStatus.FAILED))
    put(store, stored(created(1, "7"), status=None))
    assert (status(store, "6"), status(store, "7")) == ("running", "running")
    assert store.root_item_statuses().to_dict() == dict.fromkeys("567", "running")
    assert kinds(store) == ["row_breaks_rule"]


@decides("Q05")
def test_unknown_keys_of_an_event_are_an_error() -> None:
    data = created().to_dict()
    assert refused(lambda: DatagenEvent.from_dict({**data, "colour": "red"})) == "unknown_key"


@decides("Q06")
def test_version_2_is_written_1_and_2_are_read_and_newer_asks_for_an_upgrade(
    store: DatagenStore,
) -> None:
    for version in (0, 1, 3):
        event = created(schema_version=version)
        assert refused(lambda event=event: store.append([event])) == "schema_version"  # type: ignore[misc]
    put(store, *(stored(created(1, f"v{n}"), schema_version=n) for n in (1, 2, 3)))
    assert (status(store, "v1"), status(store, "v2")) == ("running", "running")
    assert damaged(store, "v3") == "schema_version_newer"
    with pytest.raises(ItemViolationError, match="upgrade"):
        store.fold_item("v3").folded()
    assert set(store.root_item_statuses()) == {"v1", "v2"}
    assert kinds(store) == ["newer_format"]


@decides("Q07", "Q08", "Q09")
@pytest.mark.parametrize(
    "number",
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, sys.float_info.max, 0.1, 1e22, 2.0**53 + 2],
)
def test_floats_are_exact_also_those_that_are_not_finite(
    store: DatagenStore, number: float
) -> None:
    store.append([created(), field_set(2, number)])
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert folded.fields["score"].value == DatagenValue.of(number)
    if math.isfinite(number):
        store.append([created(1, "6"), field_set(2, [number], "6")])
        assert repr(store.fold_item("6").folded().fields["score"].value.value) == repr([number])  # type: ignore[union-attr]


@decides("Q08")
@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**64) - 1, 10**300])
def test_json_integers_are_exact_whatever_their_size(store: DatagenStore, number: int) -> None:
    store.append([created(), field_set(2, {"n": number})])
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert folded.fields["score"].value.value == {"n": number}


@decides("Q09")
@pytest.mark.parametrize("number", [1.7976931348623157e308, 123456789.123456789, 1e-320, 1.0])
def test_json_doubles_keep_their_bits_and_stay_doubles(store: DatagenStore, number: float) -> None:
    store.append([created(), field_set(2, {"n": number})])
    found = store.fold_item("5").folded().fields["score"].value.value["n"]  # type: ignore[union-attr]
    assert (type(found), found) == (float, number)


@decides("Q10")
def test_json_is_refused_beyond_depth_127_with_a_clear_error(store: DatagenStore) -> None:
    deep: Any = 1
    for _ in range(127):
        deep = [deep]
    store.append([created(), field_set(2, deep)])
    assert store.fold_item("5").folded().fields["score"].value.value == deep  # type: ignore[union-attr]
    assert refused(lambda: DatagenValue.of([deep])) == "json_too_deep"
    with pytest.raises(InvalidEventError, match="127 levels"):
        DatagenValue.of([deep])


@decides("Q11")
def test_each_appended_blob_is_loaded_by_its_own_event_id(store: DatagenStore) -> None:
    store.append([created(), *(field_append(2 + n, b"%d" % n) for n in range(3))])
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert folded.fields["score"].event_ids == ("5#2", "5#3", "5#4")
    assert folded.blob_event_ids == {"score": "5#4"}
    assert [store.load_blob(folded, "score", index) for index in range(3)] == [b"0", b"1", b"2"]
    assert store.load_blob(folded, "score") == b"2"


@decides("Q12")
def test_a_blob_that_was_replaced_leaves_no_stale_id(store: DatagenStore) -> None:
    store.append([created(), field_set(2, b"old"), field_set(3, b"new")])
    assert store.fold_item("5").folded().blob_event_ids == {"score": "5#3"}  # type: ignore[union-attr]
    assert store.load_blob("5", "score") == b"new"
    put(store, created(1, "6"), field_append(2, b"old", "6"), field_set(3, 1, "6"))
    assert damaged(store, "6") == "mixed_set_append"


@decides("Q13")
def test_raw_appends_of_a_step_run_again_fold_once_for_each_attempt(store: DatagenStore) -> None:
    store.append([created(), field_append(2, "a"), completed(3)])
    store.append([field_append(4, "a", attempt=1), completed(5, attempt=1)])
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert [value.value for value in folded.fields["score"].values] == ["a", "a"]
    assert len(folded.trajectory.ordered) == 2


@decides("Q14")
def test_set_and_append_on_one_field_are_rejected_in_both_orders(store: DatagenStore) -> None:
    for item_id, first, second in (("a", "set", "append"), ("b", "append", "set")):
        writer = store.open_stream(item_id, run_id="r")
        store.append_checkpoint(writer.step_completed(LEAF, [update("f", 1, first)]))
        code = refused(lambda: writer.step_completed(FRAME, [update("f", 1, second)]))  # noqa: B023
        assert code == "mixed_set_append"
        again = store.resume_stream(item_id, run_id="r")
        assert again is not None
        code = refused(lambda: again.step_completed(FRAME, [update("f", 1, second)]))  # noqa: B023
        assert code == "mixed_set_append"
    put(store, created(1, "c"), field_set(2, 1, "c"), field_append(3, 1, "c"))
    put(store, created(1, "d"), field_append(2, 1, "d"), field_set(3, 1, "d"))
    assert damaged(store, "c") == damaged(store, "d") == "mixed_set_append"
    assert set(store.overview().violations) == {"c", "d"}
    assert kinds(store) == ["mixed_set_append"] * 2


@decides("Q15")
def test_a_set_that_changes_the_kind_is_refused_and_says_which_kinds(store: DatagenStore) -> None:
    writer = store.open_stream("5", run_id="r")
    store.append_checkpoint(writer.step_completed(LEAF, [update("f", 1)]))
    with pytest.raises(InvalidEventError, match="from int to float"):
        writer.step_completed(FRAME, [update("f", 1.0)])
    put(store, created(1, "6"), field_set(2, 1, "6"), field_set(3, 1.0, "6"))
    assert damaged(store, "6") == "field_kind_change"
    assert kinds(store) == ["field_kind_change"]


@decides("Q16")
def test_fields_without_completion_fold_and_a_completion_may_come_first(
    store: DatagenStore,
) -> None:
    store.append([created(), field_set(2, 1)])
    store.append_checkpoint([field_set(4, 2, checkpoint_id="c"), completed(3, checkpoint_id="c")])
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert folded.fields["score"].value.value == 2
    assert [cursor.item_seq for cursor in folded.trajectory.ordered] == [3]


@decides("Q17")
def test_stray_field_columns_are_refused_and_tolerated(store: DatagenStore) -> None:
    stray = completed(2, field_name="f", field_type="t", codec_version=1, value=DatagenValue.of(1))
    assert refused(lambda: store.append([stray])) == "stray_field_column"
    put(store, created(), stray)
    assert store.fold_item("5").folded().fields == {}  # type: ignore[union-attr]
    assert kinds(store) == ["row_breaks_rule"]


@decides("Q18")
@pytest.mark.parametrize("kind", list(DatagenStepKind))
def test_only_drivers_start_and_selectors_complete_nothing(
    store: DatagenStore, kind: DatagenStepKind
) -> None:
    started, done = row("STEP_STARTED", 2, step_kind=kind), completed(3, step_kind=kind)
    if not kind.is_driver:
        assert refused(lambda: store.append([started])) == "step_kind_not_started"
    if kind.is_selector:
        assert refused(lambda: store.append([done])) == "step_kind_not_completed"
    put(store, created(), started, done)
    folded = store.fold_item("5").folded()
    assert folded is not None
    assert folded.trajectory.started == folded.trajectory.completed == {done.position}
    assert (kinds(store) == []) is kind.is_driver


@decides("Q19")
def test_a_frame_that_was_completed_and_entered_again_is_not_open(store: DatagenStore) -> None:
    frame = {"step_name": "main", "step_kind": "sequence"}
    store.append(
        [created(), row("STEP_STARTED", 2, **frame), completed(3, **frame),
         row("STEP_STARTED", 4, **frame)]
    )  # fmt: skip
    trajectory = store.trajectory("5")
    assert trajectory is not None
    assert trajectory.open_frames == frozenset()


@decides("Q20")
def test_a_negative_index_is_refused_and_tolerated(store: DatagenStore) -> None:
    odd = completed(2, step_index=-1)
    assert refused(lambda: store.append([odd])) == "negative_step_index"
    put(store, created(), odd)
    assert store.fold_item("5").folded().trajectory.completed == {odd.position}  # type: ignore[union-attr]
    assert kinds(store) == ["row_breaks_rule"]


@decides("Q21")
def test_a_stored_event_is_never_replaced_and_the_conflict_is_a_violation(
    store: DatagenStore,
) -> None:
    store.append([created(), field_set(2, 1)])
    for other in (field_set(2, 2), field_set(2, 1, event_ts=NOW.replace(microsecond=0))):
        assert refused(lambda other=other: store.append([other])) == "conflicting_retry"  # type: ignore[misc]
    assert store.fold_item("5").folded().fields["score"].value.value == 1  # type: ignore[union-attr]
    assert kinds(store) == []
    with ShardOwner.claim(store.uri, "second") as second:
        second.submit([field_set(2, 2)]).result()
    assert damaged(store, "5") == "event_id_reused"
    assert [error.code for error in store.item_tree("5").violations] == ["event_id_reused"]
    assert kinds(store) == ["event_id_reused"]


@decides("Q21")
def test_one_id_for_events_of_two_items_is_found_by_verify(store: DatagenStore) -> None:
    put(store, created(1, "5", event_id="same"))
    with ShardOwner.claim(store.uri, "second") as second:
        second.submit([created(1, "6", event_id="same")]).result()
    assert (status(store, "5"), status(store, "6")) == ("running", "running")
    (violation,) = store.verify().violations
    assert violation.kind is LogViolationKind.EVENT_ID_REUSED
    assert violation.event_ids == ("same",)


@decides("Q22")
def test_equality_is_that_of_what_is_stored() -> None:
    texts = ("2024-01-02T03:04:05.123456789Z", "2024-01-02T03:04:05.123456001Z")
    one, other = (DatagenEvent.from_dict({**created().to_dict(), "event_ts": t}) for t in texts)
    assert one == other
    assert one.content() == other.content()


@decides("Q23")
def test_one_damaged_item_fails_no_bulk_read(store: DatagenStore) -> None:
    sick = "5/x:1"
    store.append(
        [created(1, "5"), created(1, "5/x:0"), completed(2, "5/x:0"), created(1, "6"),
         row("FAILED", 2, "6"), terminal(3, "6")]
    )  # fmt: skip
    put(store, created(1, sick), field_set(2, 1, sick), stored(field_set(2, 2, sick), event_id="z"))
    put(store, created(1, "7"), stored(terminal(2, "7"), status=None))
    put(store, created(1, "8"), stored(completed(2, "8"), event_type="MERGED"))
    assert set(store.overview().violations) == {sick, "7", "8"}
    assert store.overview().items == 2
    statuses = store.root_item_statuses()
    assert statuses.to_dict() == {"5": "running", "6": "completed"}
    assert set(statuses.violations) == {"7", "8"}
    tree = store.item_tree("5")
    assert set(tree.nodes) == {"5", "5/x:0"}
    assert [error.item_id for error in tree.violations] == [sick]
    lookups = store.fold_items(["5", "6", "7", sick, "none"])
    assert {key: type(found) for key, found in lookups.items()} == {
        "5": Found, "6": Found, "7": Damaged, sick: Damaged, "none": NeverStarted,
    }  # fmt: skip
    assert [set(tree.nodes) for tree in store.fold_roots(["5", "7"]).values()] == [
        {"5", "5/x:0"}, set(),
    ]  # fmt: skip
    assert len(store.failures()) == 1
    assert sum(batch.num_rows for batch in store.events()) == 13
    assert sorted(kinds(store)) == ["conflicting_item_seq", "newer_format", "unreadable_value"]


@decides("Q24", "Q31")
def test_root_and_parent_are_derived_and_must_match(store: DatagenStore) -> None:
    child = created(1, "5/x:0/y:1")
    assert (child.root_item_id, child.parent_item_id) == ("5", "5/x:0")
    assert refused(lambda: store.append([stored(child, root_item_id="6")])) == "root_mismatch"
    assert refused(lambda: store.append([stored(child, parent_item_id="5")])) == "parent_mismatch"
    assert refused(lambda: store.append([stored(child, parent_item_id=None)])) == "parent_mismatch"
    assert (
        refused(lambda: store.open_stream("5/x:0", run_id="r", parent_item_id="6"))
        == "parent_mismatch"
    )
    put(store, created(1, "5"), stored(created(1, "5/x:0"), parent_item_id=None))
    put(store, stored(created(1, "5/z:0"), root_item_id="other"))
    assert status(store, "5/x:0") == "running"
    assert store.item_tree("5").roots == ("5", "5/x:0")
    assert kinds(store) == ["root_or_parent_mismatch"] * 2


@decides("Q25")
def test_an_id_in_another_spelling_is_refused(store: DatagenStore) -> None:
    for odd in ("5/x:01", "5/x:+1", "5/x:-0"):
        assert refused(lambda odd=odd: store.append([created(1, odd)])) == "item_id_not_canonical"  # type: ignore[misc]
        assert refused(lambda odd=odd: store.open_stream(odd, run_id="r")) == (  # type: ignore[misc]
            "item_id_not_canonical"
        )
    put(store, created(1, "5"), created(1, "5/x:1"), created(1, "5/x:01"), terminal(2, "5/x:01"))
    assert (status(store, "5/x:1"), status(store, "5/x:01")) == ("running", "completed")
    assert set(store.item_tree("5").nodes) == {"5", "5/x:1", "5/x:01"}
    assert kinds(store) == ["bad_item_id"] * 2


@decides("Q26")
def test_any_key_is_a_safe_root_and_empty_ones_are_errors(store: DatagenStore) -> None:
    keys = ["a/b:0", "a%2Fb", "100%", "x:1", "naïve/鍵", "\n", " "]
    items = [DatagenItemId.from_source_key(key).child("step:1/2", 0) for key in keys]
    for item in items:
        assert DatagenItemId.parse(str(item)) == item
        assert item.parent is not None
        assert item.parent.is_root
    store.append([created(1, str(item.root)) for item in items])
    assert len(store.root_item_statuses()) == len(keys)
    assert refused(lambda: DatagenItemId.from_source_key("")) == "item_id_empty_root"
    assert refused(lambda: DatagenItemId("5").child("", 0)) == "item_id_malformed_segment"


@decides("Q27")
def test_an_id_that_cannot_be_parsed_is_refused_and_read_around(store: DatagenStore) -> None:
    malformed = {
        "a/b": "item_id_malformed_segment",
        "a/x:y": "item_id_bad_branch_index",
        "/x": "item_id_empty_root",
    }
    for item_id, code in malformed.items():
        event = stored(created(), item_id=item_id, root_item_id=item_id, event_id=item_id)
        assert refused(lambda event=event: store.append([event])) == code  # type: ignore[misc]
        put(store, event)
    store.append([created(1, "ok")])
    assert store.root_item_statuses(["ok"]).to_dict() == {"ok": "running"}
    assert store.overview().items == 4
    assert set(store.item_tree("a/b").nodes) == {"a/b"}
    assert set(kinds(store)) == {"bad_item_id", "parent_missing"}


@decides("Q28")
def test_resume_looks_where_the_item_is(store: DatagenStore) -> None:
    store.append([created(1, "5"), created(1, "5/x:0")])
    writer = store.resume_stream("5/x:0", run_id="r")
    assert writer is not None
    assert (writer.attempt, writer.next_item_seq) == (1, 2)


@decides("Q29")
def test_nul_is_refused_in_ids(store: DatagenStore) -> None:
    assert refused(lambda: store.append([created(1, "5\0")])) == "nul_in_id"
    assert refused(lambda: store.open_stream("5\0", run_id="r")) == "nul_in_id"
    assert refused(lambda: store.append([completed(1, step_name="a\0")])) == "nul_in_id"
    # The checkpoint ids of streams are made with it.
    assert datagen_event_id("5", "5\0created", 0) != datagen_event_id("5", "5created", 0)


@decides("Q30")
def test_any_event_id_but_an_empty_one_is_taken(store: DatagenStore) -> None:
    store.append([created(event_id="whatever"), field_set(2, 1, event_id="ü / \n")])
    assert [event.event_id for event in store.events_for_item("5")] == ["whatever", "ü / \n"]
    assert refused(lambda: store.append([completed(3, event_id="")])) == "empty_column"


@decides("Q32")
def test_the_overview_counts_only_what_started(store: DatagenStore) -> None:
    store.append([created(1, "5"), completed(2, "5"), row("FAILED", 1, "6"), completed(2, "6")])
    found = store.overview()
    assert (found.items, found.failures, dict(found.completed_steps)) == (1, 0, {"draft": 1})
    assert [failure.item_id for failure in store.failures()] == ["6"]
    assert kinds(store) == ["never_created"]


@decides("Q33")
def test_the_stream_writer_is_as_strict_as_append(store: DatagenStore) -> None:
    store.append([created()])
    for options in ({"run_id": ""}, {"run_id": "r", "writer_epoch": ""}):
        code = refused(lambda options=options: store.resume_stream("5", **options))  # type: ignore[misc]
        assert code == "empty_column"
    writer = store.resume_stream("5", run_id="r")
    assert writer is not None
    odd = DatagenStreamPosition("", DatagenStepKind.LEAF, 0)
    assert refused(lambda: writer.step_completed(odd)) == "requires_step_name"


@decides("Q34")
def test_numbers_end_with_an_error_and_a_refused_call_uses_up_none(store: DatagenStore) -> None:
    store.append([created(2**63 - 2)])
    writer = store.resume_stream("5", run_id="r")
    assert writer is not None
    assert refused(lambda: writer.step_completed(LEAF, [update("f", 1)])) == "out_of_range"
    store.append([writer.item_terminal("completed")])
    assert store.fold_item("5").folded().last_item_seq == 2**63 - 1  # type: ignore[union-attr]
    store.append([created(1, "6", attempt=2**31 - 1)])
    assert refused(lambda: store.resume_stream("6", run_id="r")) == "out_of_range"


@decides("Q35")
def test_of_two_that_resume_only_the_owner_of_the_shard_goes_on(store: DatagenStore) -> None:
    store.append([created()])
    first = store.resume_stream("5", run_id="r")
    assert first is not None
    with DatagenStore.open(store.uri, shard_id="default", fsync=False) as taker:
        second = taker.resume_stream("5", run_id="r")
        assert second is not None
        taker.append_checkpoint(second.step_completed(LEAF, [update("f", 2)]))
        with pytest.raises(WriterFencedError):
            store.append_checkpoint(first.step_completed(LEAF, [update("f", 1)]))
        assert taker.fold_item("5").folded().fields["f"].value.value == 2  # type: ignore[union-attr]
        assert taker.verify().is_clean


@decides("Q36")
def test_open_stream_refuses_an_item_that_exists(store: DatagenStore) -> None:
    store.open_stream("5", run_id="r")
    assert refused(lambda: store.open_stream("5", run_id="r")) == "item_exists"
    store.append([completed(1, "6"), created(2, "6")])
    assert refused(lambda: store.open_stream("6", run_id="r")) == "item_exists"
    store.open_stream("7", run_id="r", check_exists=False)
    assert status(store, "7") == "running"


@decides("Q37")
def test_a_log_that_is_opened_again_and_again_stays_readable(tmp_path: Path) -> None:
    uri = str(tmp_path / "log.lance")
    expected = []
    for number in range(12):
        with DatagenStore.open(uri, fsync=False) as opened:
            opened.append([created(1, str(number)), terminal(2, str(number))])
            if number % 3 == 0:
                opened.flush()
            expected.append(str(number))
            assert sorted(opened.root_item_statuses()) == sorted(expected)
    with DatagenStore.open(uri, read_only=True) as opened:
        report = opened.verify()
    assert report.is_clean
    assert report.events == 24


@decides("Q38")
def test_copies_are_one_event_wherever_they_lie_unless_they_differ(store: DatagenStore) -> None:
    events = validate_append([created(), field_set(2, 1), completed(3)])
    store.append(events)
    with ShardOwner.claim(store.uri, "second") as second:
        second.submit(events).result()
        assert len(store.events_for_item("5")) == 3
        assert store.overview().completed_steps == {"draft": 1}
        assert sum(batch.num_rows for batch in store.events()) == 3
        report = store.verify()
        assert (report.events, report.copies, report.is_clean) == (3, 3, True)
        second.submit([replace(completed(4), attempt=1)]).result()
        store.append([completed(4)])
        assert damaged(store, "5") == "event_id_reused"
        assert kinds(store) == ["event_id_reused"]


def test_every_row_of_the_table_has_a_test_of_its_own() -> None:
    assert sorted(COVERED) == [f"Q{number:02}" for number in range(1, 39)]
