from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.errors import ConfigError, DamagedLogError, StorageError
from datagen_ray.store import commits, compaction
from datagen_ray.store.commits import CommitConflictError, CommitSync, commit_with_retries
from datagen_ray.store.compaction import (
    INDEXED_COLUMNS,
    cleanup_old_versions,
    compact,
    is_compaction_due,
    refresh_indexes,
    uncovered_rows,
)
from datagen_ray.store.creation import open_log
from datagen_ray.store.maintenance import maintain_once
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.wholeness import base_versions, check_whole
from tests.store.maintenance_support import (
    add_generations,
    base_ids,
    ids_of,
    log_with_generations,
    merger,
    visible_ids,
)
from tests.store.writer_support import new_log

NAMES = [f"n{number}" for number in range(6)]


@pytest.fixture
def uri(tmp_path: Any) -> str:
    """A log whose base table has six small fragments."""
    uri = log_with_generations(tmp_path, *NAMES)
    merger(uri).run()
    return uri


def fragments(uri: str) -> int:
    return len(open_log(uri).get_fragments())


def test_compaction_joins_small_fragments_and_changes_no_row(uri):
    storage = LogStorage(uri)
    assert fragments(uri) == 6
    report = compact(storage)
    assert (report.fragments_removed, report.fragments_added) == (6, 1)
    assert fragments(uri) == 1
    assert sorted(base_ids(uri)) == ids_of(*NAMES)
    assert compact(storage).fragments_removed == 0


def test_compaction_joins_fragments_that_different_parts_of_an_index_cover(uri):
    storage = LogStorage(uri)
    refresh_indexes(storage)
    for name in ("x", "y", "z"):
        add_generations(uri, name)
        merger(uri).run()
        refresh_indexes(storage)
    add_generations(uri, "not covered")
    merger(uri).run()
    compact(storage)
    assert fragments(uri) == 1
    assert set(uncovered_rows(storage).values()) == {0}
    assert sorted(base_ids(uri)) == ids_of(*NAMES, *"xyz", "not covered")


def test_compaction_is_due_when_there_are_enough_small_fragments(uri):
    storage = LogStorage(uri)
    assert is_compaction_due(storage, small_fragments=6)
    assert not is_compaction_due(storage, small_fragments=7)
    compact(storage)
    assert not is_compaction_due(storage, small_fragments=2)


def test_marks_survive_compaction_and_the_cleanup_of_versions(uri, monkeypatch):
    storage = LogStorage(uri)
    add_generations(uri, "again")
    stalled = merger(uri)
    pending = stalled.pending()
    merger(uri).run()
    compact(storage)
    refresh_indexes(storage)
    cleanup_old_versions(storage, retention_s=0)
    waiting = [pending]
    monkeypatch.setattr(stalled, "pending", lambda: waiting.pop() if waiting else ())
    assert stalled.run().generations[0].merged_before
    assert sorted(base_ids(uri)) == ids_of(*NAMES, "again")


def test_indexes_cover_the_table_and_what_is_added_to_it(uri):
    storage = LogStorage(uri)
    assert set(uncovered_rows(storage).values()) == {18}
    report = refresh_indexes(storage)
    assert report.created == INDEXED_COLUMNS
    assert (report.extended, report.uncovered_rows) == ((), 0)
    add_generations(uri, "a")
    merger(uri).run()
    assert set(uncovered_rows(storage).values()) == {3}
    assert refresh_indexes(storage).extended == INDEXED_COLUMNS
    assert refresh_indexes(storage) == type(report)()
    plan = open_log(uri).scanner(filter="item_id = 'item'").explain_plan()
    assert "ScalarIndexQuery" in plan


def test_the_parts_of_an_index_stay_few(uri):
    storage = LogStorage(uri)
    refresh_indexes(storage)
    for number in range(12):
        add_generations(uri, number)
        merger(uri).run()
        refresh_indexes(storage)
    for column in INDEXED_COLUMNS:
        assert open_log(uri).stats.index_stats(f"{column}_idx")["num_indices"] <= 8
    assert set(uncovered_rows(storage).values()) == {0}


def test_an_index_of_another_name_serves_as_well(uri):
    storage = LogStorage(uri)
    open_log(uri).create_scalar_index("item_id", "BTREE", name="made_elsewhere")
    assert set(refresh_indexes(storage).created) == {"event_id", "root_item_id"}
    assert set(uncovered_rows(storage).values()) == {0}


def test_an_empty_table_gets_no_index(tmp_path):
    storage = LogStorage(new_log(tmp_path))
    assert refresh_indexes(storage).created == ()
    assert not is_compaction_due(storage, small_fragments=1)
    assert compact(storage).fragments_removed == 0


def test_old_versions_go_when_the_retention_is_over_and_not_before(uri):
    storage = LogStorage(uri)
    compact(storage)
    before = len(open_log(uri).versions())
    assert cleanup_old_versions(storage, retention_s=3600).versions == 0
    assert len(open_log(uri).versions()) == before
    report = cleanup_old_versions(storage, retention_s=0)
    assert report.versions == before - 1
    assert report.bytes > 0
    assert visible_ids(uri) == ids_of(*NAMES)
    with pytest.raises(ConfigError):
        cleanup_old_versions(storage, retention_s=-1)


def test_a_reader_goes_on_when_its_version_was_cleaned_up(uri):
    storage = LogStorage(uri)
    reader = LogReader(storage)
    reader.snapshot()
    compact(storage)
    cleanup_old_versions(storage, retention_s=0)
    ids = reader.snapshot().read(["event_id"], None)["event_id"].to_pylist()
    assert sorted(ids) == ids_of(*NAMES)


def test_compaction_indexing_merging_and_cleanup_at_once_lose_and_double_nothing(tmp_path):
    uri = log_with_generations(tmp_path, "first")
    merger(uri).run()
    storage = LogStorage(uri)
    refresh_indexes(storage)
    slots = ["one", "two"]
    for slot in slots:
        add_generations(uri, *(f"{slot}.{n}" for n in range(12)), slot=slot)
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)

        return run

    def repeated(work: Callable[[LogStorage], object]) -> Callable[[], None]:
        def run() -> None:
            while not stop.is_set():
                work(storage)

        return run

    mergers = [threading.Thread(target=guarded(merger(uri, slot).run)) for slot in slots]
    others = [
        threading.Thread(target=guarded(repeated(work)))
        for work in (
            compact,
            refresh_indexes,
            lambda at: cleanup_old_versions(at, retention_s=2),
        )
    ]
    for thread in (*mergers, *others):
        thread.start()
    for thread in mergers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert failures == []
    expected = ids_of("first", *(f"{slot}.{n}" for slot in slots for n in range(12)))
    assert sorted(base_ids(uri)) == visible_ids(uri) == expected


@pytest.mark.parametrize("work", [compact, refresh_indexes, cleanup_old_versions])
def test_a_check_that_fails_keeps_maintenance_from_committing(work, uri):
    before = open_log(uri).version

    def lost() -> None:
        raise StorageError("lost the lease")

    refresh_indexes(LogStorage(uri))
    add_generations(uri, "more")
    merger(uri).run()
    before = open_log(uri).version
    with pytest.raises(StorageError, match="lost the lease"):
        work(LogStorage(uri), before_commit=lost)
    assert open_log(uri).version == before


def test_a_commit_that_others_overtake_is_tried_again():
    texts = [
        "Retryable commit conflict for version 9: preempted by concurrent transaction",
        "Too many concurrent writers. Attempted 0 retries.",
    ]

    def attempt() -> str:
        if texts:
            raise OSError(texts.pop())
        return "done"

    assert commit_with_retries(attempt, "testing") == "done"


def test_a_commit_that_is_always_overtaken_gives_up_in_the_end(monkeypatch):
    monkeypatch.setattr(commits, "_LONGEST_WAIT_S", 0.0)
    tries = []

    def attempt() -> None:
        tries.append(1)
        raise OSError("Retryable commit conflict for version 9")

    with pytest.raises(CommitConflictError, match="while testing"):
        commit_with_retries(attempt, "testing")
    assert len(tries) > 5


def test_an_error_that_is_no_conflict_is_not_tried_again():
    tries = []

    def attempt() -> None:
        tries.append(1)
        raise OSError("the disk is on fire")

    with pytest.raises(StorageError, match="while testing: the disk is on fire"):
        commit_with_retries(attempt, "testing")
    assert len(tries) == 1


def test_a_file_system_that_cannot_be_synced_is_a_storage_error(uri, monkeypatch):
    monkeypatch.setattr(commits, "_syncfs", lambda descriptor: -1)
    with CommitSync(LogStorage(uri)) as commit, pytest.raises(StorageError, match="cannot sync"):
        commit.sync()
    with CommitSync(LogStorage(uri, fsync=False)) as commit:
        commit.sync()


def test_what_is_larger_than_one_commit_should_be_is_compacted_all_the_same(uri, monkeypatch):
    monkeypatch.setattr(compaction, "_BYTES_A_COMMIT", 1)
    assert compact(LogStorage(uri)).fragments_removed == 6
    assert sorted(base_ids(uri)) == ids_of(*NAMES)


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder)


def lose_one(folder: Path) -> None:
    shutil.rmtree(sorted(folder.iterdir())[0])


def lose_files(folder: Path) -> None:
    for path in folder.glob("*/page_lookup.lance"):
        path.unlink()


def empty_files(folder: Path) -> None:
    for path in folder.glob("*/page_data.lance"):
        path.write_bytes(b"")


def overwrite_files(folder: Path) -> None:
    for path in folder.glob("*/page_lookup.lance"):
        path.write_bytes(bytes(path.stat().st_size))


DAMAGES = [lose_all, lose_one, lose_files, empty_files, overwrite_files]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("work", ["refresh", "maintain"])
def test_indexes_that_are_lost_are_made_anew(uri, damage, work):
    storage = LogStorage(uri)
    refresh_indexes(storage)
    damage(Path(uri) / "_indices")
    add_generations(uri, "more")
    if work == "refresh":
        created = refresh_indexes(storage).created
    else:
        report = maintain_once(uri)
        if damage is not overwrite_files:  # which nothing but the look-ups of merges notice
            report.raise_first_failure()
        created = report.indexes.created
    assert len(created) == (1 if damage is lose_one else len(INDEXED_COLUMNS))
    check_whole(storage)
    maintain_once(uri).raise_first_failure()
    assert set(uncovered_rows(storage).values()) == {0}
    assert visible_ids(uri) == ids_of(*NAMES, "more")
    with DatagenStore.open(uri, shard_id="other") as store:
        assert len(store.events_for_item("item")) == len(ids_of(*NAMES, "more"))


def test_lost_indexes_are_found_without_a_look_at_files(uri, monkeypatch):
    """As on an object store."""
    storage = LogStorage(uri)
    refresh_indexes(storage)
    lose_all(Path(uri) / "_indices")
    monkeypatch.setattr(compaction, "lost_indexes", lambda storage: [])
    assert sorted(refresh_indexes(storage).created) == sorted(INDEXED_COLUMNS)


def test_no_index_is_made_on_rows_that_are_cut_off(uri):
    storage = LogStorage(uri)
    refresh_indexes(storage)
    lose_all(Path(uri) / "_indices")
    next((Path(uri) / "data").iterdir()).write_bytes(b"")
    version = base_versions(storage)[0]
    with pytest.raises(DamagedLogError):
        maintain_once(uri)
    assert base_versions(storage)[0] == version


@pytest.mark.parametrize("damage", [lose_all, empty_files])
def test_reads_say_how_lost_indexes_are_made_anew(uri, damage):
    refresh_indexes(LogStorage(uri))
    damage(Path(uri) / "_indices")
    cure = f"`datagen-ray maintain {uri} --once`"
    store = DatagenStore.open(uri, read_only=True)
    with store, pytest.raises(DamagedLogError, match=cure):
        store.fold_item("item")


def test_statistics_that_cannot_be_read_are_an_error_of_the_storage(uri, monkeypatch):
    storage = LogStorage(uri)
    refresh_indexes(storage)

    class Broken:
        def index_stats(self, name):
            raise OSError("Failed to get index statistics: the disk is on fire")

    monkeypatch.setattr(type(open_log(uri)), "stats", Broken())
    for work in (refresh_indexes, uncovered_rows):
        with pytest.raises(StorageError, match="looking at index"):
            work(storage)
    failures = maintain_once(uri).failures
    assert [failure.part for failure in failures] == ["indexes"]
