from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.dataset import MergeInsertBuilder
from lance.mem_wal import CompactedSsTable

from datagen_ray.errors import DamagedLogError, ItemViolationError, StorageError
from datagen_ray.log.fold import fold_datagen_events
from datagen_ray.log.schema import DATAGEN_SCHEMA, encode_events
from datagen_ray.store import commits, lance_errors, layout, merge
from datagen_ray.store.compaction import refresh_indexes
from datagen_ray.store.creation import open_log
from datagen_ray.store.merge import ShardMerger
from datagen_ray.store.shard import drain_generation
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SHARD,
    add_generation,
    add_generations,
    append,
    base_ids,
    generations,
    ids_of,
    log_with_generations,
    manifest_of,
    merger,
    repeated,
    visible_contents,
    visible_ids,
)
from tests.store.test_writer_crash import Disk
from tests.store.writer_support import batch, event, new_log, stored_ids


def test_merging_moves_each_generation_into_the_base_table_and_drains_it(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b", "c")
    before = open_log(uri).version
    report = merger(uri).run()
    assert [done.generation for done in report.generations] == [1, 2, 3]
    assert [(done.rows, done.inserted) for done in report.generations] == [(3, 3)] * 3
    assert all(done.drained and not done.merged_before for done in report.generations)
    assert open_log(uri).version == before + 3, "one commit a generation"
    assert generations(uri) == []
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of("a", "b", "c")
    assert merger(uri).run().generations == ()


def test_a_shard_that_nobody_wrote_to_has_nothing_to_merge(tmp_path):
    assert merger(new_log(tmp_path)).run().generations == ()


def test_appends_go_on_while_their_shard_is_merged(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    with ShardOwner.claim(uri, "slot") as owner:
        append(owner, "c")
        merger(uri).run()
        append(owner, "d")
        owner.flush()
        append(owner, "e")
    assert generations(uri) == [3, 4]
    merger(uri).run()
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of(*"abcde")


@pytest.mark.parametrize("way", ["no index", "with the index", "scanning the ids"])
def test_concurrent_mergers_leave_no_physical_duplicate(way, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "_SCANNED_ID_BYTES", 0 if way == "scanning the ids" else 1 << 40)
    uri = log_with_generations(tmp_path, "first")
    merger(uri).run()
    if way != "no index":
        refresh_indexes(LogStorage(uri))
    names = [f"n{number}" for number in range(6)]
    add_generations(uri, *names)
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def run() -> None:
        start.wait()
        try:
            merger(uri).run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of("first", *names)
    assert generations(uri) == []


def test_mergers_of_different_shards_do_not_keep_each_other_from_committing(tmp_path):
    uri = new_log(tmp_path)
    slots = [f"slot-{number}" for number in range(3)]
    for slot in slots:
        add_generations(uri, *(f"{slot}.{n}" for n in range(4)), slot=slot)
    threads = [threading.Thread(target=merger(uri, slot).run) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(base_ids(uri)) == ids_of(*(f"{slot}.{n}" for slot in slots for n in range(4)))


def test_a_merger_that_stopped_before_the_drain_is_finished_by_the_next(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a", "b")

    def die(*arguments: Any) -> None:
        raise StorageError("gone away")

    with monkeypatch.context() as patch:
        patch.setattr(merge, "drain_generation", die)
        with pytest.raises(StorageError, match="gone away"):
            merger(uri).run()
    assert generations(uri) == [1, 2]
    assert visible_ids(uri) == ids_of("a", "b")
    report = merger(uri).run()
    assert [done.merged_before for done in report.generations] == [True, False]
    assert sorted(base_ids(uri)) == ids_of("a", "b")
    assert generations(uri) == []


def test_a_commit_whose_answer_was_lost_is_not_repeated(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a")
    real = MergeInsertBuilder.execute
    lost = []

    def execute(self: Any, *arguments: Any, **options: Any) -> Any:
        result = real(self, *arguments, **options)
        if not lost:
            lost.append(result)
            raise OSError("the connection was reset")
        return result

    monkeypatch.setattr(MergeInsertBuilder, "execute", execute)
    with pytest.raises(StorageError, match="connection was reset"):
        merger(uri).run()
    assert merger(uri).run().generations[0].merged_before
    assert sorted(base_ids(uri)) == ids_of("a")


def test_a_merger_that_stood_still_with_an_old_handle_adds_nothing(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "first")
    merger(uri).run()
    refresh_indexes(LogStorage(uri))
    add_generations(uri, "a", "b")
    stalled = merger(uri)
    old_handle = open_log(uri)
    pending = stalled.pending()
    merger(uri).run()
    handles = [old_handle]
    monkeypatch.setattr(stalled, "pending", lambda: pending if handles else ())
    with monkeypatch.context() as patch:
        patch.setattr(
            merge, "open_log", lambda *_, **__: handles.pop() if handles else open_log(uri)
        )
        report = stalled.run()
    assert [done.merged_before for done in report.generations] == [True]
    assert sorted(base_ids(uri)) == ids_of("first", "a", "b")
    assert generations(uri) == []


def test_a_drainer_that_stood_still_rolls_nothing_back(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a")
    storage = LogStorage(uri)
    put = storage.put_if_absent
    others: list[int] = []

    def stalled(key: str, data: bytes) -> bool:
        if not others:  # before our first try: all else moves on
            others.append(1)
            merger(uri).run()
            add_generations(uri, "b")
        return put(key, data)

    monkeypatch.setattr(storage, "put_if_absent", stalled)
    drain_generation(storage, SHARD, 1)
    assert generations(uri) == [2]
    assert visible_ids(uri) == ids_of("a", "b")


def test_the_same_rows_in_two_generations_are_inserted_once(tmp_path):
    uri = new_log(tmp_path)
    add_generation(uri, batch("a"))
    add_generation(uri, batch("a"), batch("b"))
    report = merger(uri).run()
    assert [(done.rows, done.inserted) for done in report.generations] == [(3, 3), (6, 3)]
    assert report.conflicting_event_ids == ()
    assert sorted(base_ids(uri)) == ids_of("a", "b")
    assert generations(uri) == []


def test_the_same_rows_twice_in_one_generation_are_inserted_once(tmp_path):
    uri = new_log(tmp_path)
    add_generation(uri, batch("a"), batch("a"), batch("b"))
    assert [done.rows for done in merger(uri).run().generations] == [6]
    assert sorted(base_ids(uri)) == ids_of("a", "b")
    assert generations(uri) == []


def test_a_nan_is_the_same_content_as_another(tmp_path):
    rows = pa.Table.from_batches([encode_events(batch("a"))])
    at = DATAGEN_SCHEMA.get_field_index("value_f64")
    nan = pa.array([float("nan")] * rows.num_rows, pa.float64())
    uri = new_log(tmp_path)
    for _ in range(2):
        with open_log(uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1) as writer:
            writer.put(rows.set_column(at, DATAGEN_SCHEMA.field(at), nan).to_batches()[0])
    assert merger(uri).run().conflicting_event_ids == ()
    assert sorted(base_ids(uri)) == ids_of("a")


def conflicting_log(folder: Path, where: str) -> str:
    """A log in which event ``x`` stands for "one" and for "two"."""
    uri = new_log(folder)
    if where == "one generation":
        add_generation(uri, [event("x", text="one")], [event("x", text="two")], batch("b"))
    else:
        add_generation(uri, [event("x", text="one")])
        add_generation(uri, [event("x", text="two")], batch("b"))
    return uri


@pytest.mark.parametrize("where", ["one generation", "two generations"])
def test_other_content_under_one_id_is_held_back_and_stays_visible(where, tmp_path):
    uri = conflicting_log(tmp_path, where)
    assert visible_contents(uri, "x") == {"one", "two"}
    add_generations(uri, "later")
    held = generations(uri)[-2]
    first = merger(uri)
    assert first.run().conflicting_event_ids == ("x",)
    assert first.held_back == {held}
    assert first.run().generations == (), "a merger looks at what it holds back once"
    assert generations(uri) == [held], "the generations after it are merged all the same"
    assert visible_contents(uri, "x") == {"one", "two"}
    assert sorted(base_ids(uri)) == sorted(["x", *ids_of("b", "later")])
    # another process finds the same, and changes nothing
    again = merger(uri).run()
    assert again.conflicting_event_ids == ("x",)
    assert again.generations[0].merged_before
    assert generations(uri) == [held]
    with DatagenStore.open(uri, read_only=True) as store, pytest.raises(ItemViolationError):
        fold_datagen_events(store.events_for_item("item"))


def test_a_marked_generation_whose_rows_are_missing_is_not_drained(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    builder = open_log(uri).merge_insert("event_id").when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([CompactedSsTable(SHARD, 1)])
    builder.execute(pa.Table.from_batches([encode_events(batch("other"))]))
    with pytest.raises(DamagedLogError, match=r"lacks 3 of its rows, such as event a\."):
        merger(uri).run()
    assert generations(uri) == [1]
    assert visible_ids(uri) == ids_of("a", "other")


def test_a_listed_generation_whose_files_are_missing_is_damage(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    shutil.rmtree(Path(uri) / layout.sstable_key(SHARD, manifest_of(uri).sstables[0].path))
    with pytest.raises(DamagedLogError, match="files of it are missing"):
        merger(uri).run()
    assert generations(uri) == [1]


def test_a_generation_that_was_drained_and_collected_meanwhile_is_passed_over(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    stalled = merger(uri)
    pending = stalled.pending()
    merger(uri).run()
    for table in pending:
        shutil.rmtree(Path(uri) / layout.sstable_key(SHARD, table.path))
    assert stalled._merge(pending[0]) is None
    assert stalled.run().generations == ()
    assert visible_ids(uri) == ids_of("a", "b")


def test_stopping_ends_a_merge_between_two_generations(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b", "c")
    answers = iter([False, True])
    assert len(merger(uri).run(stop=lambda: next(answers)).generations) == 1
    assert generations(uri) == [2, 3]


def test_a_check_that_fails_stops_the_merge_before_its_commit(tmp_path):
    uri = log_with_generations(tmp_path, "a")

    def lost() -> None:
        raise StorageError("lost the lease")

    with pytest.raises(StorageError, match="lost the lease"):
        ShardMerger(LogStorage(uri), SHARD, before_commit=lost).run()
    assert (base_ids(uri), generations(uri)) == ([], [1])


def test_after_a_failed_sync_a_merger_drains_nothing_any_more(tmp_path, monkeypatch):
    uri = log_with_generations(tmp_path, "a")
    once = merger(uri)

    def fail(self: Any) -> None:
        raise StorageError("cannot sync")

    with monkeypatch.context() as patch:
        patch.setattr(commits.CommitSync, "sync", fail)
        with pytest.raises(StorageError, match="cannot sync"):
            once.run()
    with pytest.raises(StorageError, match="cannot sync"):
        once.run()
    assert generations(uri) == [1]
    assert visible_ids(uri) == ids_of("a")


@pytest.mark.parametrize("moment", ["before the drain", "after the drain"])
def test_what_was_merged_survives_power_loss(moment, tmp_path, monkeypatch):
    disk = Disk(tmp_path / "disk", monkeypatch)
    monkeypatch.setattr(commits, "_syncfs", None)
    (tmp_path / "disk").mkdir()
    uri = new_log(tmp_path / "disk")
    for name in "ab":
        with ShardOwner.claim(uri, "slot") as owner:
            append(owner, name)
    if moment == "before the drain":
        monkeypatch.setattr(merge, "drain_generation", lambda *_: manifest_of(uri))
        once = merger(uri)
        monkeypatch.setattr(once, "pending", iter([once.pending(), ()]).__next__)
        once.run()
    else:
        merger(uri).run()
    disk.after_power_loss(tmp_path / "copy")
    lost_uri = uri.replace(str(disk.root), str(tmp_path / "copy"))
    assert sorted(set(stored_ids(lost_uri))) == ids_of("a", "b")
    if moment == "after the drain":
        assert sorted(base_ids(lost_uri)) == ids_of("a", "b")
        shutil.rmtree(Path(lost_uri) / layout.MEM_WAL_FOLDER)
        os.mkdir(Path(lost_uri) / layout.MEM_WAL_FOLDER)
        assert visible_ids(lost_uri) == ids_of("a", "b")


def test_the_texts_of_a_marked_generation_and_of_a_vanished_file(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    rows = pa.Table.from_batches([encode_events(batch("b"))])

    def mark() -> Any:
        builder = open_log(uri).merge_insert("event_id").when_not_matched_insert_all()
        builder.mark_sstables_as_compacted([CompactedSsTable(SHARD, 1)])
        return builder.execute(rows)

    mark()
    with pytest.raises(lance_errors.LANCE_ERRORS) as raised:
        mark()
    assert lance_errors.is_merged_already(raised.value), str(raised.value)
    assert repeated(base_ids(uri)) == []
    sstable = Path(uri) / layout.sstable_key(SHARD, manifest_of(uri).sstables[0].path)
    dataset = lance.dataset(str(sstable))
    shutil.rmtree(sstable / "data")
    with pytest.raises(lance_errors.LANCE_ERRORS) as raised:
        dataset.to_table()
    assert lance_errors.is_vanished(raised.value), str(raised.value)
    shutil.rmtree(sstable)
    with pytest.raises(lance_errors.LANCE_ERRORS) as raised:
        lance.dataset(str(sstable))
    assert lance_errors.is_vanished(raised.value), str(raised.value)
