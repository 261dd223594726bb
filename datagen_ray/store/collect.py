"""Deleting what the log does not need any more.

What may go, and why it is safe. Every condition, once true, stays true, so a collector that was
stopped for a while and goes on with what it found out before does no harm.

*WAL entries* below both ``replay_after`` and ``last_seen``: SSTables hold them, and no claim
replays them. They go in ascending order. The entry at the lower of the two stays: a stalled
writer then still meets an occupied position behind it, and later entries leave no hole.

*SSTable folders* that the shard's manifest dropped or never listed, of a generation below the
current one, whose rows the base table holds. "Dropped" is read from a manifest that is itself
older than the grace time, so that every reader that may still use the folder is older than that.

*Leftovers of aborted uploads*, by their names and age.

Shard manifests stay for ever: one that is missing would let a stalled drainer write it anew, and
roll the shard back. Lease and run files stay too. Before anything goes, what takes its place is
synced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from datagen_ray.clock import Clock, utc_now
from datagen_ray.crashpoints import crash_point
from datagen_ray.store import layout
from datagen_ray.store.bounds import check_seconds
from datagen_ray.store.claim import sync_manifest
from datagen_ray.store.commits import CommitSync, unchecked
from datagen_ray.store.creation import open_log
from datagen_ray.store.lance_errors import LANCE_ERRORS, is_cut_off, is_vanished, translate
from datagen_ray.store.merge import missing_ids
from datagen_ray.store.shard import (
    ShardManifest,
    list_shards,
    read_latest_manifest,
    read_manifest,
)
from datagen_ray.store.sstable import open_sstable
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import check_sstables

GRACE_S = 3600.0
"""How long an SSTable stays after it was drained; reads that began before must be done by then."""
WAL_RETENTION_S = 600.0
"""How long a WAL entry stays at least, covered or not."""
LEFTOVER_AGE_S = 24 * 3600.0
"""How old an unfinished upload must be before nobody can be at work on it."""

RemovedKind = Literal["wal entry", "sstable", "leftover"]

# "<name>#<number>": object_store's staged uploads, and our own
_LEFTOVER = re.compile(r".+#\d+(-\d+)?|\.tmp.*|.+\.tmp(\..*)?")
_LEFTOVER_FOLDERS = ("data", "_versions", "_transactions", "_indices", "_deletions")


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or would be: its key in the log (or beside it), and why."""

    kind: RemovedKind
    key: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class CollectionReport:
    """What a collection removed (``dry_run``: would have removed), and what it left and why."""

    removed: tuple[Removal, ...]
    kept: tuple[Removal, ...]
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removed)

    def count(self, kind: RemovedKind) -> int:
        return sum(removal.kind == kind for removal in self.removed)


def collect_garbage(
    storage: LogStorage,
    *,
    dry_run: bool = False,
    grace_s: float = GRACE_S,
    wal_retention_s: float = WAL_RETENTION_S,
    leftover_age_s: float = LEFTOVER_AGE_S,
    now: Clock = utc_now,
    before_removal: Callable[[], None] = unchecked,
) -> CollectionReport:
    """Delete covered WAL entries, drained SSTables and leftovers of a log.

    Ages are taken between the storage's file times and ``now``. ``before_removal`` is called
    before each group of deletions, and stops the collection by raising. A collection that is
    killed half-way is finished by the next one.
    """
    check_seconds("grace_s", grace_s)
    check_seconds("wal_retention_s", wal_retention_s)
    check_seconds("leftover_age_s", leftover_age_s)
    collector = _Collector(
        storage,
        dry_run,
        grace_s,
        wal_retention_s,
        leftover_age_s,
        now().timestamp(),
        before_removal,
    )
    for shard in list_shards(storage):
        collector.collect_shard(shard)
    collector.collect_leftovers()
    return CollectionReport(tuple(collector.removed), tuple(collector.kept), dry_run)


class _Collector:
    def __init__(
        self,
        storage: LogStorage,
        dry_run: bool,
        grace_s: float,
        wal_retention_s: float,
        leftover_age_s: float,
        now_s: float,
        before_removal: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._dry_run = dry_run
        self._grace_s = grace_s
        self._wal_retention_s = wal_retention_s
        self._leftover_age_s = leftover_age_s
        self._now_s = now_s
        self._before_removal = before_removal
        self._base: Any = None
        self.removed: list[Removal] = []
        self.kept: list[Removal] = []

    def collect_shard(self, shard: str) -> None:
        manifest = read_latest_manifest(self._storage, shard)
        if manifest is None:
            return
        entries = list(self._covered_entries(manifest))
        tables = list(self._dropped_tables(manifest))
        if not entries and not tables:
            return
        if not self._dry_run:
            check_sstables(self._storage, shard)
            self._before_removal()
            self._sync_what_covers(manifest)
        crash_point("before_wal_removal")
        for removal in entries:
            self._remove_file(removal)
            crash_point("after_wal_removal")
        for removal in tables:
            crash_point("before_sstable_removal")
            if not self._dry_run:
                self._storage.delete_folder(removal.key)
            self.removed.append(removal)
            crash_point("after_sstable_removal")

    def collect_leftovers(self) -> None:
        folders = list(_LEFTOVER_FOLDERS)
        for shard in list_shards(self._storage):
            folders += [layout.manifest_folder(shard), layout.wal_folder(shard)]
        for folder in folders:
            for file in self._storage.list_files(folder):
                age_s = self._now_s - file.modified_s
                if _LEFTOVER.fullmatch(file.name) and age_s >= self._leftover_age_s:
                    reason = f"an upload that was not finished in {_duration(age_s)}"
                    self._remove_file(
                        Removal("leftover", f"{folder}/{file.name}", file.size, reason)
                    )

    def _covered_entries(self, manifest: ShardManifest) -> Iterator[Removal]:
        """WAL entries that may go, ascending; none behind one that must stay."""
        shard = manifest.shard_id
        last_kept = min(manifest.replay_after, manifest.last_seen)
        found = (
            (position, file)
            for file in self._storage.list_files(layout.wal_folder(shard))
            if (position := layout.parse_wal_name(file.name)) is not None
        )
        for position, file in sorted(found, key=lambda pair: pair[0]):
            if position >= last_kept:
                return
            if self._now_s - file.modified_s < self._wal_retention_s:
                return
            reason = f"SSTables hold what the WAL had up to entry {manifest.replay_after}"
            yield Removal("wal entry", layout.wal_key(shard, position), file.size, reason)

    def _dropped_tables(self, manifest: ShardManifest) -> Iterator[Removal]:
        shard = manifest.shard_id
        listed = {table.path for table in manifest.sstables}
        names = self._storage.list_folders(layout.shard_folder(shard))
        unlisted = [
            (generation, name)
            for name in names
            if (generation := layout.parse_sstable_name(name)) is not None and name not in listed
        ]
        if not unlisted:
            return
        earlier = self._manifest_older_than_grace(manifest)
        for generation, name in sorted(unlisted):
            key = layout.sstable_key(shard, name)
            removal = Removal("sstable", key, _size(self._storage, key), "")
            kept_for = self._why_kept(earlier, generation, name, key)
            if kept_for is not None:
                self.kept.append(Removal("sstable", key, removal.bytes, kept_for))
                continue
            reason = "drained, and its rows are in the base table"
            yield Removal("sstable", key, removal.bytes, reason)

    def _why_kept(
        self, earlier: ShardManifest | None, generation: int, name: str, key: str
    ) -> str | None:
        if earlier is None or generation >= earlier.current_generation:
            return "it may be being written, or was until a moment ago"
        if any(table.path == name for table in earlier.sstables):
            return "it was drained a moment ago, so a reader may be at it"
        missing = self._missing_rows(key)
        if missing:
            return f"{missing} of its rows are not in the base table"
        return None

    def _manifest_older_than_grace(self, latest: ShardManifest) -> ShardManifest | None:
        """The newest manifest that has been there for the grace time."""
        versions = [
            version
            for file in self._storage.list_files(layout.manifest_folder(latest.shard_id))
            if self._now_s - file.modified_s >= self._grace_s
            and (version := layout.parse_manifest_name(file.name)) is not None
            and version <= latest.version
        ]
        if not versions:
            return None
        return read_manifest(self._storage, latest.shard_id, max(versions))

    def _missing_rows(self, key: str) -> int:
        """How many rows of an SSTable the base table lacks; 0 for a folder that holds no table."""
        if self._base is None:
            self._base = open_log(self._storage.uri, self._storage.storage_options or None)
        try:
            table = open_sstable(self._storage, key)
            ids = table.scanner(columns=["event_id"], batch_size=16_384).to_reader()
            return len(missing_ids(self._base, ids))
        except LANCE_ERRORS as error:
            # A flush that was cut off, or a removal that was, leaves a folder that is no table.
            # No manifest ever listed the former, and the latter was looked at before.
            if is_vanished(error) or (is_cut_off(error) and not self._was_listed(key)):
                return 0
            raise translate(error, f"reading {key} of {self._storage.uri}") from error

    def _was_listed(self, key: str) -> bool:
        """Whether a manifest of its shard ever listed an SSTable, by its key."""
        _, shard, name = key.split("/")
        versions = (
            version
            for file in self._storage.list_files(layout.manifest_folder(shard))
            if (version := layout.parse_manifest_name(file.name)) is not None
        )
        manifests = (read_manifest(self._storage, shard, version) for version in versions)
        return any(table.path == name for each in manifests if each for table in each.sstables)

    def _sync_what_covers(self, manifest: ShardManifest) -> None:
        sync_manifest(self._storage, manifest.shard_id, manifest, since=None)
        with CommitSync(self._storage) as base:
            base.sync()

    def _remove_file(self, removal: Removal) -> None:
        if not self._dry_run:
            self._storage.delete(removal.key)
        self.removed.append(removal)


def _size(storage: LogStorage, folder: str) -> int:
    files = sum(file.size for file in storage.list_files(folder))
    return files + sum(_size(storage, f"{folder}/{name}") for name in storage.list_folders(folder))


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} h" if hours >= 1 else f"{seconds:.0f} s"
