"""Verifying a log: clean ones, ones damaged in each way, and of every shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pytest

from datagen_ray import (
    DatagenBlobValue,
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStore,
    DatagenValue,
    LogReport,
    LogViolation,
    LogViolationKind,
)
from datagen_ray.cli.main import status_of
from datagen_ray.log.schema import encode_events
from datagen_ray.log.validate import validate_append
from datagen_ray.log.values import blob_checksum
from datagen_ray.store import layout
from datagen_ray.store.verify import MAX_LISTED, verify_snapshot
from datagen_ray.store.writer import ShardOwner
from tests.log.builders import (
    LEAF,
    completed,
    created,
    field_append,
    field_set,
    row,
    stored,
    terminal,
)

ROOT = "5"
CHILD = "5/x:0"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatagenStore]:
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as opened:
        yield opened


def fill(store: DatagenStore, roots: int = 3) -> int:
    """Sound items of several statuses; gives the number of events."""
    count = 0
    for number in range(roots):
        writer = store.open_stream(f"sound-{number}", run_id="r")
        update = DatagenFieldUpdate("b", "set", DatagenValue.of(b"%d" % number), "blob")
        store.append_checkpoint(writer.step_completed(LEAF, [update]))
        count += 3
        if number % 2:
            store.append([writer.item_failed(LEAF, "E"), writer.item_terminal("completed")])
            count += 2
    return count


def put(store: DatagenStore, *events: DatagenEvent, shard: str | None = None) -> None:
    """Store rows past our checks, in this shard or another."""
    if shard is None:
        store._writer().submit(list(events)).result()
        return
    with ShardOwner.claim(store.uri, shard, fsync=False) as owner:
        owner.submit(list(events)).result()


def blob(content: bytes | None, size: int | None, checksum: str | None = None) -> DatagenValue:
    return DatagenValue("blob", DatagenBlobValue(content, size, checksum))


def test_a_clean_log_of_all_levels_is_clean(store: DatagenStore) -> None:
    events = fill(store)
    store.flush()
    store.cleanup_own_shard()
    put(store, *validate_append([created(1, ROOT), created(1, CHILD)]), shard="other")
    put(store, *validate_append([terminal(2, CHILD)]))
    report = store.verify(blobs=True)
    assert report.is_clean
    assert report.violations == ()
    assert report.events == events + 3
    assert report.rows == {"base": events, "sstable": 2, "tail": 1}
    assert (report.items, report.roots, report.copies, report.blobs) == (5, 4, 0, 3)
    assert report.statuses == {"running": 3, "completed": 2, "filtered": 0}
    assert {shard.shard_id for shard in report.shards} == {
        layout.shard_uuid(name) for name in ("default", "other")
    }


def test_an_empty_log_is_clean(store: DatagenStore) -> None:
    report = store.verify(blobs=True)
    assert (report.is_clean, report.events, report.items, report.shards) == (True, 0, 0, ())


DAMAGES: dict[str, tuple[list[DatagenEvent], set[str]]] = {
    "created not first": ([completed(1), created(2)], {"created_not_first"}),
    "never created": ([completed(1), row("FAILED", 2)], {"never_created"}),
    "created twice": ([created(1), created(2)], {"created_twice"}),
    "after terminal": ([created(1), terminal(2), completed(3)], {"after_terminal"}),
    "terminal twice": ([created(1), terminal(2), terminal(3)], {"after_terminal"}),
    "failed after terminal": ([created(1), terminal(2), row("FAILED", 3)], {"after_terminal"}),
    "gap": ([created(1), completed(3), completed(7)], {"item_seq_gap"}),
    "two at one place": (
        [created(1), completed(2, event_id="a"), completed(2, event_id="b")],
        {"conflicting_item_seq"}),
    "one id of two contents": ([created(1), field_set(2, 1), field_set(2, 2)],
        {"event_id_reused"}),
    "one id in two items": (
        [created(1), created(1, "6", event_id="5#1")], {"event_id_reused"}),
    "append after set": ([created(1), field_set(2, 1), field_append(3, 1)],
        {"mixed_set_append"}),
    "set after append": ([created(1), field_append(2, 1), field_set(3, 1)],
        {"mixed_set_append"}),
    "kind change": ([created(1), field_set(2, 1), field_set(3, "1")], {"field_kind_change"}),
    "codec change": (
        [created(1), field_append(2, 1), field_append(3, 1, codec_version=2)],
        {"append_codec_change"}),
    "spelling": ([created(1), created(1, "5/x:01")], {"bad_item_id"}),
    "no id": ([created(1), stored(created(1), item_id="5/x", event_id="e")], {"bad_item_id"}),
    "NUL": ([stored(created(1), item_id="5\0", root_item_id="5\0")], {"row_breaks_rule"}),
    "root": ([stored(created(1), root_item_id="6")], {"root_or_parent_mismatch"}),
    "parent": (
        [created(1), stored(created(1, CHILD), parent_item_id=None)],
        {"root_or_parent_mismatch"}),
    "parent missing": ([created(1, CHILD)], {"parent_missing"}),
    "parent never created": ([completed(1), created(1, CHILD)],
        {"never_created", "parent_missing"}),
    "newer version": ([stored(created(1), schema_version=3)], {"newer_format"}),
    "version zero": ([stored(created(1), schema_version=0)], {"row_breaks_rule"}),
    "unknown type": ([created(1), stored(completed(2), event_type="X")], {"newer_format"}),
    "unknown kind": ([created(1), stored(completed(2), step_kind="X")], {"newer_format"}),
    "unknown status": ([created(1), stored(terminal(2), status="X")], {"newer_format"}),
    "unknown value kind": (
        [created(1), field_set(2, DatagenValue.as_stored("X", None))], {"newer_format"}),
    "status of created": (
        [stored(created(1), status=DatagenItemStatus.FAILED)], {"row_breaks_rule"}),
    "status of failed": (
        [created(1), stored(row("FAILED", 2), status=DatagenItemStatus.RUNNING)],
        {"row_breaks_rule"}),
    "status of terminal": (
        [created(1), stored(terminal(2), status=None)], {"unreadable_value"}),
    "stray column": ([created(1), stored(completed(2), field_name="f")], {"row_breaks_rule"}),
    "leaf started": (
        [created(1), stored(row("STEP_STARTED", 2), step_kind=DatagenStepKind.LEAF)],
        {"row_breaks_rule"}),
    "router completed": (
        [created(1), stored(completed(2), step_kind=DatagenStepKind.ROUTER)],
        {"row_breaks_rule"}),
    "negative index": ([created(1), stored(completed(2), step_index=-1)], {"row_breaks_rule"}),
    "negative number": ([stored(created(1), item_seq=-1)], {"row_breaks_rule"}),
    "negative attempt": ([stored(created(1), attempt=-1)], {"row_breaks_rule"}),
    "empty run": ([stored(created(1), run_id="")], {"row_breaks_rule"}),
    "no step": ([created(1), stored(completed(2), step_name=None)], {"unreadable_value"}),
    "no value": ([created(1), stored(field_set(2, 1), value=None)], {"unreadable_value"}),
    "no JSON": (
        [created(1), field_set(2, DatagenValue.as_stored("json", "{"))], {"unreadable_value"}),
    "tags no JSON": ([stored(created(1), query_tags_json="{")], {"unreadable_value"}),
}  # fmt: skip


@pytest.mark.parametrize("level", ["tail", "sstable"])
@pytest.mark.parametrize(("events", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_each_damage_is_found_and_nothing_else_is(
    store: DatagenStore, events: list[DatagenEvent], expected: set[str], level: str
) -> None:
    sound = fill(store)
    # The registry of what is not flushed keeps one shard from having two contents of an id.
    put(store, *events[:-1], shard="one" if level == "sstable" else None)
    put(store, events[-1], shard="two")
    report = store.verify(blobs=True)
    assert {violation.kind.value for violation in report.violations} == expected
    assert set(report.violation_counts) == expected
    assert all(not v.item_id.startswith("sound") for v in report.violations)
    assert report.events + report.copies == sound + len(events)
    for violation in report.violations:
        assert violation.message
        assert violation.event_ids
        assert violation.meaning
        assert violation.cure
    # The reads carry on: none of them fails on what is wrong.
    assert len(store.root_item_statuses()) >= 3
    assert store.overview().items >= 3
    assert store.item_tree("sound-0").nodes
    store.item_tree(ROOT)
    assert sum(batch.num_rows for batch in store.events()) >= sound


def test_every_kind_of_violation_is_shown_by_some_damage() -> None:
    shown = set().union(*(kinds for _, kinds in DAMAGES.values())) | {"blob_mismatch"}
    assert shown == {kind.value for kind in LogViolationKind}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (blob(b"abc", 4), "4"),
        (blob(b"abc", 3, blob_checksum(b"abd")), "checksum"),
        (blob(None, 3), "gone"),
    ],
)
def test_blobs_are_looked_at_only_when_asked_for(
    store: DatagenStore, value: DatagenValue, message: str
) -> None:
    fill(store)
    put(store, created(1), field_set(2, value))
    assert store.verify().is_clean
    report = store.verify(blobs=True)
    (violation,) = report.violations
    assert violation.kind is LogViolationKind.BLOB_MISMATCH
    assert (violation.item_id, violation.event_ids) == ("5", ("5#2",))
    assert message in violation.message
    assert report.blobs == 4


def test_copies_of_a_blob_with_other_bytes_are_found(store: DatagenStore) -> None:
    put(store, created(1), field_set(2, blob(b"abc", 3)))
    put(store, field_set(2, blob(b"abd", 3)), shard="two")
    assert store.verify().copies == 1
    (violation,) = store.verify(blobs=True).violations
    assert violation.kind is LogViolationKind.BLOB_MISMATCH
    assert "other bytes" in violation.message


def test_rows_that_stand_twice_in_the_base_table_count_once(store: DatagenStore) -> None:
    events = validate_append([created(1), field_set(2, 1), completed(3), row("FAILED", 4)])
    store.append(events)
    for _ in range(3):
        lance.write_dataset(encode_events(events), store.uri, mode="append")
    report = store.verify()
    assert report.is_clean
    assert (report.events, report.copies) == (4, 9 + 3)
    assert report.rows == {"base": 12, "sstable": 0, "tail": 4}
    assert store.overview().completed_steps == {"draft": 1}
    assert store.overview().failures == 1
    assert len(store.failures()) == 1
    assert len(store.events_for_item("5")) == 4
    assert sum(batch.num_rows for batch in store.events()) == 4
    assert store.root_item_statuses().to_dict() == {"5": "running"}
    assert store.root_item_statuses([str(n) for n in range(2000)]).to_dict() == {"5": "running"}
    assert len(store.events_for_roots(["5", *(f"x{n}" for n in range(2000))])["5"]) == 4


def test_a_conflict_with_the_base_table_is_found(store: DatagenStore) -> None:
    lance.write_dataset(
        encode_events(validate_append([created(1), field_set(2, 1)])), store.uri, mode="append"
    )
    put(store, field_set(2, 2))
    (violation,) = store.verify().violations
    assert violation.kind is LogViolationKind.EVENT_ID_REUSED
    assert sum(batch.num_rows for batch in store.events()) == 3


@pytest.mark.parametrize("rows_per_pass", [1, 7, 100])
def test_many_small_passes_find_what_one_finds(store: DatagenStore, rows_per_pass: int) -> None:
    fill(store, 20)
    store.flush()
    for number, (events, _) in enumerate(DAMAGES.values()):
        if any(event.item_id != "5" for event in events):
            continue
        put(
            store,
            *(
                stored(
                    event,
                    item_id=f"bad-{number}",
                    root_item_id=event.root_item_id.replace("5", f"bad-{number}"),
                    event_id=f"{number}/{event.event_id}",
                )
                for event in events[:-1]
            ),
        )
    snapshot = store._reader.snapshot()
    whole = verify_snapshot(snapshot)
    assert verify_snapshot(snapshot, rows_per_pass=rows_per_pass) == whole
    assert whole.items > 20


def test_a_long_list_of_violations_is_cut_and_counted(
    store: DatagenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen_ray.store.verify.MAX_LISTED", 5)
    put(store, *(completed(1, f"n{n}") for n in range(12)))
    report = store.verify()
    assert (len(report.violations), report.violation_counts) == (5, {"never_created": 12})
    assert not report.is_clean
    assert MAX_LISTED > 5


def test_a_violation_and_a_report_show_as_plain_data(store: DatagenStore) -> None:
    put(store, created(1), created(2))
    data = store.verify().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["violations"] == [
        {
            "kind": "created_twice",
            "item_id": "5",
            "event_ids": ["5#2"],
            "message": "item '5': 2 times ITEM_CREATED",
            "meaning": LogViolationKind.CREATED_TWICE.meaning,
            "cure": LogViolationKind.CREATED_TWICE.cure,
        }
    ]
    assert data["clean"] is False


def test_an_error_of_a_bulk_read_is_a_violation_too(store: DatagenStore) -> None:
    put(store, created(1), field_set(2, 1), field_append(3, 1))
    error = store.overview().violations["5"]
    assert LogViolation.of_error(error) == store.verify().violations[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = status_of(["verify", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_command_says_clean_with_status_0(
    store: DatagenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    events = fill(store)
    status, out, _ = run(capsys, store.uri, "--blobs")
    assert status == 0
    assert out.splitlines()[-1] == "clean"
    assert f"events      {events}" in out
    assert "3 checked" in out


def test_the_command_lists_violations_with_status_1(
    store: DatagenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, created(1), created(2))
    status, out, _ = run(capsys, store.uri)
    assert status == 1
    assert "created_twice  item '5': 2 times ITEM_CREATED" in out
    assert "Cure: " in out
    status, out, _ = run(capsys, store.uri, "--json")
    assert status == 1
    report: dict[str, Any] = json.loads(out)
    assert report["violation_counts"] == {"created_twice": 1}


def test_the_command_ends_with_status_2_when_it_cannot_read(
    store: DatagenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, str(tmp_path / "nothing.lance"))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    fill(store)
    shard = layout.shard_uuid("default")
    path = Path(store.uri) / layout.wal_key(shard, 2)
    path.write_bytes(path.read_bytes()[:40])
    status, out, err = run(capsys, store.uri, "--json")
    assert (status, out) == (2, "")
    assert "cannot be decoded" in err


def test_the_report_type_is_public() -> None:
    assert LogReport.__module__ == "datagen_ray.store.verify"
