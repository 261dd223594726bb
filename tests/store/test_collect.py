from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.errors import ConfigError, StorageError, WriterFencedError
from datagen_ray.store import collect, layout
from datagen_ray.store.collect import CollectionReport, collect_garbage
from datagen_ray.store.levels import SourceVanishedError
from datagen_ray.store.shard import drain_generation, read_latest_manifest
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SHARD,
    SLOT,
    add_generation,
    add_generations,
    append,
    ids_of,
    log_with_generations,
    manifest_of,
    merger,
    visible_ids,
)
from tests.store.writer_support import event, new_log, wal_path, wal_positions

HOUR_S = 3600.0


def later(hours: float) -> Callable[[], datetime]:
    """A clock that is so many hours ahead."""
    return lambda: datetime.now(timezone.utc) + timedelta(hours=hours)


def collect_all(uri: str, **options: Any) -> CollectionReport:
    """A collection that waits for nothing."""
    waits_for_nothing = {"grace_s": 0.0, "wal_retention_s": 0.0, "leftover_age_s": 0.0}
    return collect_garbage(LogStorage(uri), **{"now": later(0.1), **waits_for_nothing, **options})


def sstable_folders(uri: str) -> list[str]:
    names = os.listdir(Path(uri) / layout.shard_folder(SHARD))
    return sorted(name for name in names if layout.parse_sstable_name(name))


def manifest_files(uri: str) -> list[str]:
    return sorted(os.listdir(Path(uri) / layout.manifest_folder(SHARD)))


def log_with_wal(folder: Path, *names: str) -> str:
    """A log whose shard flushed one WAL entry for each name into one generation."""
    uri = new_log(folder)
    with ShardOwner.claim(uri, SLOT) as owner:
        append(owner, *names)
    return uri


def test_covered_wal_entries_go_but_the_last_of_them_stays(tmp_path):
    uri = log_with_wal(tmp_path, *"abcd")
    assert manifest_of(uri).replay_after == 4
    report = collect_all(uri)
    assert wal_positions(uri, SLOT) == [4]
    assert [removal.kind for removal in report.removed] == ["wal entry"] * 3
    assert [removal.key for removal in report.removed] == [
        layout.wal_key(SHARD, position) for position in (1, 2, 3)
    ]
    assert report.bytes > 0
    assert "up to entry 4" in report.removed[0].reason
    assert visible_ids(uri) == ids_of(*"abcd")
    assert collect_all(uri).removed == ()


def test_entries_that_no_sstable_holds_stay(tmp_path):
    uri = log_with_wal(tmp_path, "a", "b")
    with ShardOwner.claim(uri, SLOT) as owner:
        append(owner, "c", "d")
        before = wal_positions(uri, SLOT)
        collect_all(uri)
        assert wal_positions(uri, SLOT) == before[before.index(2) :]
        assert visible_ids(uri) == ids_of(*"abcd")
        append(owner, "e")
    assert visible_ids(uri) == ids_of(*"abcde")


def test_the_writer_after_a_collection_leaves_no_hole(tmp_path):
    uri = log_with_wal(tmp_path, *"abc")
    for name in "def":
        collect_all(uri)
        with ShardOwner.claim(uri, SLOT) as owner:
            append(owner, name)
            positions = wal_positions(uri, SLOT)
            assert positions == list(range(positions[0], positions[-1] + 1))
    assert visible_ids(uri) == ids_of(*"abcdef")


def test_young_wal_entries_stay(tmp_path):
    uri = log_with_wal(tmp_path, *"abc")
    assert collect_all(uri, wal_retention_s=2 * HOUR_S).removed == ()
    assert collect_all(uri, wal_retention_s=2 * HOUR_S, now=later(3)).count("wal entry") == 2


def test_an_old_entry_behind_a_young_one_stays_so_that_they_go_in_order(tmp_path):
    uri = log_with_wal(tmp_path, *"abcd")
    young = datetime.now(timezone.utc).timestamp() + 2 * HOUR_S
    os.utime(wal_path(uri, SLOT, 2), (young, young))
    collect_all(uri, wal_retention_s=HOUR_S, now=later(2.5))
    assert wal_positions(uri, SLOT) == [2, 3, 4]


def test_shard_manifests_are_never_collected(tmp_path):
    uri = log_with_generations(tmp_path, *"abc")
    merger(uri).run()
    before = manifest_files(uri)
    collect_all(uri, now=later(10_000))
    assert manifest_files(uri) == before


def test_merged_and_drained_sstables_go(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    merger(uri).run()
    add_generations(uri, "c")
    assert len(sstable_folders(uri)) == 3
    report = collect_all(uri)
    assert report.count("sstable") == 2
    assert sstable_folders(uri) == [manifest_of(uri).sstables[0].path]
    assert visible_ids(uri) == ids_of(*"abc")


def test_sstables_that_are_listed_stay_though_they_are_merged(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a")
    add_generation(uri, [event("x", text="one")], [event("x", text="two")])
    assert merger(uri).run().conflicting_event_ids == ("x",)
    collect_all(uri)
    assert sstable_folders(uri) == [manifest_of(uri).sstables[0].path]


def test_an_sstable_that_was_drained_within_the_grace_time_stays(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    merger(uri).run()
    report = collect_all(uri, grace_s=HOUR_S)
    assert len(sstable_folders(uri)) == 1
    assert [kept.reason for kept in report.kept] == [
        "it may be being written, or was until a moment ago"
    ]
    # the grace time counts from the drain, not from when the SSTable was written
    shard = Path(uri) / layout.shard_folder(SHARD)
    hours_ago = datetime.now(timezone.utc).timestamp() - 5 * HOUR_S
    for version in range(1, manifest_of(uri).version):
        path = Path(uri) / layout.manifest_key(SHARD, version)
        os.utime(path, (hours_ago, hours_ago))
    for path in shard.rglob("*_gen_*/**/*"):
        os.utime(path, (hours_ago, hours_ago))
    report = collect_all(uri, grace_s=HOUR_S)
    assert len(sstable_folders(uri)) == 1
    assert "a reader may be at it" in report.kept[0].reason
    assert collect_all(uri, grace_s=HOUR_S, now=later(2)).count("sstable") == 1


def test_an_sstable_that_was_drained_without_being_merged_stays(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    drain_generation(LogStorage(uri), SHARD, 1)
    report = collect_all(uri)
    assert len(sstable_folders(uri)) == 2
    assert "3 of its rows are not in the base table" in report.kept[0].reason


def test_folders_of_flushes_that_were_cut_off_go_and_that_of_one_under_way_stays(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    shard = Path(uri) / layout.shard_folder(SHARD)
    current = manifest_of(uri).current_generation
    for generation in (1, current):
        folder = shard / f"00000000_gen_{generation}" / "data"
        folder.mkdir(parents=True)
        (folder / "half.lance").write_bytes(b"half")
    collect_all(uri)
    left = sstable_folders(uri)
    assert f"00000000_gen_{current}" in left
    assert "00000000_gen_1" not in left
    assert visible_ids(uri) == ids_of("a")


def test_a_second_copy_of_a_flush_stays_until_its_rows_are_merged(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    shard = Path(uri) / layout.shard_folder(SHARD)
    listed = manifest_of(uri).sstables[0].path
    shutil.copytree(shard / listed, shard / "00000000_gen_1")
    collect_all(uri)
    assert "00000000_gen_1" in sstable_folders(uri)
    merger(uri).run()
    collect_all(uri)
    assert sstable_folders(uri) == []


def test_leftovers_of_uploads_go_when_they_are_old_and_nothing_else_does(tmp_path):
    uri = log_with_wal(tmp_path, "a", "b")
    wal, data = Path(uri) / layout.wal_folder(SHARD), Path(uri) / "data"
    data.mkdir(exist_ok=True)
    leftovers = [
        Path(f"{wal_path(uri, SLOT, 9)}#1"),
        Path(uri) / layout.manifest_folder(SHARD) / f"{layout.bit_reversed(99)}.binpb#123-4",
        wal / "x.tmp.123",
        data / "0101.lance#2",
    ]
    others = [wal / "notes.txt", data / "0101.lance"]
    for path in (*leftovers, *others):
        path.write_bytes(b"half")
    assert collect_all(uri, leftover_age_s=HOUR_S).count("leftover") == 0
    report = collect_all(uri, leftover_age_s=HOUR_S, now=later(2))
    assert report.count("leftover") == len(leftovers)
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in others)


def test_a_dry_run_tells_the_same_and_removes_nothing(tmp_path):
    uri = log_with_wal(tmp_path, *"abc")
    merger(uri).run()
    before = sorted(Path(uri).rglob("*"))
    planned = collect_all(uri, dry_run=True)
    assert planned.dry_run
    assert sorted(Path(uri).rglob("*")) == before
    assert collect_all(uri).removed == planned.removed


def test_a_log_that_nobody_wrote_to_has_no_garbage(tmp_path):
    report = collect_all(new_log(tmp_path))
    assert (report.removed, report.kept) == ((), ())


@pytest.mark.parametrize("name", ["grace_s", "wal_retention_s", "leftover_age_s"])
def test_a_negative_time_is_refused(tmp_path, name):
    with pytest.raises(ConfigError):
        collect_all(new_log(tmp_path), **{name: -1.0})


def test_a_check_that_fails_keeps_everything(tmp_path):
    uri = log_with_wal(tmp_path, *"abc")
    before = sorted(Path(uri).rglob("*"))

    def lost() -> None:
        raise StorageError("lost the lease")

    with pytest.raises(StorageError, match="lost the lease"):
        collect_all(uri, before_removal=lost)
    assert sorted(Path(uri).rglob("*")) == before


def test_what_takes_the_place_of_an_entry_is_synced_before_the_entry_goes(tmp_path, monkeypatch):
    uri = log_with_wal(tmp_path, *"abc")
    monkeypatch.setattr(
        collect, "sync_manifest", lambda *_, since: (_ for _ in ()).throw(StorageError("no sync"))
    )
    with pytest.raises(StorageError, match="no sync"):
        collect_all(uri)
    assert wal_positions(uri, SLOT) == [1, 2, 3]


def test_a_collector_that_stood_still_removes_nothing_that_is_needed(tmp_path, monkeypatch):
    uri = log_with_wal(tmp_path, *"abc")
    merger(uri).run()
    storage = LogStorage(uri)
    delete = storage.delete
    others = []

    def stalled(key: str) -> bool:
        if not others:  # it has decided what to remove; all else moves on before it does
            others.append(1)
            with ShardOwner.claim(uri, SLOT) as owner:
                append(owner, "d", "e")
                owner.flush()
                append(owner, "f")
            merger(uri).run()
            collect_all(uri)
            with ShardOwner.claim(uri, SLOT) as owner:
                append(owner, "g")
        return delete(key)

    monkeypatch.setattr(storage, "delete", stalled)
    collect_garbage(storage, grace_s=0, wal_retention_s=0, now=later(0.1))
    assert visible_ids(uri) == ids_of(*"abcdefg")
    with ShardOwner.claim(uri, SLOT) as owner:
        append(owner, "h")
    assert visible_ids(uri) == ids_of(*"abcdefgh")


def test_a_reader_whose_sstable_was_collected_starts_again(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    reader = LogReader(LogStorage(uri))
    stale = reader.snapshot()
    merger(uri).run()
    collect_all(uri)
    with pytest.raises(SourceVanishedError):
        stale.read(["event_id"], None)
    ids = reader.snapshot().read(["event_id"], None)["event_id"].to_pylist()
    assert sorted(ids) == ids_of("a", "b")


def test_a_reader_between_listing_and_opening_starts_again(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a", "b")
    reader = LogReader(LogStorage(uri))
    real = reader._open_sstable
    others: list[int] = []

    def late(key: str) -> Any:
        if not others:
            others.append(1)
            merger(uri).run()
            collect_all(uri)
        return real(key)

    monkeypatch.setattr(reader, "_open_sstable", late)
    ids = reader.snapshot().read(["event_id"], None)["event_id"].to_pylist()
    assert sorted(ids) == ids_of("a", "b")


def test_a_reader_whose_tail_is_flushed_and_collected_under_it_starts_again(tmp_path, monkeypatch):
    uri = new_log(tmp_path)
    first = ShardOwner.claim(uri, SLOT)
    append(first, "a", "b", "c")
    reader = LogReader(LogStorage(uri))
    real = reader._storage.get
    others: list[int] = []

    def late(key: str) -> bytes | None:
        if "/wal/" in key and not others:
            others.append(1)
            first.flush()
            append(first, "d")
            collect_all(uri)
        return real(key)

    monkeypatch.setattr(reader._storage, "get", late)
    ids = reader.snapshot().read(["event_id"], None)["event_id"].to_pylist()
    assert set(ids_of(*"abc")) <= set(ids)
    assert len(ids) == len(set(ids))
    first.close()


def test_a_writer_that_stood_still_is_silent_after_claim_flush_and_collection(tmp_path):
    uri = new_log(tmp_path)
    stalled = ShardOwner.claim(uri, SLOT)
    append(stalled, "a", "b")
    with ShardOwner.claim(uri, SLOT) as heir:
        append(heir, *"cdef")
        heir.flush()
    merger(uri).run()
    collect_all(uri)
    with pytest.raises(WriterFencedError):
        stalled.submit([event("late")]).result()
    with pytest.raises(WriterFencedError):
        stalled.submit([event("later")]).result()
    assert visible_ids(uri) == ids_of(*"abcdef")
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    assert manifest is not None
    with ShardOwner.claim(uri, SLOT) as heir:
        append(heir, "g")
    assert visible_ids(uri) == ids_of(*"abcdefg")
