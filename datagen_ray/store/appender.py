"""Making one batch at a time a durable WAL entry of a shard. Used by one thread.

An entry's life, in this order:

1. Register its rows, so that a retry is recognised.
2. Put it. From here on its outcome is open until step 4 has said so.
3. On a local disk: fsync the new WAL file and its folder.
4. Look for a newer shard manifest, *after* the put. One with another epoch means that another
   writer took the shard over, perhaps before our put, so nothing of the entry is acknowledged.

Lance tells of two failures. *Fenced*: another writer claimed the shard; this one stops for good.
*Poisoned*: the storage failed, and Lance refuses further puts; the shard is claimed anew, what
was left is flushed, and the same rows are put again in the same order.

Every call of the system gives Python's lock away, and a busy event loop returns it only after a
switch interval. So there are few of them between a put and its acknowledgement.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

import pyarrow as pa
from pyarrow.fs import FileType, LocalFileSystem

from datagen_ray.crashpoints import crash_point
from datagen_ray.errors import (
    DatagenError,
    InternalError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.store import layout
from datagen_ray.store.claim import (
    ShardClaim,
    claim_shard,
    close_writer,
    remove_stray_folders,
    sync_manifest,
)
from datagen_ray.store.lance_errors import LANCE_ERRORS, translate
from datagen_ray.store.registry import Entry, UnflushedRows
from datagen_ray.store.shard import (
    ShardManifest,
    read_latest_manifest,
    read_manifest,
    read_wal_tail,
)
from datagen_ray.store.storage import LogStorage

_LOCAL_FILES = LocalFileSystem()


class WalAppender:
    """Appends batches to a shard that this process has claimed.

    ``before_reopen`` is called before the shard is claimed again; what it raises ends the
    appender. ``pause`` waits between attempts, and ends the waiting when it is set.
    """

    def __init__(
        self,
        uri: str,
        slot: str,
        claim: ShardClaim,
        storage: LogStorage,
        *,
        storage_options: Mapping[str, str] | None,
        reopen_attempts: int,
        reopen_pause_s: float,
        before_reopen: Callable[[], None] | None,
        pause: threading.Event,
    ) -> None:
        self.uri = uri
        self.slot = slot
        self.shard_id = claim.shard_id
        self.registry = UnflushedRows()
        self.entries = 0
        self.reopens = 0
        self._storage = storage
        self._storage_options = storage_options
        self._reopen_attempts = reopen_attempts
        self._reopen_pause_s = reopen_pause_s
        self._before_reopen = before_reopen
        self._pause = pause
        self._unacknowledged: list[Entry] = []
        self._unclear_claims = 0
        self._wal_folder: int | None = None
        self._synced_file: int | None = None
        self._writer = claim.writer
        self._position = claim.last_position
        self._manifest: ShardManifest = claim.manifest
        self.epoch = claim.epoch
        self.max_rows = claim.max_rows

    @property
    def where(self) -> str:
        return f"slot {self.slot!r} (shard {self.shard_id}) of {self.uri}"

    @property
    def manifest(self) -> ShardManifest:
        """The shard's newest manifest as far as this appender has followed it."""
        return self._manifest

    def append(self, batch: pa.RecordBatch, event_ids: list[str]) -> None:
        """Make rows durable as one WAL entry, reopening the shard when the storage fails.

        The ids must be new to the registry. Raises WriterFencedError, WriterPoisonedError (the
        rows are kept and put again by `resume`), or InternalError when Lance refused the rows as
        such, in which case nothing was written and the appender lives on.
        """
        entry = self.registry.add(batch, event_ids)
        self._unacknowledged.append(entry)
        try:
            self._put(entry)
        except InternalError:
            self._unacknowledged.remove(entry)
            self.registry.forget(entry)
            raise
        except (WriterPoisonedError, StorageError) as error:
            self._recover(error)
        self._unacknowledged.clear()

    def resume(self, cause: DatagenError) -> None:
        """Claim the shard again after WriterPoisonedError, and put what was left unacknowledged."""
        self._recover(cause)
        self._unacknowledged.clear()

    def reseal(self) -> None:
        """Flush everything into an SSTable and claim the shard again."""
        self.seal()
        self._adopt(self._claim_own(range(self.epoch, self.epoch + 1)))

    def seal(self) -> None:
        """Flush everything into an SSTable and close Lance's writer."""
        crash_point("before_flush")
        close_writer(self._writer, self.shard_id)
        self.follow_manifest()
        crash_point("after_flush")

    def release(self) -> None:
        """Give back what the appender holds open; the shard itself is not touched."""
        self._close_synced_file()
        if self._wal_folder is not None:
            os.close(self._wal_folder)
            self._wal_folder = None
        remove_stray_folders(self._storage, self.shard_id)

    def _close_synced_file(self) -> None:
        if self._synced_file is not None:
            os.close(self._synced_file)
            self._synced_file = None

    def is_flushing(self) -> bool:
        """Whether Lance is writing an SSTable in the background."""
        return bool(self._writer.memtable_stats()["frozen_count"])

    def flush_failures(self) -> int:
        """How many times such a flush has failed since the claim. It is retried by Lance."""
        return int(self._writer.stats()["memtable_flush_failures"])

    def _put(self, entry: Entry) -> None:
        self._close_synced_file()
        self._check_still_there()
        crash_point("before_put")
        try:
            self._writer.put(entry.batch)
        except LANCE_ERRORS as error:
            raise translate(error, f"appending to {self.where}") from error
        crash_point("after_put")
        self.entries += 1
        if self._storage.local_root is None:
            self._position += 1
            entry.position = self._position
            crash_point("after_fsync")
            self.follow_manifest()
        else:
            self._settle_position(entry)

    def _check_still_there(self) -> None:
        """Make sure that the log was not moved or deleted under this writer.

        Lance makes missing folders anew, so a put would succeed into a log that nobody reads.
        """
        path = self._manifest_path
        if self._storage.local_root is None or os.path.exists(path(self._manifest.version)):
            return
        raise self._gone()

    def _gone(self) -> StorageError:
        return StorageError(
            f"{self.where} is gone from its place; put the folder of the log back, then reopen"
        )

    def _settle_position(self, entry: Entry) -> None:
        """Find where the put went, since Lance does not tell, and make it durable.

        Then look, all at once, whether the log is still in its place, whether another manifest
        was written, and whether one more entry follows.
        """
        position = self._position
        follows = True
        while follows:
            position += 1
            self._sync_entry(position)
            crash_point("after_fsync")
            still_there, is_newer, follows = self._exist(
                self._manifest_path(self._manifest.version),
                self._manifest_path(self._manifest.version + 1),
                self._wal_path(position + 1),
            )
        self._position = entry.position = position
        if not still_there:
            raise self._gone()
        if is_newer:
            self.follow_manifest()

    def _sync_entry(self, position: int) -> None:
        path = self._wal_path(position)
        if not self._storage.fsync and os.path.exists(path):
            return
        try:
            self._close_synced_file()
            # Closed only before the next put: that, too, is a call that callers would wait for.
            self._synced_file = os.open(path, os.O_RDONLY)
            os.fsync(self._synced_file)
            self._sync_wal_folder()
        except FileNotFoundError as error:
            raise WriterPoisonedError(
                f"a put to {self.where} left no WAL entry {position}; reopen the writer"
            ) from error
        except OSError as error:
            # A second fsync can report success for data that is gone, so the entry is given up
            # and its rows are put again elsewhere.
            raise WriterPoisonedError(
                f"the newest WAL entry of {self.where} could not be synced ({error.strerror}); "
                "check the disk, then reopen the writer"
            ) from error

    def _exist(self, *paths: str) -> list[bool]:
        """Which of the local paths are there, asked with one call."""
        try:
            found = _LOCAL_FILES.get_file_info(list(paths))
        except OSError as error:
            raise StorageError(
                f"cannot look at the files of {self.where}: {error}; check its permissions"
            ) from error
        return [info.type is not FileType.NotFound for info in found]

    def _sync_wal_folder(self) -> None:
        if self._wal_folder is None:
            folder = self._storage.path(layout.wal_folder(self.shard_id))
            self._wal_folder = os.open(folder, os.O_RDONLY)
            # the first entry of a shard makes the folder, whose own name must last too
            self._storage.sync_folder(layout.shard_folder(self.shard_id))
        os.fsync(self._wal_folder)

    def follow_manifest(self) -> None:
        """Follow the shard's manifest; raise WriterFencedError when its epoch is not ours."""
        while (newer := self._next_manifest()) is not None:
            if newer.writer_epoch != self.epoch:
                raise WriterFencedError(
                    f"another writer claimed {self.where} (epoch {newer.writer_epoch}, ours is "
                    f"{self.epoch}); what was not acknowledged is its business now, so stop"
                )
            sync_manifest(self._storage, self.shard_id, newer, since=self._manifest)
            self._manifest = newer
            self.registry.forget_flushed(newer.replay_after)

    def _next_manifest(self) -> ShardManifest | None:
        version = self._manifest.version + 1
        if self._storage.local_root is not None and not os.path.exists(
            self._manifest_path(version)
        ):
            return None
        return read_manifest(self._storage, self.shard_id, version)

    def _recover(self, cause: DatagenError) -> None:
        """Claim the shard again and put every unacknowledged entry, in order, once more."""
        failure = cause
        for attempt in range(self._reopen_attempts):
            if attempt:
                self._pause.wait(self._reopen_pause_s)
            try:
                self._reclaim()
                for entry in self._unacknowledged:
                    entry.position = None
                    self._put(entry)
            except (WriterPoisonedError, StorageError) as error:
                failure = error
            else:
                return
        raise WriterPoisonedError(
            f"{self.where} could not be written, nor reopened in "
            f"{self._reopen_attempts} attempts: {failure}"
        ) from failure

    def _reclaim(self) -> None:
        latest = read_latest_manifest(self._storage, self.shard_id, known=self._manifest)
        # A claim that failed half-way may have taken an epoch without our learning of it.
        own = range(self.epoch, self.epoch + self._unclear_claims + 1)
        if latest is None or latest.writer_epoch not in own:
            raise WriterFencedError(
                f"another writer claimed {self.where} after a write of ours had failed; stop"
            )
        if self._before_reopen is not None:
            self._before_reopen()
        crash_point("before_reopen")
        known_epoch, known_position = self.epoch, self._position
        # Claim, flush and claim: what the failed write left then lies behind the tail, where a
        # half-written entry cannot hide what follows it.
        self._adopt(self._claim_own(own))
        if own.stop - own.start > 1:
            self._check_nobody_wrote(known_epoch, known_position)
        self.reseal()
        self.reopens += 1
        crash_point("after_reopen")

    def _claim_own(self, own: range) -> ShardClaim:
        self._unclear_claims += 1
        claim = claim_shard(
            self.uri, self.shard_id, self._storage, self._storage_options, own_epochs=own
        )
        self._unclear_claims = 0
        return claim

    def _check_nobody_wrote(self, epoch: int, position: int) -> None:
        """Of two epochs that can be ours, make sure that nobody else wrote under one."""
        tail = read_wal_tail(self._storage, self.shard_id, position)
        if any(entry.writer_epoch > epoch for entry in tail.entries):
            raise WriterFencedError(
                f"another writer appended to {self.where} while it was being reopened; stop"
            )

    def _adopt(self, claim: ShardClaim) -> None:
        self._writer = claim.writer
        self.epoch = claim.epoch
        self._manifest = claim.manifest
        self._position = claim.last_position
        self.max_rows = claim.max_rows
        self.registry.forget_flushed(claim.manifest.replay_after)

    def _wal_path(self, position: int) -> str:
        return self._storage.path(layout.wal_key(self.shard_id, position))

    def _manifest_path(self, version: int) -> str:
        return self._storage.path(layout.manifest_key(self.shard_id, version))
