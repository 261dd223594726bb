"""Merging the flushed generations of a shard into the base table, and draining them.

Vocabulary. A *generation* is one SSTable of a shard. *Merging* inserts its rows into the base
table; *marking* records in the same commit that it was merged; *draining* drops it from the
shard's manifest, after which it may be collected. A generation is *held back* when it has a row
whose ``event_id`` stands for other content elsewhere.

Flow, for the lowest generation that the shard's newest manifest lists, again and again:

1. Read its ids, also of copies that Lance hid at the flush; look for other content under one id.
2. On a table opened anew, insert the rows whose id is not there yet, and mark the generation.
   One generation a commit: Lance refuses the mark of a generation that is marked already, and
   with it the rows, so any number of mergers leave each row once.
3. If it was marked already, or if some ids were there: compare those rows with the table's.
4. Sync the commit.
5. Drain the generation; or hold it back, merged but listed, so that every reader goes on to see
   both contents and reports them. Nothing is replaced and nothing is dropped.

A crash, or an unclear answer, between any two steps is healed by doing it all again. A generation
is never skipped: a mark refuses all lower ones. If a marked generation should lack rows in the
table all the same, step 3 finds out, and it is not drained.

Memory holds the ids of one generation; its rows are streamed. Lance can insert them in two ways:
with the index it holds the generation about four times (it replays the source, joins it as one
batch, and writes that as one); scanning the base table's ids it holds the generation twice and
those ids. The scan is taken while the ids are less than the generation. Either way what it took
goes back to the system before the next generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.mem_wal import CompactedSsTable

from datagen_ray.crashpoints import crash_point
from datagen_ray.errors import DamagedLogError, StorageError
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store import layout
from datagen_ray.store.commits import CommitSync, commit_with_retries, unchecked
from datagen_ray.store.creation import open_log
from datagen_ray.store.heap import return_free_memory, return_large_blocks
from datagen_ray.store.lance_errors import (
    LANCE_ERRORS,
    is_merged_already,
    is_vanished,
    translate,
)
from datagen_ray.store.shard import (
    ShardManifest,
    SsTable,
    drain_generation,
    read_latest_manifest,
)
from datagen_ray.store.snapshot import dedupe
from datagen_ray.store.sstable import has_hidden_rows, open_sstable, read_with_hidden_rows
from datagen_ray.store.storage import LogStorage

_CACHE_BYTES = 8 << 20
"""Pages of the base table's index that a merge keeps. Ids are random, so that the look-ups of one
generation touch every page; Lance would keep them all, whatever the size of the table."""

_SCANNED_ID_BYTES = 96
"""What a merge that scans the base table's ids holds for each of its rows (80 were measured)."""

_COMPARED_ROWS = 4096
"""Rows of a generation that are looked up in the base table at a time."""


@dataclass(frozen=True)
class MergedGeneration:
    """What became of one generation.

    ``rows``: distinct events in it; ``inserted``: those that the base table did not have.
    ``conflicting_event_ids``: ids with other content elsewhere, for which it was held back.
    ``bytes``: its size in memory.
    """

    shard_id: str
    generation: int
    rows: int
    inserted: int
    merged_before: bool
    conflicting_event_ids: tuple[str, ...]
    duration_s: float
    bytes: int = 0

    @property
    def drained(self) -> bool:
        return not self.conflicting_event_ids


@dataclass(frozen=True)
class MergeReport:
    """The generations that one merge went through, in order."""

    generations: tuple[MergedGeneration, ...] = ()

    @property
    def inserted(self) -> int:
        return sum(done.inserted for done in self.generations)

    @property
    def conflicting_event_ids(self) -> tuple[str, ...]:
        """Ids that stand for more than one content. Their items fold as violations."""
        return tuple(i for done in self.generations for i in done.conflicting_event_ids)


class ShardMerger:
    """Merges and drains one shard's generations. Needs no claim; used by one thread at a time.

    ``before_commit`` is called before each commit and drain, and stops the merge by raising.
    """

    def __init__(
        self,
        storage: LogStorage,
        shard: str,
        *,
        before_commit: Callable[[], None] = unchecked,
    ) -> None:
        self.shard_id = shard
        self._storage = storage
        self._options: Mapping[str, str] | None = storage.storage_options or None
        self._before_commit = before_commit
        self._manifest: ShardManifest | None = None
        self._held_back: set[int] = set()
        self._sync_failure: StorageError | None = None

    @property
    def held_back(self) -> frozenset[int]:
        """Generations that stay listed since they conflict with other content."""
        return frozenset(self._held_back)

    def pending(self) -> tuple[SsTable, ...]:
        """The generations that wait to be merged or drained, lowest first."""
        self._manifest = read_latest_manifest(self._storage, self.shard_id, known=self._manifest)
        listed = () if self._manifest is None else self._manifest.sstables
        waiting = (table for table in listed if table.generation not in self._held_back)
        return tuple(sorted(waiting, key=lambda table: table.generation))

    def run(self, *, at_most: int | None = None, stop: Callable[[], bool] = bool) -> MergeReport:
        """Merge and drain what is pending; ``stop`` is asked between two generations.

        Raises StorageError, CommitConflictError among them, for what may be tried again, and
        DamagedLogError for a generation that cannot be merged.
        """
        return_large_blocks()
        done: list[MergedGeneration] = []
        while len(done) != at_most and not stop() and (pending := self.pending()):
            try:
                outcome = self._merge(pending[0])
            finally:
                return_free_memory()
            if outcome is not None:
                done.append(outcome)
        return MergeReport(tuple(done))

    def _merge(self, table: SsTable) -> MergedGeneration | None:
        """None when another merger was done with the generation, and it is gone."""
        if self._sync_failure is not None:
            raise self._sync_failure
        started = time.perf_counter()
        doing = f"merging generation {table.generation} of shard {self.shard_id}"
        try:
            source = _Source.open(self._storage, self.shard_id, table)
            with CommitSync(self._storage) as commit:
                inserted = commit_with_retries(lambda: self._insert(source, table), doing)
                crash_point("after_merge_commit")
                conflicts = set(source.conflicts)
                if inserted is None or inserted < source.row_count:
                    conflicts |= self._compare(source, table.generation)
                self._sync(commit)
        except StorageError as error:
            self._explain(error, error, table)
            return None
        except LANCE_ERRORS as error:
            self._explain(error, translate(error, doing), table)
            return None
        if conflicts:
            self._held_back.add(table.generation)
        else:
            self._before_commit()
            self._manifest = drain_generation(self._storage, self.shard_id, table.generation)
            crash_point("after_drain")
        return MergedGeneration(
            self.shard_id,
            table.generation,
            source.row_count,
            inserted or 0,
            inserted is None,
            tuple(sorted(conflicts)),
            time.perf_counter() - started,
            table.in_memory_bytes,
        )

    def _insert(self, source: _Source, table: SsTable) -> int | None:
        """How many rows went in; None when the generation was marked as merged before."""
        self._before_commit()
        dataset = self._open_base()
        builder = dataset.merge_insert("event_id").when_not_matched_insert_all()
        builder.conflict_retries(0)  # Lance's own would try again on this handle
        builder.mark_sstables_as_compacted([CompactedSsTable(self.shard_id, table.generation)])
        builder.use_index(dataset.count_rows() * _SCANNED_ID_BYTES > table.in_memory_bytes)
        crash_point("before_merge_commit")
        try:
            return int(builder.execute(source.reader())["num_inserted_rows"])
        except LANCE_ERRORS as error:
            if is_merged_already(error):
                return None
            raise

    def _open_base(self) -> Any:
        session = lance.Session(index_cache_size_bytes=_CACHE_BYTES)
        return open_log(self._storage.uri, self._options, session=session)

    def _compare(self, source: _Source, generation: int) -> set[str]:
        """The ids whose content differs from the base table's, after the merge."""
        dataset = self._open_base()
        missing, conflicting = compare_with_base(dataset, source.reader())
        if missing:
            raise DamagedLogError(
                f"generation {generation} of shard {self.shard_id} is marked as merged, but the "
                f"base table of {self._storage.uri} lacks {len(missing)} of its rows, such as "
                f"event {missing[0]}; it stays readable where it is, nothing of it is deleted"
            )
        return set(conflicting)

    def _explain(self, error: Exception, translated: Exception, table: SsTable) -> None:
        """Raise what the error means, unless another merger drained the generation meanwhile."""
        if not is_vanished(error):
            raise translated from error
        if any(left.generation == table.generation for left in self.pending()):
            raise DamagedLogError(
                f"generation {table.generation} of shard {self.shard_id} in {self._storage.uri} "
                "is listed, but files of it are missing: restore "
                f"{layout.sstable_key(self.shard_id, table.path)}"
            ) from error

    def _sync(self, commit: CommitSync) -> None:
        try:
            commit.sync()
        except StorageError as error:
            # What could not be synced may be lost even if a second attempt seems to succeed, so
            # this merger drains nothing any more.
            self._sync_failure = error
            raise
        crash_point("after_merge_sync")


@dataclass(frozen=True)
class _Source:
    """The rows of one SSTable, each id once: the oldest copy."""

    dataset: Any
    deduped: pa.Table | None
    row_count: int
    conflicts: tuple[str, ...]

    @classmethod
    def open(cls, storage: LogStorage, shard: str, table: SsTable) -> _Source:
        key = layout.sstable_key(shard, table.path)
        dataset = open_sstable(storage, key)
        if not has_hidden_rows(dataset):
            ids = dataset.scanner(columns=["event_id"]).to_table().column("event_id")
            if len(pc.unique(ids)) == len(ids):
                return cls(dataset, None, len(ids), ())
        contents = dedupe(read_with_hidden_rows(dataset, DATAGEN_SCHEMA.names))
        oldest = _oldest_copies(contents)
        return cls(dataset, oldest, oldest.num_rows, tuple(_repeated(contents)))

    def reader(self) -> pa.RecordBatchReader:
        if self.deduped is not None:
            return self.deduped.to_reader(_COMPARED_ROWS)
        names = DATAGEN_SCHEMA.names
        return self.dataset.scanner(columns=names, batch_size=_COMPARED_ROWS).to_reader()


def compare_with_base(dataset: Any, rows: pa.RecordBatchReader) -> tuple[list[str], list[str]]:
    """The ids of ``rows`` that the base table lacks, and those that it holds with other content."""
    missing: list[str] = []
    conflicting: list[str] = []
    for batch in rows:
        wanted = pa.Table.from_batches([batch])
        ids = batch.column("event_id")
        held = dataset.scanner(
            columns=wanted.schema.names, filter=pc.field("event_id").isin(ids)
        ).to_table()
        if held.sort_by("event_id").equals(wanted.sort_by("event_id")):
            continue
        absent = pc.invert(pc.is_in(ids, value_set=held.column("event_id").combine_chunks()))
        missing += ids.filter(absent).to_pylist()
        both = pa.concat_tables([held, wanted], promote_options="permissive")
        conflicting += _repeated(dedupe(both))
    return missing, conflicting


def missing_ids(dataset: Any, ids: pa.RecordBatchReader) -> list[str]:
    """Which of the ids, given as batches with an ``event_id``, the base table does not hold."""
    missing: list[str] = []
    for batch in ids:
        wanted = batch.column("event_id")
        rows = dataset.scanner(columns=["event_id"], filter=pc.field("event_id").isin(wanted))
        held = rows.to_table().column("event_id").combine_chunks()
        missing += wanted.filter(pc.invert(pc.is_in(wanted, value_set=held))).to_pylist()
    return missing


def _repeated(rows: pa.Table) -> list[str]:
    counts = pc.value_counts(rows.column("event_id"))
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    ids: list[str] = repeated.to_pylist()
    return ids


def _oldest_copies(rows: pa.Table) -> pa.Table:
    numbered = pa.table(
        {"event_id": rows.column("event_id"), "row": pa.array(range(rows.num_rows), pa.int64())}
    )
    first = numbered.group_by("event_id", use_threads=False).aggregate([("row", "min")])
    return rows.take(first.column("row_min").sort())
