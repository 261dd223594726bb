"""Taking a shard over: the claim that fences its former writer, made durable.

A claim writes a shard manifest with the next epoch, replays the WAL tail into a MemTable and
puts a row-less entry behind it. From then on whoever held the shard acknowledges nothing. On a
local disk nothing of this is synced by Lance, so before the first acknowledgement everything
that the acknowledged rows rest on is: the manifest, the tail, the SSTables that the manifest
lists, and the folders above them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from datagen_ray.crashpoints import crash_point
from datagen_ray.errors import (
    InternalError,
    LogNotFoundError,
    StorageError,
    WriterFencedError,
)
from datagen_ray.store import layout
from datagen_ray.store.creation import MemTableLimits, create_log, memtable_limits, open_log
from datagen_ray.store.lance_errors import LANCE_ERRORS, is_tail_too_long, translate
from datagen_ray.store.shard import (
    ShardManifest,
    find_hole,
    list_shards,
    probe_wal,
    read_latest_manifest,
    read_wal_tail,
    sentinel_entry,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import check_base, check_sstables

WAL_FLUSH_INTERVAL_MS = 2
"""How long Lance may sit on a put; grouping is done before the put.

Lance's clock for it ticks as often, also while nothing is written: an open writer takes 5.7 % of a
core at one millisecond and 3.5 % at two, where a put still waits for no tick, since the sync after
it takes as long. From three on the slowest tenth of the puts waits.
"""

_PARALLEL_CLAIMS = 8
_CLAIMING: dict[tuple[str, str], threading.Lock] = {}

_UNENCODED = "".join(
    character for character in map(chr, range(0x20, 0x7F)) if character not in '\\{^}%`]">[~<#|*?'
)
"""What stays as it is when the object_store crate makes a key of a path."""


@dataclass(frozen=True)
class ShardClaim:
    """A shard that this process holds: Lance's writer, our epoch and where the WAL ends."""

    shard_id: str
    epoch: int
    manifest: ShardManifest
    last_position: int
    max_rows: int
    writer: Any

    def close(self) -> None:
        """Flush what is in memory into an SSTable and let the shard go.

        Raises WriterFencedError when another writer has claimed it meanwhile.
        """
        close_writer(self.writer, self.shard_id)


@dataclass(frozen=True)
class ClosedClaim:
    """A shard that was claimed and let go: whoever held it before can write nothing more."""

    shard_id: str
    epoch: int


def claim_shard(
    uri: str,
    shard: str,
    storage: LogStorage,
    storage_options: Mapping[str, str] | None = None,
    *,
    own_epochs: range | None = None,
) -> ShardClaim:
    """Claim a shard and make the claim durable.

    ``own_epochs``: the epochs that can be this process's own, when it reopens its own shard.
    Raises WriterFencedError if anybody else claimed at the same time (or since those epochs):
    then the caller must not try again; DamagedLogError if the log lists files that are cut off.
    """
    # One after the other in this process: of two that claim at once, each takes itself for the
    # loser, and nobody has the shard.
    with _CLAIMING.setdefault((uri, shard), threading.Lock()):
        return _claim_shard(uri, shard, storage, storage_options, own_epochs)


def _claim_shard(
    uri: str,
    shard: str,
    storage: LogStorage,
    storage_options: Mapping[str, str] | None,
    own_epochs: range | None,
) -> ShardClaim:
    dataset = open_log(uri, storage_options)
    check_base(storage)
    check_sstables(storage, shard)
    if dataset.mem_wal_index_details() is None:
        # a creator that died between its two steps; nobody can have written yet
        dataset = create_log(uri, storage_options, fsync=storage.fsync)
    limits = memtable_limits(dataset)
    known = read_latest_manifest(storage, shard)
    before = _epoch(known)
    if own_epochs is not None and before not in own_epochs:
        raise _fenced(shard, uri)
    _check_no_hole(storage, shard, known)
    doing = f"claiming shard {shard} of {uri}"
    try:
        writer = _open_writer(dataset, shard, limits)
    except LANCE_ERRORS as error:
        if not is_tail_too_long(error):
            failure = translate(error, doing)
            if type(failure) is StorageError:
                _look_for_damage(storage, shard)
            raise failure from error
        before = _shorten_tail(uri, dataset, shard, storage, limits, own_epochs is None)
        try:
            writer = _open_writer(dataset, shard, limits)
        except LANCE_ERRORS as second:
            raise translate(second, doing) from second
    crash_point("after_claim")
    manifest = _claimed(storage, shard, uri, before)
    if before and own_epochs is None:
        writer, manifest = _whole(uri, shard, storage, writer, manifest, limits)
    last_position = probe_wal(storage, shard, manifest.replay_after)
    if storage.fsync:
        sync_shard(storage, shard, manifest, last_position, since=known)
    crash_point("after_claim_sync")
    return ShardClaim(shard, manifest.writer_epoch, manifest, last_position, limits.rows, writer)


def _check_no_hole(storage: LogStorage, shard: str, known: ShardManifest | None) -> None:
    hole = find_hole(storage, shard, known.replay_after if known else 0)
    if hole is None:
        return
    newer = read_latest_manifest(storage, shard, known=known)
    if newer is None or newer.replay_after < hole.position:
        raise hole
    # else it was flushed and collected meanwhile


def remove_stray_folders(storage: LogStorage, shard: str) -> None:
    """Remove the empty folders that Lance makes under the percent-encoded path (pylance 14).

    It takes a local path for an object key when it makes the folders of a shard, so a log in
    ``a#b`` gets a twin in ``a%23b`` in which nothing is ever written.
    """
    if not storage.is_local:
        return
    for folder in map(storage.path, (layout.manifest_folder(shard), layout.wal_folder(shard))):
        twin = quote(folder, safe=_UNENCODED).replace("~", "%7E")  # which quote never encodes
        if twin != folder and os.path.isdir(twin):
            with contextlib.suppress(OSError):  # it holds something, so it is no twin
                os.removedirs(twin)


def _claimed(storage: LogStorage, shard: str, uri: str, before: int) -> ShardManifest:
    """The manifest of the claim that was just made.

    Lance does not tell which epoch it took. Ours is above the one before, so it is known only when
    nobody else claimed in between; if somebody did, assume that we are the loser.
    """
    manifest = read_latest_manifest(storage, shard)
    if manifest is None or manifest.writer_epoch != before + 1:
        raise _fenced(shard, uri)
    return manifest


def _whole(
    uri: str,
    shard: str,
    storage: LogStorage,
    writer: Any,
    manifest: ShardManifest,
    limits: MemTableLimits,
) -> tuple[Any, ShardManifest]:
    """A writer that has all rows of the tail in memory, where nothing more can follow them.

    The one given, or, when it misses rows that landed while it was opened, a second claim.
    """
    _end_tail(storage, shard, manifest)
    if not _misses_rows(writer, storage, manifest):
        return writer, manifest
    # Dropped and not closed: a close would flush, and say that the tail is in the SSTable.
    del writer
    try:
        writer = _open_writer(open_log(uri, storage.storage_options or None), shard, limits)
    except LANCE_ERRORS as error:
        raise translate(error, f"claiming shard {shard} of {uri} once more") from error
    return writer, _claimed(storage, shard, uri, manifest.writer_epoch)


def _end_tail(storage: LogStorage, shard: str, manifest: ShardManifest) -> None:
    """Take the position behind the tail, so that nothing of the former owner can follow.

    A put of theirs that had passed Lance's own check when we claimed may still land (pylance 14),
    behind what the claim has replayed. It is acknowledged to nobody, but whoever reads the shard
    sees it and builds on it, and our next flush would drop it.
    """
    position = manifest.replay_after
    while True:
        position = probe_wal(storage, shard, position)
        key = layout.wal_key(shard, position + 1)
        if storage.put_if_absent(key, sentinel_entry(manifest.writer_epoch)):
            return


def _misses_rows(writer: Any, storage: LogStorage, manifest: ShardManifest) -> bool:
    """Whether the tail has rows that the claim did not replay.

    Also true of an entry that an SSTable holds already (see `flush_tails`); claiming once more does
    no harm then.
    """
    tail = read_wal_tail(storage, manifest.shard_id, manifest.replay_after)
    rows = sum(entry.rows.num_rows for entry in tail.entries)
    replayed = int(writer.memtable_stats()["row_count"])
    return bool(rows > replayed)


def claim_all_shards(
    uri: str, storage_options: Mapping[str, str] | None = None, *, fsync: bool = True
) -> list[ClosedClaim]:
    """Claim and close every shard in a log: leftovers of earlier runs can write nothing more.

    Also flushes every WAL tail. A log without shards gives an empty list.
    """
    storage = LogStorage(uri, storage_options, fsync=fsync)
    return _claim_and_close(uri, list_shards(storage), storage, storage_options)


def flush_tails(
    uri: str, storage_options: Mapping[str, str] | None = None, *, fsync: bool = True
) -> list[ClosedClaim]:
    """Claim and close the shards whose WAL tail has rows, so that SSTables hold all there is.

    A generation that is full with its last entry is flushed with a position one too low (pylance
    14): that entry stays in the tail though an SSTable holds its rows, a claim does not replay
    it, and its rows stand twice until the next flush. Readers drop such copies.
    """
    storage = LogStorage(uri, storage_options, fsync=fsync)
    shards = [shard for shard in list_shards(storage) if _has_tail(storage, shard)]
    return _claim_and_close(uri, shards, storage, storage_options)


def _has_tail(storage: LogStorage, shard: str) -> bool:
    manifest = read_latest_manifest(storage, shard)
    return manifest is not None and bool(
        read_wal_tail(storage, shard, manifest.replay_after).entries
    )


def _claim_and_close(
    uri: str,
    shards: Sequence[str],
    storage: LogStorage,
    storage_options: Mapping[str, str] | None,
) -> list[ClosedClaim]:
    def claim_and_close(shard: str) -> ClosedClaim:
        claim = claim_shard(uri, shard, storage, storage_options)
        claim.close()
        manifest = read_latest_manifest(storage, shard, known=claim.manifest)
        if manifest is None:
            raise InternalError(f"the manifest of shard {shard} of {uri} vanished after a claim")
        if storage.fsync:
            sync_manifest(storage, shard, manifest, since=claim.manifest)
        remove_stray_folders(storage, shard)
        return ClosedClaim(shard, claim.epoch)

    if not shards:
        return []
    with ThreadPoolExecutor(min(_PARALLEL_CLAIMS, len(shards))) as pool:
        return list(pool.map(claim_and_close, shards))


def close_writer(writer: Any, shard: str) -> None:
    try:
        writer.close()
    except LANCE_ERRORS as error:
        raise translate(error, f"closing shard {shard}") from error


def sync_shard(
    storage: LogStorage,
    shard: str,
    manifest: ShardManifest,
    last_position: int,
    *,
    since: ShardManifest | None = None,
) -> None:
    """Make a whole shard durable as far as its manifest and WAL tail reach, and its folders.

    ``since``: a manifest behind which every one is synced, not only the newest.
    """
    for position in range(manifest.replay_after + 1, last_position + 1):
        storage.sync_file(layout.wal_key(shard, position))
    if storage.exists(layout.wal_folder(shard)):
        storage.sync_folder(layout.wal_folder(shard))
    sync_manifest(storage, shard, manifest, since=None)
    for version in range(since.version if since else 1, manifest.version):
        storage.sync_file(layout.manifest_key(shard, version))
    storage.sync_ancestors(layout.shard_folder(shard))


def sync_manifest(
    storage: LogStorage, shard: str, manifest: ShardManifest, *, since: ShardManifest | None
) -> None:
    """Make a manifest durable, and before it the SSTables that an earlier one did not list."""
    known = {table.path for table in since.sstables} if since else frozenset()
    for table in manifest.sstables:
        if table.path not in known:
            storage.sync_tree(layout.sstable_key(shard, table.path))
    storage.sync_folder(layout.shard_folder(shard))
    first = since.version + 1 if since else manifest.version
    for version in range(first, manifest.version + 1):
        storage.sync_file(layout.manifest_key(shard, version))
    storage.sync_folder(layout.manifest_folder(shard))


def _open_writer(dataset: Any, shard: str, limits: MemTableLimits) -> Any:
    return dataset.mem_wal_writer(
        shard,
        max_wal_flush_interval_ms=WAL_FLUSH_INTERVAL_MS,
        stats_log_interval_ms=0,
        max_memtable_rows=limits.rows,
        max_memtable_batches=limits.batches,
        max_memtable_size=limits.size_bytes,
    )


def _shorten_tail(
    uri: str,
    dataset: Any,
    shard: str,
    storage: LogStorage,
    limits: MemTableLimits,
    of_another: bool,
) -> int:
    """Flush a tail that was written under larger limits; return the epoch that this took.

    ``of_another``: whoever wrote it may still have a put under way.
    """
    manifest = read_latest_manifest(storage, shard)
    if manifest is None:
        raise LogNotFoundError(f"shard {shard} of {storage.uri} has vanished; check the path")
    tail = read_wal_tail(storage, shard, manifest.replay_after)
    rows = sum(entry.rows.num_rows for entry in tail.entries)
    larger = MemTableLimits(
        # Twice: there is room for what may land meanwhile.
        rows=max(2 * rows, limits.rows),
        batches=max(2 * len(tail.entries), limits.batches),
        size_bytes=limits.size_bytes,
    )
    try:
        writer = _open_writer(dataset, shard, larger)
    except LANCE_ERRORS as error:
        doing = f"claiming shard {shard} of {storage.uri} with its long tail"
        raise translate(error, doing) from error
    claimed = _claimed(storage, shard, uri, manifest.writer_epoch)
    if of_another:
        writer, claimed = _whole(uri, shard, storage, writer, claimed, larger)
    close_writer(writer, shard)
    return claimed.writer_epoch


def _look_for_damage(storage: LogStorage, shard: str) -> None:
    """Raise CorruptWalError or DamagedLogError, which name the cure, if that is why we failed."""
    manifest = read_latest_manifest(storage, shard)
    if manifest is not None:
        read_wal_tail(storage, shard, manifest.replay_after)


def _epoch(manifest: ShardManifest | None) -> int:
    return manifest.writer_epoch if manifest else 0


def _fenced(shard: str, uri: str) -> WriterFencedError:
    return WriterFencedError(
        f"another writer claimed shard {shard} of {uri} at the same time; this one stops, "
        "start it again only if the other is gone"
    )
