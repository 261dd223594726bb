"""Reads: of one, of many, of all; while sources vanish under them; from mapped WAL entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from datagen_ray import (
    ConfigError,
    DamagedLogError,
    DatagenBlobValue,
    DatagenStore,
    DatagenValue,
    StorageError,
)
from datagen_ray.store import reads, snapshot
from datagen_ray.store.layout import shard_uuid, wal_key
from datagen_ray.store.shard import read_wal_tail
from datagen_ray.store.snapshot import Snapshot, SourceVanishedError
from datagen_ray.store.storage import LogStorage
from tests.log.builders import completed, created, field_append, field_set, row, stored, terminal


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatagenStore]:
    """Items on all levels: 0..2 in the base table, 3..5 in an SSTable, 6..8 in the tail."""
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as opened:
        for number in range(9):
            item = str(number)
            opened.append([created(1, item), field_set(2, number, item), completed(3, item)])
            opened.append([created(1, f"{item}/x:0"), terminal(2, f"{item}/x:0")])
            if number == 2:
                opened.flush()
                opened.cleanup_own_shard()
            if number == 5:
                opened.flush()
        yield opened


ITEMS = [str(number) for number in range(9)]


def vanishing(monkeypatch: pytest.MonkeyPatch, method: str, times: int) -> Callable[[], int]:
    """Have a method of snapshots fail as if a source was collected, that many times."""
    calls = 0
    real = getattr(Snapshot, method)

    def failing(self: Snapshot, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise SourceVanishedError("collected")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Snapshot, method, failing)
    return lambda: calls


READS: dict[str, tuple[str, Callable[[DatagenStore], Any]]] = {
    "fold_item": ("read", lambda store: store.fold_item("1").folded()),
    "overview": ("pieces", lambda store: store.overview().items),
    "statuses": ("pieces", lambda store: len(store.root_item_statuses())),
    "many roots": (
        "pieces",
        lambda store: sorted(store.events_for_roots([*ITEMS, *(f"n{n}" for n in range(900))])),
    ),
    "events": ("upper", lambda store: sum(batch.num_rows for batch in store.events())),
    "verify": ("pieces", lambda store: store.verify().events),
    "blob": ("blob", lambda store: store.get_blob("none")),
}


@pytest.mark.parametrize(("method", "read"), READS.values(), ids=READS)
def test_a_read_whose_sources_vanish_starts_again(
    store: DatagenStore,
    method: str,
    read: Callable[[DatagenStore], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = read(store)
    calls = vanishing(monkeypatch, method, 3)
    assert read(store) == expected
    assert calls() >= 4


def test_a_read_gives_up_after_a_bounded_number_of_times(
    store: DatagenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MAX_RESTARTS", 4)
    calls = vanishing(monkeypatch, "pieces", 1000)
    with pytest.raises(StorageError):
        store.overview()
    assert calls() == 4


def test_many_ids_are_found_in_one_pass_as_few_are_by_the_index(store: DatagenStore) -> None:
    many = [*ITEMS, *(f"none-{n}" for n in range(reads.MAX_INDEXED_IDS))]
    found = store.fold_items(many)
    assert len(found) == len(many)
    assert {item: found[item] for item in ITEMS} == store.fold_items(ITEMS)
    assert store.root_item_statuses(many).to_dict() == dict.fromkeys(ITEMS, "running")
    grouped = store.events_for_roots(many)
    assert {root: grouped[root] for root in ITEMS} == store.events_for_roots(ITEMS)
    assert [len(grouped[root]) for root in ITEMS] == [5] * 9
    trees = store.fold_roots(many)
    assert all(set(trees[root].nodes) == {root, f"{root}/x:0"} for root in ITEMS)
    assert store.fold_items([]) == {}


def test_events_are_streamed_with_a_filter_and_the_columns_asked_for(store: DatagenStore) -> None:
    batches = list(store.events(pc.field("event_type") == "TERMINAL", columns=["item_id"]))
    assert sorted(item for batch in batches for item in batch.column("item_id").to_pylist()) == [
        f"{item}/x:0" for item in ITEMS
    ]
    assert all(batch.schema.names == ["item_id"] for batch in batches)


def test_a_column_that_there_is_not_is_refused_at_once(store: DatagenStore) -> None:
    with pytest.raises(ConfigError, match="no column 'colour'"):
        store.events(columns=["colour"])


def test_a_stream_keeps_to_what_was_there_when_it_began(store: DatagenStore) -> None:
    stream = store.events(columns=["event_id"])
    first = next(stream)
    store.append([created(1, "late")])
    rest = sum(batch.num_rows for batch in stream)
    assert first.num_rows + rest == 45


def test_state_at_is_the_fold_of_what_was_there_then(store: DatagenStore) -> None:
    assert store.state_at("1", 0) is None
    before, after = store.state_at("1", 1), store.state_at("1", 2)
    assert before is not None
    assert after is not None
    assert (before.fields, after.last_item_seq) == ({}, 2)
    assert store.state_at("1", 99) == store.fold_item("1").folded()
    assert store.state_at("none", 5) is None


def test_blobs_are_loaded_from_every_level_and_from_mapped_entries(tmp_path: Path) -> None:
    uri = str(tmp_path / "log.lance")
    blobs = {str(n): bytes([n]) * (300_000 if n % 2 else 3) for n in range(6)}
    with DatagenStore.open(uri, fsync=False) as store:
        for number, (item, data) in enumerate(blobs.items()):
            store.append([created(1, item), field_set(2, data, item), completed(3, item)])
            if number == 1:
                store.flush()
                store.cleanup_own_shard()
            if number == 3:
                store.flush()
        for item, data in blobs.items():
            assert store.load_blob(item, "score") == data
            assert store.get_blob(f"{item}#2") == data
            loaded = store.fold_item(item, load_blobs=True).folded()
            assert loaded is not None
            assert loaded.fields["score"].value == DatagenValue.of(data)
        assert store.get_blob("0#1") is None
        assert store.get_blob("none") is None
        assert store.load_blob("0", "none") is None
        assert store.load_blob("none", "score") is None


def test_a_large_wal_entry_is_mapped_and_not_copied(tmp_path: Path) -> None:
    uri = str(tmp_path / "log.lance")
    with DatagenStore.open(uri, fsync=False) as store:
        store.append([created(), field_set(2, b"x" * (8 << 20))])
        store.append([completed(3)])
        before = pa.total_allocated_bytes()
        tail = read_wal_tail(LogStorage(uri), shard_uuid("default"), 0)
        assert sum(entry.rows.num_rows for entry in tail.entries) == 3
        assert pa.total_allocated_bytes() - before < 1 << 20
        # It outlives its file, which a collector may delete at any time.
        for position in range(1, tail.next_position):
            (tmp_path / "log.lance" / wal_key(shard_uuid("default"), position)).unlink()
        blob = tail.entries[0].rows.column("value_blob")[1].as_py()
        assert blob == b"x" * (8 << 20)


@pytest.mark.parametrize(
    "reference",
    [DatagenBlobValue(b"abc", 4), DatagenBlobValue(b"abc", 3, "sha256:" + "0" * 64)],
    ids=["size", "checksum"],
)
def test_a_blob_that_does_not_fit_its_row_is_damage_when_loaded(
    tmp_path: Path, reference: DatagenBlobValue
) -> None:
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as store:
        value = DatagenValue("blob", reference)
        rows = [created(), stored(field_append(2, b"abc"), value=value)]
        store._writer().submit(rows).result()
        assert store.fold_item("5").folded() is not None
        for load in (
            lambda: store.get_blob("5#2"),
            lambda: store.load_blob("5", "score"),
            lambda: store.fold_item("5", load_blobs=True),
        ):
            with pytest.raises(DamagedLogError, match="5#2"):
                load()


def test_failures_are_listed_by_item_and_run(tmp_path: Path) -> None:
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as store:
        store.append([created(1, "b"), row("FAILED", 2, "b"), row("FAILED", 3, "b", run_id="r2")])
        store.append([created(1, "a"), row("FAILED", 2, "a")])
        assert [(f.item_id, f.run_id) for f in store.failures()] == [
            ("a", "r1"), ("b", "r1"), ("b", "r2"),
        ]  # fmt: skip
        assert [f.item_id for f in store.failures("r2")] == ["b"]


def test_dedupe_keeps_each_content_once_and_tells_nan_and_zeros_apart() -> None:
    rows = pa.table(
        {
            "event_id": ["a", "a", "a", "b", "b", "c"],
            "value": [float("nan"), float("nan"), 1.0, 0.0, -0.0, 2.0],
        }
    )
    assert snapshot.dedupe(rows).column("event_id").to_pylist() == ["a", "a", "b", "b", "c"]
    assert snapshot.dedupe(rows.slice(0, 0)).num_rows == 0


def test_statistics_tell_what_was_written_and_what_is_pending(store: DatagenStore) -> None:
    found = store.statistics()
    assert found.writer is not None
    assert (found.writer.appends, found.writer.events) == (18, 45)
    assert found.cleanup is None
    assert found.pending_generations == {shard_uuid("default"): 1}
    assert found.pending_bytes[shard_uuid("default")] > 0
    with DatagenStore.open(store.uri, read_only=True) as other:
        assert other.statistics().writer is None
        assert other.statistics().pending_generations == found.pending_generations
