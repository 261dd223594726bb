"""One local run: takes the log over, finds what is to be done, and does it.

See ``local`` for what users call, and :mod:`datagen_ray.testing` for runs that are made to crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datagen_ray.clock import Clock, new_run_id, utc_now
from datagen_ray.errors import DamagedLogError
from datagen_ray.log.events import DatagenEvent, DatagenItemStatus
from datagen_ray.pipeline.calls import Sleep
from datagen_ray.pipeline.counts import RootCounts
from datagen_ray.pipeline.endings import SELF_CANCELLED
from datagen_ray.pipeline.environment import Observe
from datagen_ray.pipeline.executor import Executor, RootResult, RootTask
from datagen_ray.pipeline.pipeline import Pipeline, tree_changes
from datagen_ray.pipeline.sink import EventSink
from datagen_ray.sources import RowSource, SourceRow, source_rows
from datagen_ray.store.bulk import RootStatuses
from datagen_ray.store.runs import (
    begin_run,
    check_not_superseded,
    check_roots_by,
    claim_all_shards,
    latest_run,
    roots_by,
)
from datagen_ray.store.store import DatagenStore

_LOGGER = logging.getLogger("datagen_ray.local")

LOCAL_SLOT = "local"
"""The shard that local runs write to."""

_CHUNK_ROWS = 256


@dataclass(kw_only=True)
class LocalRunSummary(RootCounts):
    """How a local run ended."""

    run_id: str
    log_uri: str
    elapsed_s: float = 0.0
    failures: list[RootResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.failed == 0

    def count(self, result: RootResult) -> None:
        """Add one root that came to an end."""
        if result.status == "completed":
            self.completed += 1
        elif result.status == "filtered":
            self.filtered += 1
        else:
            self.failed += 1
            self.failures.append(result)


class StoreBlobs:
    """Fetches blob bytes from a store, off the event loop."""

    def __init__(self, store: DatagenStore) -> None:
        self._store = store

    async def load(self, event_id: str) -> bytes:
        found = await asyncio.to_thread(self._store.get_blob, event_id)
        if found is None:
            raise DamagedLogError(f"the bytes of blob event {event_id} are gone from the log")
        return found


@dataclass(frozen=True)
class Hooks:
    """Where a test may reach into a run: before the log, at calls of user code, in time."""

    wrap: Callable[[EventSink], EventSink] | None = None
    observe: Observe | None = None
    now: Clock = utc_now
    sleep: Sleep = asyncio.sleep


@dataclass
class LocalRun:
    """What :func:`run_local` was asked for."""

    pipeline: Pipeline
    source: RowSource
    key: str | None
    uri: str
    storage_options: Mapping[str, str] | None
    concurrency: int
    max_root_retries: int
    fsync: bool
    hooks: Hooks
    changed: bool = False
    _ending: bool = False

    async def run(self, options: dict[str, Any]) -> LocalRunSummary:
        hooks = self.hooks
        began = time.monotonic()
        fingerprint = self.pipeline.fingerprint()
        run_id = f"{new_run_id(hooks.now)}-{fingerprint[:8]}"
        summary = LocalRunSummary(run_id=run_id, log_uri=self.uri)
        store = await asyncio.to_thread(self._take_over, run_id, fingerprint)
        try:
            executor = Executor(
                self.pipeline,
                hooks.wrap(store) if hooks.wrap is not None else store,
                run_id=run_id,
                blobs=StoreBlobs(store),
                now=hooks.now,
                observe=hooks.observe,
                sleep=hooks.sleep,
                **options,
            )
            await executor.start()
            try:
                await self._run_all(store, executor, summary)
            finally:
                await executor.close()
        finally:
            await asyncio.to_thread(store.close)
        summary.elapsed_s = round(time.monotonic() - began, 3)
        return summary

    def _take_over(self, run_id: str, fingerprint: str) -> DatagenStore:
        """Claim first, then see that no later run exists, and only then let anybody read."""
        DatagenStore.open(self.uri, storage_options=self.storage_options, fsync=self.fsync).close()
        previous = latest_run(self.uri, self.storage_options)
        check_roots_by(previous, self.key)
        term = begin_run(
            self.uri,
            run_id,
            pipeline_tree=self.pipeline.tree(),
            fingerprint=fingerprint,
            storage_options=self.storage_options,
            origin=f"run_local, process {os.getpid()}",
            roots_by=roots_by(self.key),
            fsync=self.fsync,
        )
        self.changed = previous is not None and previous.fingerprint != fingerprint
        if previous is not None and self.changed:
            for change in tree_changes(previous.pipeline_tree, self.pipeline.tree()):
                _LOGGER.warning("the pipeline changed since run %s: %s", previous.run_id, change)
        claim_all_shards(self.uri, self.storage_options, fsync=self.fsync)

        def check() -> None:
            check_not_superseded(self.uri, term, self.storage_options)

        store = DatagenStore.open(
            self.uri,
            shard_id=LOCAL_SLOT,
            storage_options=self.storage_options,
            create=False,
            fsync=self.fsync,
            before_reopen=check,
        )
        try:
            check()
        except BaseException:
            store.close()
            raise
        return store

    async def _run_all(
        self, store: DatagenStore, executor: Executor, summary: LocalRunSummary
    ) -> None:
        statuses = await asyncio.to_thread(store.root_item_statuses)
        if self.changed:
            open_roots = statuses.counts()[DatagenItemStatus.RUNNING.value]
            _LOGGER.warning("%d running roots were begun by another pipeline", open_roots)
        # The executor bounds what runs. As many again may wait for the end of a root to be durable.
        slots = asyncio.Semaphore(2 * self.concurrency)
        running: set[asyncio.Task[None]] = set()
        broken: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            error = None if task.cancelled() else task.exception()
            if error is not None:
                broken.append(error)

        try:
            for chunk in self._chunks(statuses, summary):
                tasks = await self._tasks(store, statuses, chunk, summary)
                for task in tasks:
                    await slots.acquire()
                    if broken:
                        raise broken[0]
                    job = asyncio.ensure_future(self._until_done(store, executor, task, summary))
                    running.add(job)
                    job.add_done_callback(ended)
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                await asyncio.sleep(0)  # the callbacks that take tasks out of the set run next
                if broken:
                    raise broken[0]
        finally:
            self._ending = True
            for job in list(running):
                job.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _chunks(
        self, statuses: RootStatuses, summary: LocalRunSummary
    ) -> Iterator[list[tuple[str, Mapping[str, Any] | None]]]:
        """Roots to run, in chunks: those of the source, then running ones that have left it."""
        seen: set[str] = set()
        rows = source_rows(self.source, self.key)
        while batch := list(islice(rows, _CHUNK_ROWS)):
            chunk: list[tuple[str, Mapping[str, Any] | None]] = []
            for row in batch:
                seen.add(row.root_id)
                if self._is_to_run(statuses, row, summary):
                    chunk.append((row.root_id, row.fields))
            yield chunk
        left: list[tuple[str, Mapping[str, Any] | None]] = [
            (root_id, None)
            for root_id in statuses.with_status(DatagenItemStatus.RUNNING)
            if root_id not in seen
        ]
        for start in range(0, len(left), _CHUNK_ROWS):
            yield left[start : start + _CHUNK_ROWS]

    def _is_to_run(self, statuses: RootStatuses, row: SourceRow, summary: LocalRunSummary) -> bool:
        if statuses.is_terminated(row.root_id):
            summary.skipped += 1
            summary.roots_total += 1
            return False
        return True

    async def _tasks(
        self,
        store: DatagenStore,
        statuses: RootStatuses,
        chunk: Sequence[tuple[str, Mapping[str, Any] | None]],
        summary: LocalRunSummary,
    ) -> list[RootTask]:
        known = [
            root_id for root_id, _ in chunk if root_id in statuses or root_id in statuses.violations
        ]
        histories: Mapping[str, Sequence[DatagenEvent]] = {}
        if known:
            histories = await asyncio.to_thread(store.events_for_roots, known)
        summary.roots_total += len(chunk)
        summary.resumed += len(known)
        summary.fresh += len(chunk) - len(known)
        return [RootTask(root_id, inputs, histories.get(root_id, ())) for root_id, inputs in chunk]

    async def _until_done(
        self, store: DatagenStore, executor: Executor, task: RootTask, summary: LocalRunSummary
    ) -> None:
        """One root, resumed after failures as often as is allowed."""
        for retries_left in range(self.max_root_retries, -1, -1):
            try:
                result = await executor.run(task)
            except asyncio.CancelledError:
                if self._ending:
                    raise
                # By the step itself, as nobody else has the task; the others go on.
                result = RootResult(task.root_id, "failed", 0, 0, 0, SELF_CANCELLED)
            summary.steps_executed += result.steps_executed
            summary.checkpoints += result.checkpoints
            if not result.can_retry or not retries_left:
                break
            history = await asyncio.to_thread(store.events_for_root, task.root_id)
            task = RootTask(task.root_id, None, history)
        summary.count(result)
