from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.errors import ConfigError, DatagenError, InternalError, StorageError
from datagen_ray.store import merge
from datagen_ray.store.cleanup import CleanupOptions, PeriodicCleanup
from datagen_ray.store.creation import open_log
from datagen_ray.store.merge import MergeReport, ShardMerger
from datagen_ray.store.shard import ShardManifest, SsTable
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SHARD,
    SLOT,
    add_generation,
    append,
    base_ids,
    generations,
    ids_of,
    log_with_generations,
    manifest_of,
    visible_ids,
)
from tests.store.writer_support import event, new_log

NEVER_S = 3600.0


class Seen:
    """What a cleanup reports, and a way to wait for it."""

    def __init__(self) -> None:
        self.reports: list[MergeReport] = []
        self.errors: list[DatagenError] = []
        self.merged = threading.Event()
        self.failed = threading.Event()

    def on_merge(self, report: MergeReport) -> None:
        self.reports.append(report)
        self.merged.set()

    def on_error(self, error: DatagenError) -> None:
        self.errors.append(error)
        self.failed.set()


@pytest.fixture
def seen() -> Seen:
    return Seen()


def cleanup(uri: str, seen: Seen, interval_s: float = NEVER_S, **options: Any) -> PeriodicCleanup:
    return PeriodicCleanup(
        ShardMerger(LogStorage(uri), SHARD),
        interval_s,
        options=CleanupOptions(**options),
        on_merge=seen.on_merge,
        on_error=seen.on_error,
    )


def manifest_with(count: int, size_bytes: int = 1) -> ShardManifest:
    tables = tuple(SsTable(n + 1, f"{n:08x}_gen_{n + 1}", size_bytes) for n in range(count))
    return ShardManifest(SHARD, 1, 1, 0, 0, count + 1, tables, b"")


def test_pending_generations_are_merged_after_the_interval(tmp_path, seen):
    uri = log_with_generations(tmp_path, "a", "b")
    merging = cleanup(uri, seen, 0.01)
    assert seen.merged.wait(30)
    merging.close()
    assert sorted(base_ids(uri)) == ids_of("a", "b")
    done = merging.statistics()
    assert (done.generations, done.events, done.failures) == (2, 6, 0)
    assert done.merge_seconds >= done.longest_merge_s > 0


def test_many_pending_generations_start_a_merge_at_once(tmp_path, seen):
    uri = log_with_generations(tmp_path, "a", "b")
    merging = cleanup(uri, seen, max_generations=2)
    merging.pause_after(manifest_with(1))
    merging.pause_after(manifest_with(2))
    assert seen.merged.wait(30)
    merging.close()
    assert generations(uri) == []


def test_many_pending_bytes_start_a_merge_at_once(tmp_path, seen):
    uri = log_with_generations(tmp_path, "a")
    merging = cleanup(uri, seen, max_bytes=1000)
    merging.pause_after(manifest_with(1, size_bytes=1000))
    assert seen.merged.wait(30)
    merging.close()


def test_few_pending_generations_wait(tmp_path, seen):
    uri = log_with_generations(tmp_path, "a")
    merging = cleanup(uri, seen)
    assert merging.pause_after(manifest_with(3)) == 0
    assert not merging._wake.is_set()
    merging.close()
    assert generations(uri) == [1]


def test_past_the_limit_the_pause_grows_with_the_pile_up_to_a_longest(tmp_path, seen):
    merging = cleanup(
        new_log(tmp_path), seen, slow_generations=4, slow_step_s=0.5, longest_pause_s=1.2
    )
    pauses = [merging.pause_after(manifest_with(count)) for count in (4, 5, 6, 7, 100)]
    assert pauses == [0, 0.5, 1.0, 1.2, 1.2]
    merging.close()


def test_generations_that_are_held_back_slow_nobody(tmp_path, seen):
    uri = new_log(tmp_path)
    add_generation(uri, [event("x", text="one")], [event("x", text="two")])
    merging = cleanup(uri, seen, max_generations=1, slow_generations=1)
    merging.merge_soon()
    assert seen.merged.wait(30)
    assert seen.reports[0].conflicting_event_ids == ("x",)
    merging.close()
    assert merging.statistics().held_back == 1
    assert merging.pause_after(manifest_of(uri)) == 0
    add_generation(uri, [event("y")])
    assert merging.pause_after(manifest_of(uri)) == 0, "one is pending, the other held back"


def test_a_storage_error_is_told_and_the_merge_tried_again(tmp_path, seen, monkeypatch):
    uri = log_with_generations(tmp_path, "a")
    broken = threading.Event()
    broken.set()
    real = merge.drain_generation

    def drain(*arguments: Any) -> Any:
        if broken.is_set():
            raise StorageError("the disk is away")
        return real(*arguments)

    monkeypatch.setattr(merge, "drain_generation", drain)
    merging = cleanup(uri, seen)
    merging.merge_soon()
    assert seen.failed.wait(30)
    with pytest.raises(StorageError, match="disk is away"):
        merging.check()
    assert merging.is_alive
    broken.clear()
    merging.merge_soon()
    assert seen.merged.wait(30)
    merging.close()
    assert merging.statistics().failures == 1
    assert sorted(base_ids(uri)) == ids_of("a")


@pytest.mark.parametrize("error", [ValueError("a bug"), InternalError("a state")])
def test_any_other_error_ends_the_thread_and_is_raised_at_close(tmp_path, seen, monkeypatch, error):
    uri = log_with_generations(tmp_path, "a")

    def fail(self: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(ShardMerger, "run", fail)
    merging = cleanup(uri, seen)
    merging.merge_soon()
    assert seen.failed.wait(30)
    with pytest.raises(InternalError, match=r"a bug|a state"):
        merging.close()
    assert not merging.is_alive
    assert len(seen.errors) == 1


def test_a_store_merges_its_own_shard_while_it_is_appended_to(tmp_path, seen):
    uri = new_log(tmp_path)
    with DatagenStore.open(uri, shard_id=SLOT) as store:
        merging = store.spawn_periodic_cleanup(
            NEVER_S, options=CleanupOptions(max_generations=1), on_merge=seen.on_merge
        )
        with pytest.raises(ConfigError, match="has a periodic cleanup already"):
            store.spawn_periodic_cleanup(1.0)
        owner = store._writer()
        append(owner, "a")
        store.flush()
        append(owner, "b")  # the writer sees the new manifest and wakes the cleanup
        assert seen.merged.wait(30)
        merging.check()
        assert store.statistics().cleanup.generations >= 1
        append(owner, "c")
    assert not merging.is_alive
    assert visible_ids(uri) == ids_of(*"abc")
    assert set(ids_of("a")) <= set(base_ids(uri))


def test_closing_a_store_lets_the_shard_go_though_its_merge_failed(tmp_path, seen, monkeypatch):
    uri = log_with_generations(tmp_path, "a")

    def fail(self: Any, **options: Any) -> Any:
        raise StorageError("the disk is away")

    monkeypatch.setattr(ShardMerger, "run", fail)
    store = DatagenStore.open(uri, shard_id=SLOT)
    store.spawn_periodic_cleanup(NEVER_S, on_error=seen.on_error).merge_soon()
    assert seen.failed.wait(30)
    append(store._writer(), "b")
    with pytest.raises(StorageError, match="disk is away"):
        store.cleanup_own_shard()
    with pytest.raises(StorageError, match="disk is away"):
        store.close()
    store.close()
    assert generations(uri) == [1, 2], "what was appended is flushed all the same"


def test_a_pile_of_generations_slows_the_writer_but_does_not_stop_it(tmp_path):
    uri = new_log(tmp_path)
    with ShardOwner.claim(uri, SLOT) as owner:
        pauses: list[int] = []

        def pause_after(manifest: ShardManifest) -> float:
            pauses.append(len(manifest.sstables))
            return 0.001

        append(owner, "a")
        owner.slow_down_by(pause_after)
        owner.flush()
        append(owner, "b", "c")
        owner.slow_down_by(None)
        append(owner, "d")
    assert pauses == [1, 1]


def test_cleaning_up_needs_no_claim(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    with ShardOwner.claim(uri, SLOT) as owner:
        other = DatagenStore.open(uri)
        other._slot = SLOT
        assert len(other.cleanup_own_shard().generations) == 1
        append(owner, "b")
    assert visible_ids(uri) == ids_of("a", "b")


def test_a_read_only_store_maintains_nothing(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    version = open_log(uri).version
    store = DatagenStore.open(uri, read_only=True)
    for call in (
        store.cleanup_own_shard,
        store.compact,
        store.refresh_indexes,
        store.cleanup_old_versions,
        store.collect_garbage,
        lambda: store.spawn_periodic_cleanup(1.0),
    ):
        with pytest.raises(ConfigError, match="read-only"):
            call()
    assert store.collect_garbage(dry_run=True).dry_run
    assert (open_log(uri).version, generations(uri)) == (version, [1])


@pytest.mark.parametrize(
    "options",
    [{"max_generations": 0}, {"max_generations": 9, "slow_generations": 8}, {"jitter": 1.0}],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        CleanupOptions(**options)


def test_an_interval_must_be_positive(tmp_path: Path, seen: Seen) -> None:
    with pytest.raises(ConfigError):
        cleanup(new_log(tmp_path), seen, 0.0)
