"""Putting right what a power loss left half-written in a log. Never done unasked.

A lost machine can leave files that were not synced yet cut off, or gone. None of them was relied
upon: an entry is acknowledged only after it was synced, a generation is drained only after the
commit that merged it was, and what an SSTable covers is collected only after the SSTable was. So
there is always a whole state to go back to, which holds every acknowledged event:

- the newest versions of the base table, if they list files that are cut off: set aside, so that
  the newest whole version counts. What they merged is merged again, what they compacted compacted.
- the newest manifests of a shard: set aside. A flush and the claim after it write two before the
  first is synced.
- an SSTable that a manifest lists: the next manifest goes without it and all later ones, and back
  to the generation and the position from which the WAL still holds their rows. If the base table
  has taken it in, it is drained instead.
- the newest WAL entry: set aside, and its place taken by one without rows.

Nothing is deleted: what is set aside is renamed to what no reader takes for an entry. Damage that
acknowledged rows may be lost by is not repaired but reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from datagen_ray.errors import (
    ConfigError,
    CorruptWalError,
    DamagedLogError,
    LogNotFoundError,
    StorageError,
)
from datagen_ray.store import layout
from datagen_ray.store.marks import merged_generations
from datagen_ray.store.shard import (
    ShardManifest,
    SsTable,
    list_shards,
    manifest_without,
    probe_wal,
    read_manifest,
    read_wal_tail,
    sentinel_entry,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import base_damage, sstable_damage

SET_ASIDE_SUFFIX = "#set-aside"

RepairKind = Literal["base version", "manifest", "sstable", "wal"]


@dataclass(frozen=True)
class Repair:
    """One file or folder that was, or with ``dry_run`` would be, set aside, and why.

    ``number``: its version, generation or position. ``shard_id`` is empty for the base table.
    """

    shard_id: str
    kind: RepairKind
    number: int
    path: str
    reason: str


def repair_log(storage: LogStorage, *, dry_run: bool = False) -> list[Repair]:
    """Repair a log on a local disk. No writer, reader or maintainer may be running.

    Raises DamagedLogError for damage that acknowledged rows may be lost by; then nothing of the
    base table, or of that shard, was changed.
    """
    _refuse_object_stores(storage)
    if not os.path.isdir(storage.path(layout.VERSIONS_FOLDER)):
        raise LogNotFoundError(f"there is no log at {storage.uri}; check the path")
    repairs = repair_base(storage, dry_run=dry_run)
    for shard in list_shards(storage):
        repairs.extend(repair_shard(storage, shard, dry_run=dry_run))
    return repairs


def repair_base(storage: LogStorage, *, dry_run: bool = False) -> list[Repair]:
    """Set aside the newest versions of the base table, as far as they list cut-off files."""
    _refuse_object_stores(storage)
    repairs: list[Repair] = []
    merged = _merged_in_newest_whole(storage, repairs)
    if repairs:
        _check_nothing_else_was_drained(storage, merged)
    if repairs and not dry_run:
        for repair in repairs:
            _rename(repair)
        storage.delete(f"{layout.VERSIONS_FOLDER}/{layout.BASE_HINT_NAME}")
        storage.sync_folder(layout.VERSIONS_FOLDER)
    return repairs


def repair_shard(storage: LogStorage, shard: str, *, dry_run: bool = False) -> list[Repair]:
    """Put right the newest manifest, the SSTables and the newest WAL entry of a shard."""
    _refuse_object_stores(storage)
    repairs: list[Repair] = []
    manifest = _newest_whole_manifest(storage, shard, repairs)
    if repairs:
        after = manifest.replay_after if manifest else 0
        _check_wal_was_not_collected(storage, shard, after)
        if manifest is None and read_wal_tail(storage, shard, after).entries:
            raise DamagedLogError(
                f"shard {shard} in {storage.uri} has rows in its WAL and no manifest that is "
                "whole: restore one"
            )
    if manifest is None:
        replaced = None
    else:
        replaced = _without_lost_tables(storage, manifest, repairs)
        replay_after = (replaced or manifest).replay_after
        repairs.extend(_cut_off_entries(storage, shard, replay_after))
        if replaced is not None:
            _check_wal_holds(storage, replaced, manifest, repairs)
    if not dry_run:
        _apply(storage, shard, repairs, replaced)
    return repairs


# -- the base table --------------------------------------------------------------------------------


def _merged_in_newest_whole(storage: LogStorage, repairs: list[Repair]) -> dict[str, int]:
    """The highest merged generation of each shard, as the newest whole version says.

    What is to be set aside to have that one count is added to ``repairs``.
    """
    names = {
        version: file.name
        for file in storage.list_files(layout.VERSIONS_FOLDER)
        if (version := layout.parse_version_name(file.name)) is not None
    }
    for version in sorted(names, reverse=True):
        key = f"{layout.VERSIONS_FOLDER}/{names[version]}"
        damage = base_damage(storage, version)
        if damage is None:
            return merged_generations(storage.get(key) or b"")
        repairs.append(Repair("", "base version", version, storage.path(key), damage[1]))
    raise DamagedLogError(
        f"no version of the base table of {storage.uri} is whole; restore its files"
    )


def _check_nothing_else_was_drained(storage: LogStorage, merged: dict[str, int]) -> None:
    """Refuse to go back to a version that lacks a generation which was drained already.

    A drain comes after the sync of the commit, so this is not what a power loss leaves.
    """
    for shard in list_shards(storage):
        drained = _highest_drained(storage, shard)
        if drained > merged.get(shard, 0):
            raise DamagedLogError(
                f"the newest version of the base table of {storage.uri} that is whole lacks "
                f"generation {drained} of shard {shard}, which was drained since: restore the "
                "files of the later versions"
            )


def _highest_drained(storage: LogStorage, shard: str) -> int:
    """The highest generation that some manifest listed and the newest does not; 0 if none."""
    listed: set[int] = set()
    newest: set[int] = set()
    for version in _manifest_versions(storage, shard):
        try:
            manifest = read_manifest(storage, shard, version)
        except DamagedLogError:
            continue  # repaired, or reported, when it is the shard's turn
        newest = {table.generation for table in manifest.sstables} if manifest else newest
        listed |= newest
    return max(listed - newest, default=0)


# -- shards ----------------------------------------------------------------------------------------


def _newest_whole_manifest(
    storage: LogStorage, shard: str, repairs: list[Repair]
) -> ShardManifest | None:
    for version in reversed(_manifest_versions(storage, shard)):
        try:
            return read_manifest(storage, shard, version)
        except DamagedLogError as error:
            path = storage.path(layout.manifest_key(shard, version))
            repairs.append(Repair(shard, "manifest", version, path, str(error)))
    return None


def _check_wal_was_not_collected(storage: LogStorage, shard: str, after: int) -> None:
    """Refuse to go back to a manifest whose tail has been collected.

    A collection comes after the sync of the manifest, so this is not what a power loss leaves. It
    keeps the entry at the later manifest's position, so that the tail of an earlier one has a hole.
    """
    files = storage.list_files(layout.wal_folder(shard))
    last = max((layout.parse_wal_name(file.name) or 0 for file in files), default=0)
    end = probe_wal(storage, shard, after)
    if end < last:
        raise DamagedLogError(
            f"the newest manifests of shard {shard} in {storage.uri} are damaged, and entry "
            f"{end + 1} of its WAL was collected on their strength: restore the manifests"
        )


def _manifest_versions(storage: LogStorage, shard: str) -> list[int]:
    names = (file.name for file in storage.list_files(layout.manifest_folder(shard)))
    return sorted(v for name in names if (v := layout.parse_manifest_name(name)))


def _without_lost_tables(
    storage: LogStorage, manifest: ShardManifest, repairs: list[Repair]
) -> ShardManifest | None:
    """The manifest to put in place of one that lists SSTables which are lost; None if none is."""
    shard = manifest.shard_id
    lost: list[SsTable] = []
    for table in manifest.sstables:
        damage = sstable_damage(storage, shard, table)
        if damage is not None:
            lost.append(table)
            path = storage.path(layout.sstable_key(shard, table.path))
            repairs.append(Repair(shard, "sstable", table.generation, path, damage))
    if not lost:
        return None
    merged = _merged_in_newest_whole(storage, []).get(shard, 0)
    unmerged = [table.generation for table in lost if table.generation > merged]
    if not unmerged:
        paths = {table.path for table in lost}
        after, generation = manifest.replay_after, manifest.current_generation
    else:
        generation = min(unmerged)
        later = [table for table in manifest.sstables if table.generation >= generation]
        paths = {table.path for table in (*lost, *later)}
        after = _covered_before(storage, manifest, {table.path for table in later})
    return manifest_without(manifest, paths, after, generation)


def _covered_before(storage: LogStorage, manifest: ShardManifest, paths: set[str]) -> int:
    """What SSTables held before the first of those in ``paths`` was written."""
    for version in range(manifest.version - 1, 0, -1):
        try:
            earlier = read_manifest(storage, manifest.shard_id, version)
        except DamagedLogError:
            continue  # an earlier one still replays too much rather than too little
        if earlier is not None and not paths & {table.path for table in earlier.sstables}:
            return earlier.replay_after
    return 0


def _check_wal_holds(
    storage: LogStorage, replaced: ShardManifest, manifest: ShardManifest, repairs: list[Repair]
) -> None:
    """Refuse unless the WAL has every entry that lost SSTables held."""
    shard = manifest.shard_id
    end = probe_wal(storage, shard, replaced.replay_after)
    cut_off = [repair.number for repair in repairs if repair.kind == "wal"]
    if end < manifest.replay_after or any(each <= manifest.replay_after for each in cut_off):
        missing = min([end + 1, *cut_off])
        raise DamagedLogError(
            f"an SSTable of shard {shard} in {storage.uri} is lost, and so is entry {missing} of "
            "its WAL, which held its rows: restore one of them"
        )


def _cut_off_entries(storage: LogStorage, shard: str, after: int) -> list[Repair]:
    repairs = []
    end = probe_wal(storage, shard, after)
    while after < end:
        try:
            read_wal_tail(storage, shard, after)
        except CorruptWalError as error:
            if not error.last:
                raise
            path = storage.path(layout.wal_key(shard, error.position))
            repairs.append(Repair(shard, "wal", error.position, path, str(error)))
            after = error.position
        else:
            break
    return repairs


def _apply(
    storage: LogStorage, shard: str, repairs: list[Repair], replaced: ShardManifest | None
) -> None:
    """Manifests first: with the tables still listed, a repair that is cut off begins again."""
    for repair in repairs:
        if repair.kind == "manifest":
            _rename(repair)
    if repairs:
        # A hint that names a version above a gap misleads; none at all is safe.
        storage.delete(layout.version_hint_key(shard))
        storage.sync_folder(layout.manifest_folder(shard))
    if replaced is not None:
        key = layout.manifest_key(shard, replaced.version)
        if not storage.put_if_absent(key, replaced.raw):
            raise StorageError(
                f"shard {shard} of {storage.uri} was changed while it was repaired; stop what "
                "writes to it, then repair again"
            )
    for repair in repairs:
        if repair.kind == "wal":
            _rename(repair)
            # Positions have no holes: a hole would hide the row-less entries of claims behind it,
            # which keep a fenced writer from acknowledging. The lowest epoch is right for any.
            storage.put_if_absent(layout.wal_key(shard, repair.number), sentinel_entry(1))
        elif repair.kind == "sstable" and os.path.isdir(repair.path):
            _rename(repair)


def _rename(repair: Repair) -> None:
    try:
        os.rename(repair.path, repair.path + SET_ASIDE_SUFFIX)
    except OSError as error:
        raise StorageError(f"cannot set {repair.path} aside: {error.strerror}") from error


def _refuse_object_stores(storage: LogStorage) -> None:
    if not storage.is_local:
        raise ConfigError(
            f"{storage.uri} is an object store, where every object is whole or absent; there is "
            "nothing to repair"
        )
