"""DatagenStore: one log, to append to and to read.

Opening reads; only appending claims. A store that was opened with a ``shard_id`` claims that shard
at once, and fences whoever held it; one without claims the shard ``default`` at its first append.
So opening a log to look at it never takes it from anybody.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import ConfigError, DatagenError, InvalidEventError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.ids import DatagenItemId, canonical_ids, id_text
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.log.validate import validate_append, validate_checkpoint
from datagen_ray.store import layout
from datagen_ray.store.cleanup import CleanupOptions, PeriodicCleanup
from datagen_ray.store.collect import (
    GRACE_S,
    WAL_RETENTION_S,
    CollectionReport,
    collect_garbage,
)
from datagen_ray.store.compaction import (
    VERSION_RETENTION_S,
    CompactionReport,
    IndexReport,
    VersionCleanupReport,
    cleanup_old_versions,
    compact,
    refresh_indexes,
)
from datagen_ray.store.creation import create_log, open_log
from datagen_ray.store.forks import HomeProcess
from datagen_ray.store.layout import DEFAULT_SLOT
from datagen_ray.store.lookup import NeverStarted
from datagen_ray.store.merge import MergeReport, ShardMerger
from datagen_ray.store.reads import LogReads
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.statistics import StoreStatistics
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner, WriterOptions


class DatagenStore(LogReads):
    """One log. Make it with :meth:`open`; close it, or use it as a context manager.

    Appends block until durable and may come from any thread; concurrent callers share WAL
    entries. Raises :class:`WriterFencedError` once another writer has claimed the shard,
    :class:`WriterPoisonedError` when the storage failed, :class:`InvalidEventError` for events
    that break a rule, before anything is written.
    """

    def __init__(
        self,
        storage: LogStorage,
        *,
        shard_id: str | None,
        storage_options: Mapping[str, str] | None,
        read_only: bool,
        fsync: bool,
        writer_options: WriterOptions | None,
        before_reopen: Callable[[], None] | None,
        now: Clock,
    ) -> None:
        super().__init__(LogReader(storage, storage_options))
        self.uri = storage.uri
        self._storage = storage
        self.read_only = read_only
        self._slot = shard_id or DEFAULT_SLOT
        self._storage_options = storage_options
        self._fsync = fsync
        self._writer_options = writer_options
        self._before_reopen = before_reopen
        self._now = now
        self._lock = threading.Lock()
        self._owner: ShardOwner | None = None
        self._cleanup: PeriodicCleanup | None = None
        self._closed = False
        self._home = HomeProcess()

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        shard_id: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        create: bool = True,
        read_only: bool = False,
        fsync: bool = True,
        writer_options: WriterOptions | None = None,
        before_reopen: Callable[[], None] | None = None,
        now: Clock = utc_now,
    ) -> DatagenStore:
        """Open the log at a local path or an object-store URI.

        ``shard_id`` names the shard to write to and claims it now. ``create`` makes the log where
        there is none; without it, and always with ``read_only``, a missing log raises
        :class:`LogNotFoundError`. ``storage_options`` are Lance's. ``fsync=False`` acknowledges
        what a power loss can still take back. ``before_reopen`` is called before the shard is
        claimed again after a failed write, and may raise to stop that. Raises
        :class:`ConfigError` for a place that cannot hold a log, and in a process that was forked
        from one with an open log where it would have to write; reading works there.
        """
        if shard_id == "":
            raise ConfigError("shard_id is empty; leave it out for the shard 'default'")
        if shard_id is not None:
            layout.shard_uuid(
                shard_id
            )  # which refuses what names no shard, before anything is made
        if read_only and shard_id is not None:
            raise ConfigError(
                f"a read-only store claims no shard; leave out shard_id={shard_id!r} or read_only"
            )
        if create and not read_only:
            create_log(uri, storage_options, fsync=fsync)
        else:
            open_log(uri, storage_options)
        store = cls(
            LogStorage(uri, storage_options, fsync=fsync),
            shard_id=shard_id,
            storage_options=storage_options,
            read_only=read_only,
            fsync=fsync,
            writer_options=writer_options,
            before_reopen=before_reopen,
            now=now,
        )
        if shard_id is not None:
            store._writer()
        return store

    # -- writing -------------------------------------------------------------------------------

    @property
    def writer_epoch(self) -> str:
        """``<shard name>:<epoch>`` of this writer, as its events carry it. Claims if need be."""
        return self._writer().writer_epoch

    def append(self, events: Iterable[DatagenEvent]) -> None:
        """Append a batch, whole or not at all, and return when it is durable.

        The lower-level form, for lifecycle events; see :meth:`append_checkpoint` for steps. The
        same events again change nothing.
        """
        self._submit(validate_append(events))

    def append_checkpoint(self, events: Iterable[DatagenEvent]) -> None:
        """Append one step's field events and its one STEP_COMPLETED, atomically."""
        self._submit(validate_checkpoint(events))

    def append_async(self, events: Iterable[DatagenEvent]) -> asyncio.Future[None]:
        """As :meth:`append`, for a coroutine: queued by the call, in call order, then awaitable.

        Cancelling the future does not take the events back.
        """
        return self._submit_async(validate_append(events))

    def append_checkpoint_async(self, events: Iterable[DatagenEvent]) -> asyncio.Future[None]:
        """As :meth:`append_checkpoint`, for a coroutine."""
        return self._submit_async(validate_checkpoint(events))

    def open_stream(
        self,
        item_id: str | DatagenItemId,
        *,
        run_id: str,
        writer_epoch: str | None = None,
        parent_item_id: str | None = None,
        query_tags: Any = None,
        check_exists: bool = True,
    ) -> DatagenStreamWriter:
        """Create an item: append its ITEM_CREATED and return the writer of its further events.

        Refuses an item that exists; ``check_exists=False`` leaves that look-up to a caller that
        has classified its items in bulk.
        """
        path = id_text(item_id)
        _, parent = canonical_ids(path)
        if parent_item_id is not None:
            canonical_ids(id_text(parent_item_id))
            if parent_item_id != parent:
                raise InvalidEventError(
                    f"parent_item_id {parent_item_id!r} is not the parent of item {path!r}; "
                    "leave it out",
                    code="parent_mismatch",
                )
        writer = DatagenStreamWriter.open(
            path,
            run_id=run_id,
            writer_epoch=self.writer_epoch if writer_epoch is None else writer_epoch,
            query_tags=query_tags,
            now=self._now,
        )
        if check_exists and not isinstance(self.fold_item(path), NeverStarted):
            raise InvalidEventError(
                f"item {path!r} exists; resume_stream goes on with it", code="item_exists"
            )
        self.append([writer.item_created()])
        return writer

    def resume_stream(
        self, item_id: str | DatagenItemId, *, run_id: str, writer_epoch: str | None = None
    ) -> DatagenStreamWriter | None:
        """A writer that goes on behind the item's last event; None when it never started.

        Writes nothing. Raises :class:`InvalidEventError` for an item that has ended.
        """
        canonical_ids(id_text(item_id))
        folded = self.fold_item(item_id).folded()
        if folded is None:
            return None
        return DatagenStreamWriter.resume(
            folded,
            run_id=run_id,
            writer_epoch=self.writer_epoch if writer_epoch is None else writer_epoch,
            now=self._now,
        )

    def flush(self) -> None:
        """Seal what was appended into an SSTable, for readers that do not read WAL tails."""
        self._writer().flush()

    def reopen(self) -> None:
        """Claim the shard again after :class:`WriterPoisonedError` and settle what was open."""
        self._writer().reopen()

    # -- maintenance ---------------------------------------------------------------------------

    def cleanup_own_shard(self) -> MergeReport:
        """Merge what this shard has flushed into the base table, and drain it; appends go on.

        Claims nothing. See :mod:`datagen_ray.store.merge` for what becomes of conflicting rows.
        """
        self._check_may_change()
        if self._cleanup is not None:
            self._cleanup.check()
        return ShardMerger(self._storage, layout.shard_uuid(self._slot)).run()

    def spawn_periodic_cleanup(
        self,
        interval_s: float,
        *,
        options: CleanupOptions | None = None,
        on_merge: Callable[[MergeReport], None] | None = None,
        on_error: Callable[[DatagenError], None] | None = None,
    ) -> PeriodicCleanup:
        """Merge this shard in a thread, every ``interval_s`` and when much is pending.

        Claims the shard if need be. The thread ends with :meth:`close`, which raises what the
        last merge failed with. Past a limit of pending generations the writer is slowed.
        """
        self._check_may_change()
        owner = self._writer()
        with self._lock:
            self._check_open()
            if self._cleanup is not None and self._cleanup.is_alive:
                raise ConfigError(f"the store of {self.uri} has a periodic cleanup already")
            cleanup = PeriodicCleanup(
                ShardMerger(self._storage, owner.shard_id),
                interval_s,
                options=options,
                on_merge=on_merge,
                on_error=on_error,
            )
            self._cleanup = cleanup
        owner.slow_down_by(cleanup.pause_after)
        return cleanup

    def compact(self) -> CompactionReport:
        """Join the small fragments of the base table."""
        self._check_may_change()
        return compact(self._storage)

    def refresh_indexes(self) -> IndexReport:
        """Have the look-up indexes of the base table cover all its rows."""
        self._check_may_change()
        return refresh_indexes(self._storage)

    def cleanup_old_versions(
        self, *, retention_s: float = VERSION_RETENTION_S
    ) -> VersionCleanupReport:
        """Remove versions of the base table older than the retention, which long reads need."""
        self._check_may_change()
        return cleanup_old_versions(self._storage, retention_s=retention_s)

    def collect_garbage(
        self,
        *,
        dry_run: bool = False,
        grace_s: float = GRACE_S,
        wal_retention_s: float = WAL_RETENTION_S,
    ) -> CollectionReport:
        """Delete covered WAL entries, drained SSTables and leftovers, and say what and why."""
        if not dry_run:
            self._check_may_change()
        return collect_garbage(
            self._storage,
            dry_run=dry_run,
            grace_s=grace_s,
            wal_retention_s=wal_retention_s,
            now=self._now,
        )

    def statistics(self) -> StoreStatistics:
        """What this store has done, and what is pending in every shard of the log."""
        owner, cleanup = self._owner, self._cleanup
        snapshot = self._reader.snapshot()
        return StoreStatistics.of(
            snapshot.manifests,
            writer=None if owner is None else owner.statistics(),
            cleanup=None if cleanup is None else cleanup.statistics(),
            base_version=snapshot.base.version,
        )

    def queued_rows(self) -> int:
        """Rows that wait to be put into the WAL; 0 when nothing was claimed."""
        return 0 if self._owner is None else self._owner.statistics().queued_rows

    def pending_generations(self) -> int:
        """Generations of this store's own shard that wait to be merged: one look at its manifest.

        Cheap enough to be asked every second; :meth:`statistics` reads all shards.
        """
        manifest = read_latest_manifest(self._storage, layout.shard_uuid(self._slot))
        return 0 if manifest is None else len(manifest.sstables)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, flush it, and let the shard go. Idempotent; reads end too.

        In a process forked since the store was opened it does nothing: the shard is the other's.
        """
        if not self._home.is_this:
            return
        with self._lock:
            self._closed = True
            owner, cleanup = self._owner, self._cleanup
            self._cleanup = None
        try:
            if cleanup is not None:
                cleanup.close()
        finally:
            if owner is not None:
                owner.close()

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        # As files do. The writer's thread goes on, and so does its hold of the shard.
        if not getattr(self, "_closed", True) and self._owner is not None and self._home.is_this:
            warn(f"unclosed store of {self.uri}", ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> DatagenStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_may_change(self) -> None:
        self._home.check(f"the store of {self.uri}")
        if self.read_only:
            raise ConfigError(
                f"{self.uri} was opened read-only; open it without read_only to maintain it"
            )

    def _submit(self, events: list[DatagenEvent]) -> None:
        if events:
            self._writer().submit(events).result()

    def _submit_async(self, events: list[DatagenEvent]) -> asyncio.Future[None]:
        if events:
            return self._writer().submit_async(events)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"the store of {self.uri} is closed; open it again")

    def _writer(self) -> ShardOwner:
        self._home.check(f"the store of {self.uri}")
        owner = self._owner
        if owner is not None:
            return owner
        if self.read_only:
            raise ConfigError(
                f"{self.uri} was opened read-only; open it without read_only to write"
            )
        with self._lock:
            self._check_open()
            if self._owner is None:
                self._owner = ShardOwner.claim(
                    self.uri,
                    self._slot,
                    storage_options=self._storage_options,
                    fsync=self._fsync,
                    options=self._writer_options,
                    before_reopen=self._before_reopen,
                )
            return self._owner
