"""Setting aside what a power loss left half-written in a shard. Never done unasked.

A lost machine can leave the newest WAL entry or the newest shard manifest of a local shard cut
off, and then nobody can claim the shard. Neither was ever relied upon: an entry is acknowledged
only after it was synced, and so is what rests on a manifest. They are renamed, not deleted, to
a name that no reader takes for an entry. Damage anywhere else is not repaired but reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from datagen_ray.errors import ConfigError, CorruptWalError, DamagedLogError, StorageError
from datagen_ray.store import layout
from datagen_ray.store.shard import (
    list_shards,
    probe_wal,
    read_manifest,
    read_wal_tail,
    sentinel_entry,
)
from datagen_ray.store.storage import LogStorage

SET_ASIDE_SUFFIX = "#set-aside"


@dataclass(frozen=True)
class Repair:
    """One file that was, or with ``dry_run`` would be, set aside, and why."""

    shard_id: str
    kind: Literal["manifest", "wal"]
    number: int
    path: str
    reason: str


def repair_log(storage: LogStorage, *, dry_run: bool = False) -> list[Repair]:
    """Repair every shard of a log on a local disk. No writer may be running.

    Raises DamagedLogError for damage that acknowledged rows may be lost by.
    """
    repairs: list[Repair] = []
    for shard in list_shards(storage):
        repairs.extend(repair_shard(storage, shard, dry_run=dry_run))
    return repairs


def repair_shard(storage: LogStorage, shard: str, *, dry_run: bool = False) -> list[Repair]:
    """Set aside the newest manifest and WAL entry of a shard, if they are cut off.

    The place of a WAL entry is taken by one without rows, so that positions keep no hole.
    """
    if not storage.is_local:
        raise ConfigError(
            f"{storage.uri} is an object store, where every object is whole or absent; there is "
            "nothing to repair"
        )
    repairs: list[Repair] = []
    version, replay_after = _newest_whole_manifest(storage, shard, repairs)
    if version:
        repairs.extend(_cut_off_entries(storage, shard, replay_after))
    if not dry_run:
        for repair in repairs:
            _set_aside(storage, repair)
    return repairs


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


def _newest_whole_manifest(
    storage: LogStorage, shard: str, repairs: list[Repair]
) -> tuple[int, int]:
    """The newest manifest that decodes, as (version, replay_after); (0, 0) when there is none."""
    names = (file.name for file in storage.list_files(layout.manifest_folder(shard)))
    versions = sorted(v for name in names if (v := layout.parse_manifest_name(name)))
    for version in reversed(versions):
        try:
            manifest = read_manifest(storage, shard, version)
        except DamagedLogError as error:
            if repairs:
                raise  # a second one was followed by a claim, so it was whole once
            path = storage.path(layout.manifest_key(shard, version))
            repairs.append(Repair(shard, "manifest", version, path, str(error)))
        else:
            return version, manifest.replay_after if manifest else 0
    return 0, 0


def _set_aside(storage: LogStorage, repair: Repair) -> None:
    try:
        os.rename(repair.path, repair.path + SET_ASIDE_SUFFIX)
    except OSError as error:
        raise StorageError(f"cannot set {repair.path} aside: {error.strerror}") from error
    if repair.kind == "manifest":
        # A hint that names a version above a gap misleads; none at all is safe.
        storage.delete(layout.version_hint_key(repair.shard_id))
        storage.sync_folder(layout.manifest_folder(repair.shard_id))
    else:
        # Positions have no holes: a hole would hide the row-less entries of claims behind it,
        # which keep a fenced writer from acknowledging. The lowest epoch is right for any.
        key = layout.wal_key(repair.shard_id, repair.number)
        storage.put_if_absent(key, sentinel_entry(1))
