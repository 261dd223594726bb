"""Appending to one shard from many threads and coroutines: group commit.

Callers queue batches of events, each a whole that is never split. One thread takes all that is
queued, makes it one WAL entry (`WalAppender`) and tells the callers once it is durable. Appends
become durable in the order in which they were handed in, and a caller that was refused, fenced
or failed is told by the type of its error:

    InvalidEventError     an id came back with other content; nothing of that batch was written
    WriterFencedError     another writer owns the shard; this one is done for
    WriterPoisonedError   the storage failed and reopening did too; `ShardOwner.reopen` tries again
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from datagen_ray.crashpoints import crash_point
from datagen_ray.errors import (
    DatagenError,
    InputError,
    InternalError,
    StorageError,
    ValueTooLargeError,
    WriterPoisonedError,
)
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.validate import batch_size_bytes
from datagen_ray.store import layout
from datagen_ray.store.appender import WalAppender
from datagen_ray.store.bounds import check_count, check_seconds
from datagen_ray.store.claim import claim_shard
from datagen_ray.store.forks import HomeProcess, check_may_write
from datagen_ray.store.grouping import group_appends
from datagen_ray.store.shard import ShardManifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.waiters import Append, Waiter, settle

MAX_APPEND_BYTES = 256 << 20
"""Largest batch of one caller."""


@dataclass(frozen=True)
class WriterOptions:
    """How a writer groups, bounds and retries.

    ``entry_rows``/``entry_bytes`` bound what is grouped into one WAL entry (one caller's batch
    may be larger and then goes alone). ``queue_rows``/``queue_bytes`` bound what waits before
    `ShardOwner.submit` blocks. ``reopen_attempts`` claims are tried after a failed write,
    ``reopen_pause_s`` apart. ``idle_check_s`` is how soon an idle writer looks for a manifest
    that a background flush wrote. Raises ConfigError for a number out of its range.
    """

    entry_rows: int = 4096
    entry_bytes: int = 8 << 20
    queue_rows: int = 65_536
    queue_bytes: int = 128 << 20
    reopen_attempts: int = 3
    reopen_pause_s: float = 0.5
    idle_check_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("entry_rows", "entry_bytes", "queue_rows", "queue_bytes", "reopen_attempts"):
            check_count(name, getattr(self, name))
        check_seconds("reopen_pause_s", self.reopen_pause_s)
        check_seconds("idle_check_s", self.idle_check_s, above_zero=True)


@dataclass(frozen=True)
class WriterStatistics:
    """What a writer has done so far, and what waits. ``bytes`` is an estimate of content."""

    appends: int
    events: int
    wal_entries: int
    bytes: int
    duplicate_events: int
    queued_appends: int
    queued_rows: int
    unflushed_rows: int
    reopens: int
    memtable_flush_failures: int


_Action = Literal["flush", "reopen", "close"]
_State = Literal["open", "poisoned", "stopped", "closed"]

_FLUSH_FAILURE_CHECK_ENTRIES = 32
_FLUSH_FAILURE_PAUSE_S = 0.2


@dataclass(eq=False, slots=True)
class _Control:
    action: _Action
    done: Future[None]


class ShardOwner:
    """The writer of one shard. Made by `claim`; safe to use from any thread."""

    def __init__(self, appender: WalAppender, options: WriterOptions, pause: threading.Event):
        self.uri = appender.uri
        self.slot = appender.slot
        self.shard_id = appender.shard_id
        self._home = HomeProcess()
        self._appender = appender
        self._options = options
        self._pause = pause
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._queue: deque[Append | _Control] = deque()
        self._arrivals: deque[Append] = deque()
        self._hand_over_on: asyncio.AbstractEventLoop | None = None
        self._queued_rows = 0
        self._queued_bytes = 0
        self._state: _State = "open"
        self._failure: DatagenError | None = None
        self._appends = self._events = self._bytes = 0
        self._duplicates = self._flush_failures = 0
        self._may_flush = False
        self._pause_after: Callable[[ShardManifest], float] | None = None
        self._thread = threading.Thread(target=self._run, name=f"wal-{self.slot}", daemon=True)
        self._thread.start()

    @classmethod
    def claim(
        cls,
        uri: str,
        slot: str = layout.DEFAULT_SLOT,
        *,
        storage_options: Mapping[str, str] | None = None,
        fsync: bool = True,
        options: WriterOptions | None = None,
        before_reopen: Callable[[], None] | None = None,
    ) -> ShardOwner:
        """Claim the shard of a slot name in an existing log, fencing whoever held it.

        ``fsync=False`` acknowledges what a power loss can still take back. ``before_reopen`` is
        called before the shard is claimed again after a failed write; what it raises stops the
        writer. Raises LogNotFoundError, WriterFencedError (another claimed at the same time),
        StorageError, and ConfigError in a process that was forked from one with an open log.
        """
        check_may_write(uri)
        options = options or WriterOptions()
        shard = layout.shard_uuid(slot)
        storage = LogStorage(uri, storage_options, fsync=fsync)
        pause = threading.Event()
        appender = WalAppender(
            uri,
            slot,
            claim_shard(uri, shard, storage, storage_options),
            storage,
            storage_options=storage_options,
            reopen_attempts=options.reopen_attempts,
            reopen_pause_s=options.reopen_pause_s,
            before_reopen=before_reopen,
            pause=pause,
        )
        return cls(appender, options, pause)

    # -- for callers -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The MemWAL epoch of the current claim."""
        return self._appender.epoch

    @property
    def writer_epoch(self) -> str:
        """What events of this writer carry: ``<slot name>:<epoch>``."""
        return f"{self.slot}:{self._appender.epoch}"

    def submit(self, events: Sequence[DatagenEvent]) -> Future[None]:
        """Queue a batch; the future resolves once it is durable. Blocks while the queue is full.

        Raises ValueTooLargeError at once for a batch that no entry can hold. Events are expected
        to be validated.
        """
        waiter: Future[None] = Future()
        append = self._new_append(events, waiter)
        with self._lock:
            self._enqueue_arrivals()
            while self._is_full() and self._state == "open":
                self._room.wait()
            self._enqueue(append)
        return waiter

    def submit_async(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        """As `submit`, for a coroutine of the running loop: queued when called, in call order.

        Never blocks the loop: what bounds the queue here is how many callers await their result.
        Cancelling the future does not take back the rows.

        The thread hears of them once the callbacks that the loop runs now are done, so that all
        that they append is one WAL entry and not a first one alone, for which the others wait.
        """
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._arrivals.append(self._new_append(events, waiter))
        if self._hand_over_on is not loop:
            self._hand_over_on = loop
            loop.call_soon(self._hand_over)
        return waiter

    def slow_down_by(self, pause_after: Callable[[ShardManifest], float] | None) -> None:
        """Ask, after each entry, how many seconds to wait before the next; None asks no more.

        For a merger that cannot keep up. It is called on the writer's thread with the newest
        manifest, must not block, and must not raise.
        """
        self._pause_after = pause_after

    def flush(self) -> None:
        """Seal all that was appended before into an SSTable. Claims a new epoch."""
        self._control("flush").result()

    def reopen(self) -> None:
        """Claim again after WriterPoisonedError, and put the rows whose outcome is unknown."""
        self._control("reopen").result()

    def close(self) -> None:
        """Write what is queued, flush it into an SSTable, and let the shard go. Idempotent.

        Raises WriterFencedError when another writer has claimed the shard unnoticed until now;
        what was acknowledged is durable all the same. In a process forked since it was opened it
        does nothing: the shard is the other's.
        """
        if not self._home.is_this:
            return
        done = self._control("close")
        self._pause.set()
        try:
            done.result()
        finally:
            self._thread.join()

    def __enter__(self) -> ShardOwner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def statistics(self) -> WriterStatistics:
        """What this writer has done so far, and what waits."""
        with self._lock:
            self._enqueue_arrivals()
            return WriterStatistics(
                appends=self._appends,
                events=self._events,
                wal_entries=self._appender.entries,
                bytes=self._bytes,
                duplicate_events=self._duplicates,
                queued_appends=len(self._queue),
                queued_rows=self._queued_rows,
                unflushed_rows=len(self._appender.registry),
                reopens=self._appender.reopens,
                memtable_flush_failures=self._flush_failures,
            )

    # -- the queue ---------------------------------------------------------------------------

    def _new_append(self, events: Sequence[DatagenEvent], waiter: Waiter) -> Append:
        self._home.check(f"the writer of slot {self.slot!r}")
        size = batch_size_bytes(events)
        most = self._appender.max_rows
        if len(events) > most or size > MAX_APPEND_BYTES:
            raise ValueTooLargeError(
                f"an append of {len(events)} events and about {size} bytes is more than the "
                f"{most} events or {MAX_APPEND_BYTES} bytes that one can hold; append less at "
                "once, or keep large values elsewhere"
            )
        return Append(events, size, waiter)

    def _is_full(self) -> bool:
        return (
            self._queued_rows >= self._options.queue_rows
            or self._queued_bytes >= self._options.queue_bytes
        )

    def _hand_over(self) -> None:
        # Before the arrivals are taken: whoever comes between asks for another call.
        self._hand_over_on = None
        with self._lock:
            self._enqueue_arrivals()

    def _enqueue_arrivals(self) -> None:
        while self._arrivals:
            self._enqueue(self._arrivals.popleft())

    def _enqueue(self, append: Append) -> None:
        if self._state != "open":
            settle((append,), self._refusal())
            return
        self._queue.append(append)
        self._queued_rows += len(append.events)
        self._queued_bytes += append.size_bytes
        if len(self._queue) == 1:
            self._work.notify()

    def _control(self, action: _Action) -> Future[None]:
        self._home.check(f"the writer of slot {self.slot!r}")
        control = _Control(action, Future())
        with self._lock:
            self._enqueue_arrivals()
            if self._state != "closed":
                self._queue.append(control)
                self._work.notify()
            elif action == "close":
                control.done.set_result(None)
            else:
                control.done.set_exception(self._refusal())
        return control.done

    def _refusal(self) -> DatagenError:
        if self._failure is not None:
            return self._failure
        return InputError(f"the writer of slot {self.slot!r} is closed; open the store again")

    def _take(self) -> list[Append] | _Control | None:
        """All that is queued and fits one entry, or one control; None when there was nothing."""
        with self._lock:
            self._enqueue_arrivals()
            if not self._queue:
                self._work.wait(self._options.idle_check_s if self._may_flush else None)
            if not self._queue:
                return None
            first = self._queue.popleft()
            if isinstance(first, _Control):
                return first
            taken = [first]
            most_rows = min(self._options.entry_rows, self._appender.max_rows)
            rows, size = len(first.events), first.size_bytes
            while self._queue:
                following = self._queue[0]
                if isinstance(following, _Control):
                    break
                if (
                    rows + len(following.events) > most_rows
                    or size + following.size_bytes > self._options.entry_bytes
                ):
                    break
                self._queue.popleft()
                taken.append(following)
                rows += len(following.events)
                size += following.size_bytes
            was_full = self._is_full()
            self._queued_rows -= rows
            self._queued_bytes -= size
            if was_full:
                self._room.notify_all()
            return taken

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while self._state != "closed":
            work = self._take()
            try:
                if work is None:
                    self._when_idle()
                elif isinstance(work, _Control):
                    self._obey(work)
                else:
                    self._commit(work)
            except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
                self._break_down(work, error)
        self._appender.release()

    def _commit(self, appends: list[Append]) -> None:
        if self._state != "open":
            settle(appends, self._refusal())
            return
        # Whoever has more to hand over waits meanwhile, rather than fight for Python's lock at each
        # of the columns, which takes both threads longer.
        with self._lock:
            group = group_appends(appends, self._appender.registry)
        for append, reason in group.refused:
            settle((append,), reason)
        if group.batch is not None:
            self._may_flush = True
            try:
                self._appender.append(group.batch, group.event_ids)
            except DatagenError as error:
                if not isinstance(error, InternalError):
                    self._stop(error)
                settle(group.accepted, error)
                return
        self._appends += len(group.accepted)
        self._events += len(group.event_ids)
        self._duplicates += group.duplicates
        self._bytes += sum(append.size_bytes for append in group.accepted)
        crash_point("before_acknowledge")
        settle(group.accepted)
        crash_point("after_acknowledge")
        if self._appender.entries % _FLUSH_FAILURE_CHECK_ENTRIES == 0:
            self._slow_down_while_flushes_fail()
        if self._pause_after is not None:
            pause_s = self._pause_after(self._appender.manifest)
            if pause_s > 0:
                self._pause.wait(pause_s)

    def _when_idle(self) -> None:
        """Make durable what a background flush wrote, so that a power loss finds it whole."""
        if self._state != "open" or not self._may_flush:
            return
        try:
            flushing = self._appender.is_flushing()
            self._appender.follow_manifest()
        except DatagenError as error:
            self._stop(error)
        else:
            self._may_flush = flushing

    def _slow_down_while_flushes_fail(self) -> None:
        failures = self._appender.flush_failures()
        if failures > self._flush_failures:
            self._pause.wait(_FLUSH_FAILURE_PAUSE_S)
        self._flush_failures = failures

    def _stop(self, error: DatagenError) -> None:
        """Refuse everything from here on, and tell those who wait."""
        with self._lock:
            if self._state != "closed":
                failed = isinstance(error, (WriterPoisonedError, StorageError))
                self._state = "poisoned" if failed else "stopped"
            self._failure = error
            appends, controls = self._empty_queue()
            self._queue.extend(controls)
        settle(appends, error)

    def _empty_queue(self) -> tuple[list[Append], list[_Control]]:
        appends = [work for work in self._queue if isinstance(work, Append)]
        controls = [work for work in self._queue if isinstance(work, _Control)]
        self._queue.clear()
        self._queued_rows = self._queued_bytes = 0
        self._room.notify_all()
        return appends, controls

    def _break_down(self, work: list[Append] | _Control | None, error: BaseException) -> None:
        failure = InternalError(
            f"the writer of {self._appender.where} broke down: {error!r}; report this"
        )
        failure.__cause__ = error
        self._stop(failure)
        if isinstance(work, _Control):
            work.done.set_exception(failure)
        elif work is not None:
            settle([append for append in work if not append.waiter.done()], failure)

    # -- controls ----------------------------------------------------------------------------

    def _obey(self, control: _Control) -> None:
        try:
            if control.action == "close":
                self._close()
            elif control.action == "flush":
                if self._state != "open":
                    raise self._refusal()
                self._appender.reseal()
            elif self._state == "poisoned":
                self._appender.resume(self._refusal())
                with self._lock:
                    self._state = "open"
                    self._failure = None
            elif self._state != "open":
                raise self._refusal()
        except DatagenError as error:
            if self._state == "open":
                self._stop(error)
            control.done.set_exception(error)
        else:
            control.done.set_result(None)

    def _close(self) -> None:
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            appends, controls = self._empty_queue()
        settle(appends, self._refusal())
        for other in controls:
            if other.action == "close":
                other.done.set_result(None)
            else:
                other.done.set_exception(self._refusal())
        if was_open:
            self._appender.seal()
