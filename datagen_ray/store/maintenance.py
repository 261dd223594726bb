"""One pass of maintenance over a whole log, and what a run does at its end.

A pass never claims a shard, so it fences nobody and needs nobody's leave:

1. merge and drain the flushed generations of shards (all, or those that no worker merges);
2. join small fragments of the base table, when there are enough of them;
3. have the indexes cover what was added;
4. remove old versions of the base table;
5. collect covered WAL entries, drained SSTables and leftovers.

Each part can run beside writers, readers and another maintainer. One that fails is reported and
does not keep the others from running; only losing the lease ends the pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import DatagenError, LeaseLostError
from datagen_ray.store import layout
from datagen_ray.store.bounds import check_count, check_seconds
from datagen_ray.store.claim import flush_tails
from datagen_ray.store.collect import (
    GRACE_S,
    LEFTOVER_AGE_S,
    WAL_RETENTION_S,
    CollectionReport,
    collect_garbage,
)
from datagen_ray.store.commits import unchecked
from datagen_ray.store.compaction import (
    SMALL_FRAGMENTS,
    VERSION_RETENTION_S,
    CompactionReport,
    IndexReport,
    VersionCleanupReport,
    cleanup_old_versions,
    compact,
    is_compaction_due,
    rebuild_lost_indexes,
    refresh_indexes,
)
from datagen_ray.store.creation import open_log
from datagen_ray.store.lease import MaintenanceLease
from datagen_ray.store.merge import MergedGeneration, ShardMerger
from datagen_ray.store.shard import list_shards, read_latest_manifest
from datagen_ray.store.shared_compaction import Rewriter, compact_by
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import check_base, lost_indexes

_GENERATIONS_AN_INDEX = 4
_BYTES_AN_INDEX = 48 << 20
"""What is merged before the indexes are refreshed, whichever comes first. A merge scans what no
index covers, with all columns: a backlog must not pile that up."""


@dataclass(frozen=True)
class MaintenanceOptions:
    """How long things stay, and when a compaction pays.

    ``small_fragments``: that many make a compaction due; 1 compacts whenever there is any to join.
    The times are in seconds; see `collect` and `compaction` for what each must cover.
    Raises ConfigError for a number out of its range.
    """

    small_fragments: int = SMALL_FRAGMENTS
    version_retention_s: float = VERSION_RETENTION_S
    grace_s: float = GRACE_S
    wal_retention_s: float = WAL_RETENTION_S
    leftover_age_s: float = LEFTOVER_AGE_S

    def __post_init__(self) -> None:
        check_count("small_fragments", self.small_fragments)
        for name in ("version_retention_s", "grace_s", "wal_retention_s", "leftover_age_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True)
class MaintenanceFailure:
    """A part of a pass that did not succeed. The next pass tries it again."""

    part: str
    error: DatagenError


@dataclass
class MaintenanceReport:
    """What one pass did. A part that was not due, or failed, is None or empty."""

    merged: list[MergedGeneration] = field(default_factory=list)
    held_back: dict[str, list[int]] = field(default_factory=dict)
    pending_generations: int = 0
    compaction: CompactionReport | None = None
    indexes: IndexReport | None = None
    versions: VersionCleanupReport | None = None
    collection: CollectionReport | None = None
    failures: list[MaintenanceFailure] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def conflicting_event_ids(self) -> tuple[str, ...]:
        """Ids that stand for more than one content; `DatagenStore.verify` tells what they hold."""
        return tuple(i for done in self.merged for i in done.conflicting_event_ids)

    def raise_first_failure(self) -> None:
        """Raise what the first failed part failed with, if any did."""
        if self.failures:
            raise self.failures[0].error

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON values."""
        collected = self.collection
        return {
            "generations_merged": len(self.merged),
            "events_merged": sum(done.inserted for done in self.merged),
            "pending_generations": self.pending_generations,
            "held_back": {shard: list(held) for shard, held in self.held_back.items()},
            "conflicting_event_ids": list(self.conflicting_event_ids),
            "fragments_removed": self.compaction.fragments_removed if self.compaction else 0,
            "fragments_added": self.compaction.fragments_added if self.compaction else 0,
            "indexes_created": list(self.indexes.created) if self.indexes else [],
            "indexes_extended": list(self.indexes.extended) if self.indexes else [],
            "unindexed_rows": self.indexes.uncovered_rows if self.indexes else None,
            "versions_removed": self.versions.versions if self.versions else 0,
            "wal_entries_removed": collected.count("wal entry") if collected else 0,
            "sstables_removed": collected.count("sstable") if collected else 0,
            "leftovers_removed": collected.count("leftover") if collected else 0,
            "bytes_removed": (collected.bytes if collected else 0)
            + (self.versions.bytes if self.versions else 0),
            "failures": [f"{failure.part}: {failure.error}" for failure in self.failures],
            "duration_s": round(self.duration_s, 3),
        }


def maintain_once(
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    fsync: bool = True,
    skip_slots: Collection[str] = (),
    options: MaintenanceOptions | None = None,
    check_still_leader: Callable[[], None] = unchecked,
    rewriter: Rewriter | None = None,
    now: Clock = utc_now,
) -> MaintenanceReport:
    """Maintain a log once. Claims nothing; safe while the log is written and read.

    ``skip_slots``: shard names whose workers merge their own generations. ``rewriter`` does the
    rewriting of a compaction, by default this process. ``check_still_leader``
    is called before each commit and deletion; pass `MaintenanceLease.check_still_leader` where
    several may maintain. Raises LogNotFoundError, ConfigError, and what that check raises;
    everything else that goes wrong is in the report's ``failures``. On a log that a power loss
    left with rows cut off it does nothing but raise DamagedLogError; indexes are made anew.
    """
    open_log(uri, storage_options)
    started = time.perf_counter()
    storage = LogStorage(uri, storage_options, fsync=fsync)
    limits = options or MaintenanceOptions()
    report = MaintenanceReport()
    rebuilt: tuple[str, ...] = ()
    if lost_indexes(storage):
        # First: merges look rows up, and nothing is lost by what is made of whole rows
        with _part(report, "indexes"):
            rebuilt = rebuild_lost_indexes(storage, before_commit=check_still_leader)
    # What is committed on top of a version that is not whole makes its loss final
    check_base(storage)
    skipped = {layout.shard_uuid(slot) for slot in skip_slots}
    check = check_still_leader

    for shard in list_shards(storage):
        if shard not in skipped:
            with _part(report, f"merging shard {shard}"):
                _merge_shard(report, storage, shard, check)
    with _part(report, "compaction"):
        if is_compaction_due(storage, small_fragments=limits.small_fragments):
            report.compaction = (
                compact(storage, before_commit=check)
                if rewriter is None
                else compact_by(rewriter, storage, before_commit=check)
            )
    with _part(report, "indexes"):
        indexes = refresh_indexes(storage, before_commit=check)
        report.indexes = replace(indexes, created=(*rebuilt, *indexes.created))
    with _part(report, "old versions"):
        report.versions = cleanup_old_versions(
            storage, retention_s=limits.version_retention_s, before_commit=check
        )
    with _part(report, "collection"):
        report.collection = collect_garbage(
            storage,
            grace_s=limits.grace_s,
            wal_retention_s=limits.wal_retention_s,
            leftover_age_s=limits.leftover_age_s,
            now=now,
            before_removal=check,
        )
    report.pending_generations = _count_pending(storage)
    report.duration_s = time.perf_counter() - started
    return report


def finish_log(
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    fsync: bool = True,
    options: MaintenanceOptions | None = None,
    check_not_superseded: Callable[[], None] = unchecked,
    now: Clock = utc_now,
) -> MaintenanceReport:
    """Leave a log at the end of a run small, quick to read, and whole in its base table.

    For the driver, once its workers have closed their stores: shards that still have a WAL tail,
    since their worker was lost, are claimed and closed, which flushes them; then one pass of
    maintenance over all shards. ``check_not_superseded`` is called before anything is claimed.
    """
    check_not_superseded()
    flush_tails(uri, storage_options, fsync=fsync)
    return maintain_once(
        uri, storage_options=storage_options, fsync=fsync, options=options, now=now
    )


def maintain_until(
    stop: threading.Event,
    uri: str,
    lease: MaintenanceLease,
    *,
    interval_s: float,
    storage_options: Mapping[str, str] | None = None,
    fsync: bool = True,
    skip_slots: Collection[str] = (),
    options: MaintenanceOptions | None = None,
    rewriter: Rewriter | None = None,
    on_report: Callable[[MaintenanceReport], None],
) -> None:
    """Take part in the election, and make passes while elected, until ``stop`` is set.

    A lost lease makes it a candidate again. Raises what `maintain_once` raises otherwise.
    """
    while not stop.is_set():
        if not lease.try_acquire():
            stop.wait(lease.lease_s / 4)
            continue
        try:
            with lease.kept():
                while not stop.is_set():
                    report = maintain_once(
                        uri,
                        storage_options=storage_options,
                        fsync=fsync,
                        skip_slots=skip_slots,
                        options=options,
                        check_still_leader=lease.check_still_leader,
                        rewriter=rewriter,
                    )
                    on_report(report)
                    stop.wait(interval_s)
        except LeaseLostError:
            continue


@contextmanager
def _part(report: MaintenanceReport, name: str) -> Iterator[None]:
    try:
        yield
    except LeaseLostError:
        raise
    except DatagenError as error:
        report.failures.append(MaintenanceFailure(name, error))


def _merge_shard(
    report: MaintenanceReport, storage: LogStorage, shard: str, check: Callable[[], None]
) -> None:
    merger = ShardMerger(storage, shard, before_commit=check)
    try:
        generations = uncovered_bytes = 0
        while done := merger.run(at_most=1).generations:
            report.merged += done
            generations += 1
            uncovered_bytes += done[0].bytes
            if generations == _GENERATIONS_AN_INDEX or uncovered_bytes >= _BYTES_AN_INDEX:
                generations = uncovered_bytes = 0
                with _part(report, "indexes"):
                    refresh_indexes(storage, before_commit=check)
    finally:
        if merger.held_back:
            report.held_back[shard] = sorted(merger.held_back)


def _count_pending(storage: LogStorage) -> int:
    manifests = (read_latest_manifest(storage, shard) for shard in list_shards(storage))
    return sum(len(manifest.sstables) for manifest in manifests if manifest is not None)
