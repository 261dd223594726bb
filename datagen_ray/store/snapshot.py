"""The consistent read: everything that was acknowledged, each event once.

Vocabulary. A shard's rows lie on three levels: WAL *tail* (entries that no SSTable holds yet),
*SSTables* (flushed generations), *base table* (what was merged). While a read gathers them, rows
move down: a tail is flushed, an SSTable merged, a merged one drained. A row may then be seen on
two levels, and must never be seen on none.

Flow of one read (:meth:`LogReader.snapshot`):

1. each shard's newest manifest;
2. its WAL entries behind ``replay_after``, up to the first missing position;
3. the manifest again: if its ``replay_after`` has passed into what step 2 looked for, the tail was
   flushed (and may have been collected) under the reader, who starts again;
4. the SSTables that the manifest of step 1 lists;
5. the base table as of after step 1, so that what was drained before it is in there.

Rows are deduplicated by ``event_id``. Identical copies count once. Copies with other content are
all handed on: the fold of that item, and the bulk reads, report them as a violation.

WAL entries and SSTables are immutable, so a reader keeps what it has fetched until the manifest
drops it; a second read costs only what is new.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import DamagedLogError, StorageError
from datagen_ray.log.schema import BLOB_COLUMN, DATAGEN_SCHEMA
from datagen_ray.log.values import DatagenBlobValue, blob_matches
from datagen_ray.store import layout
from datagen_ray.store.creation import open_log
from datagen_ray.store.lance_errors import LANCE_ERRORS, is_vanished, translate
from datagen_ray.store.levels import (
    SCAN_BATCH_ROWS,
    Entry,
    Flushed,
    Level,
    SourceVanishedError,
    Where,
    batches,
    hashes_of,
    holding,
    read_error,
    scan,
)
from datagen_ray.store.parallel import all_in_parallel
from datagen_ray.store.shard import (
    ShardManifest,
    find_hole,
    list_shards,
    read_latest_manifest,
    read_wal_tail,
)
from datagen_ray.store.sstable import has_hidden_rows, hidden_rows, open_sstable
from datagen_ray.store.storage import PARALLEL_REQUESTS, LogStorage
from datagen_ray.store.wholeness import check_whole

MAX_RESTARTS = 20
"""How often a read starts again because sources vanish under it before it gives up."""


@dataclass
class _ShardCache:
    """What a reader holds of one shard: the manifest last seen and the tail behind it."""

    manifest: ShardManifest | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    next_position: int = 1


@dataclass(frozen=True)
class Snapshot:
    """One consistent view of a log. Cheap to hold; its methods read.

    ``tail`` has the rows of all WAL tails, with every column of the log, and before them those
    that SSTables hide.
    """

    base: Any
    sstables: tuple[Flushed, ...]
    tail: tuple[Entry, ...]
    manifests: tuple[ShardManifest, ...]
    repeated: dict[int, pa.Array] = field(default_factory=dict, repr=False)
    """What :meth:`repeated_in_base` found, by version of the base table; snapshots share it."""

    def pieces(
        self,
        columns: Sequence[str],
        where: Where,
        *,
        batch_rows: int = SCAN_BATCH_ROWS,
    ) -> Iterator[tuple[Level, pa.Table]]:
        """Every stored row that matches, copies too, in pieces, with the level it lies on."""
        names = list(columns)
        for batch in batches(self.base, names, where, batch_rows):
            yield Level.BASE, pa.Table.from_batches([batch]).select(names)
        for sstable in holding(self.sstables, where):
            for batch in batches(sstable.dataset, names, where, batch_rows):
                yield Level.SSTABLE, pa.Table.from_batches([batch]).select(names)
        for entry in self.tail:
            if entry.may_hold(where):
                yield Level.TAIL, entry.read(names, where)

    def upper(self, columns: Sequence[str], where: Where) -> pa.Table:
        """The matching rows above the base table, oldest copy first, each content once."""
        wanted = with_id(columns)
        tables = all_in_parallel(
            lambda sstable: scan(sstable.dataset, wanted, where), holding(self.sstables, where)
        )
        tables.extend(entry.read(wanted, where) for entry in self.tail if entry.may_hold(where))
        if not tables:
            return empty_table(wanted)
        return dedupe(pa.concat_tables(tables, promote_options="permissive"))

    def read(self, columns: Sequence[str], where: Where) -> pa.Table:
        """The matching rows of all levels as one table; for results that fit in memory."""
        wanted = with_id(columns)
        tables = [scan(self.base, wanted, where), self.upper(columns, where)]
        return dedupe(pa.concat_tables(tables, promote_options="permissive")).select(list(columns))

    def repeated_in_base(self) -> pa.Array:
        """The event ids that the base table holds more than once; none that our merges leave."""

        def pieces() -> Iterator[pa.Table]:
            for batch in batches(self.base, ["event_id"], None):
                yield pa.Table.from_batches([batch])

        version = self.base.version
        if version not in self.repeated:
            self.repeated[version] = pa.array(repeated_ids(pieces), pa.string())
        return self.repeated[version]

    def blob(self, event_id: str) -> DatagenBlobValue | None:
        """The blob of an event, its oldest copy; only that row's bytes are read."""
        where = pc.field("event_id") == event_id
        for dataset in (self.base, *(sstable.dataset for sstable in self.sstables)):
            row_ids = scan(dataset, ["event_id"], where, row_ids=True)
            if row_ids.num_rows:
                first = row_ids.column("_rowid").to_pylist()[:1]
                try:
                    return _blob(dataset._take_rows(first, columns=list(_BLOB_COLUMNS)))
                except LANCE_ERRORS as error:
                    raise read_error(error, dataset) from error
        for rows in (entry.rows for entry in self.tail):
            # By position, so that the bytes of other rows are not touched.
            at = pc.index(rows.column("event_id"), event_id).as_py()
            if at >= 0:
                return _blob(rows.slice(at, 1))
        return None


_BLOB_COLUMNS = (BLOB_COLUMN, "payload_size", "payload_checksum")


def _blob(row: pa.Table) -> DatagenBlobValue | None:
    content, size, checksum = (row.column(name)[0].as_py() for name in _BLOB_COLUMNS)
    return None if content is None else DatagenBlobValue(content, size, checksum)


def verified_blob(data: bytes | None, reference: DatagenBlobValue, event_id: str) -> bytes:
    """The bytes, once they fit the size and the checksum that their row has for them."""
    if data is None:
        raise DamagedLogError(f"the bytes of blob event {event_id} are gone; restore the log")
    if reference.size is not None and len(data) != reference.size:
        raise DamagedLogError(
            f"blob event {event_id} has {len(data)} bytes, its row says {reference.size}"
        )
    if not blob_matches(data, reference.checksum):
        raise DamagedLogError(f"blob event {event_id} does not match its checksum")
    return data


class LogReader:
    """Makes snapshots of one log. Thread safe; opens and claims nothing but files to read."""

    def __init__(
        self, storage: LogStorage, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._storage = storage
        self._options = dict(storage_options or {}) or None
        self._lock = threading.Lock()
        self._shards: dict[str, _ShardCache] = {}
        self._sstables: dict[str, Flushed] = {}
        self._hidden: dict[str, Entry] = {}
        self._repeated: dict[int, pa.Array] = {}
        self._base = open_log(storage.uri, storage_options)

    def snapshot(self) -> Snapshot:
        """A view that holds every event acknowledged before this call.

        Raises :class:`StorageError` when the storage does not answer, or keeps changing.
        """
        for _ in range(MAX_RESTARTS):
            with self._lock:
                try:
                    return self._snapshot()
                except SourceVanishedError:
                    continue
        self.check_whole()
        raise StorageError(
            f"the shards of {self._storage.uri} changed {MAX_RESTARTS} times while they were "
            "read; try again when there is less going on"
        )

    def look_anew(self) -> None:
        """Forget what was fetched of the WAL, so that the next snapshot looks at all of it."""
        with self._lock:
            self._shards.clear()

    def check_whole(self) -> None:
        """Raise DamagedLogError, which names the cure, if the log lists files that are cut off."""
        check_whole(self._storage)

    def _snapshot(self) -> Snapshot:
        shards = list_shards(self._storage)
        if self._storage.is_local or len(shards) < 2:
            views = [self._refresh_shard(shard) for shard in shards]
        else:
            with ThreadPoolExecutor(min(len(shards), PARALLEL_REQUESTS)) as pool:
                views = list(pool.map(self._refresh_shard, shards))
        manifests = tuple(manifest for manifest, _ in views if manifest is not None)
        # Oldest first within a shard: the folder names themselves are in no order.
        tables = [
            layout.sstable_key(manifest.shard_id, table.path)
            for manifest in manifests
            for table in sorted(manifest.sstables, key=lambda table: table.generation)
        ]
        for stale in set(self._sstables).difference(tables):
            del self._sstables[stale]
            self._hidden.pop(stale, None)
        all_in_parallel(self._open_sstable, [key for key in tables if key not in self._sstables])
        sstables = tuple(self._sstables[key] for key in tables)
        try:
            # A new handle for a new version: the old one may be in use by an earlier snapshot.
            if self._base.latest_version != self._base.version:
                self._base = open_log(self._storage.uri, self._options)
        except LANCE_ERRORS as error:
            raise translate(error, f"reading {self._storage.uri}") from error
        hidden = [self._hidden[key] for key in tables if key in self._hidden]
        tail = (*hidden, *(entry for _, entries in views for entry in entries))
        for older in [version for version in self._repeated if version < self._base.version]:
            self._repeated.pop(older, None)
        return Snapshot(self._base, sstables, tail, manifests, self._repeated)

    def _refresh_shard(self, shard: str) -> tuple[ShardManifest | None, list[Entry]]:
        cache = self._shards.setdefault(shard, _ShardCache())
        for _ in range(MAX_RESTARTS):
            manifest = read_latest_manifest(self._storage, shard, known=cache.manifest)
            if manifest is None:
                return None, []
            after = max(manifest.replay_after, cache.next_position - 1)
            tail = read_wal_tail(self._storage, shard, after)
            # Only damage makes a hole, so it is looked for when a shard is first read.
            first = cache.manifest is None
            hole = find_hole(self._storage, shard, tail.next_position - 1) if first else None
            again = read_latest_manifest(self._storage, shard, known=manifest)
            cache.manifest = manifest
            if again is not None and again.replay_after >= tail.next_position:
                # Flushed past the place where we stopped: the entry that we did not find may have
                # been collected rather than not written yet.
                cache.manifest = again
                cache.entries.clear()
                cache.next_position = again.replay_after + 1
                continue
            if hole is not None:
                cache.manifest = None
                raise hole
            cache.next_position = tail.next_position
            for entry in tail.entries:
                cache.entries[entry.position] = Entry(entry.rows.select(DATAGEN_SCHEMA.names))
            for position in [p for p in cache.entries if p <= manifest.replay_after]:
                del cache.entries[position]
            return manifest, [cache.entries[position] for position in sorted(cache.entries)]
        raise SourceVanishedError(f"shard {shard} of {self._storage.uri} keeps changing")

    def _open_sstable(self, key: str) -> None:
        try:
            dataset = open_sstable(self._storage, key)
            if has_hidden_rows(dataset):
                self._hidden[key] = Entry(hidden_rows(dataset))
        except LANCE_ERRORS as error:
            if is_vanished(error):
                raise SourceVanishedError(f"{key} was collected while it was read") from error
            raise translate(error, f"reading {key} of {self._storage.uri}") from error
        self._sstables[key] = Flushed(dataset)


def repeated_ids(pieces: Callable[[], Iterator[pa.Table]]) -> list[str]:
    """The event ids that stand in more than one row of what ``pieces`` gives, each time anew.

    One pass over one column, with 8 bytes of memory a row; a second one where there are any.
    """
    hashes = [np.zeros(0, np.int64)]
    for piece in pieces():
        hashes.append(hashes_of(piece.column("event_id").to_pylist()))
    ordered = np.sort(np.concatenate(hashes))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return []
    counts = Counter(
        event_id
        for piece in pieces()
        for event_id in piece.column("event_id").to_pylist()
        if hash(event_id) in suspects
    )
    return [event_id for event_id, count in counts.items() if count > 1]


def dedupe(rows: pa.Table) -> pa.Table:
    """Each content once: of identical rows the first stays, differing copies of an id all stay."""
    ids = rows.column("event_id")
    if rows.num_rows == 0 or len(pc.unique(ids)) == rows.num_rows:
        return rows
    counts = pc.value_counts(ids)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    is_copy = pc.is_in(ids, value_set=repeated)
    numbered = rows.append_column("_row", pa.array(range(rows.num_rows), pa.int64()))
    drop: list[int] = []
    seen: set[tuple[object, ...]] = set()
    for row in numbered.filter(is_copy).to_pylist():
        number = row.pop("_row")
        content = _content(row)
        if content in seen:
            drop.append(number)
        seen.add(content)
    if not drop:
        return rows
    keep = pc.invert(pc.is_in(numbered.column("_row"), value_set=pa.array(drop, pa.int64())))
    return rows.filter(keep)


def _content(row: dict[str, object]) -> tuple[object, ...]:
    # NaN is not equal to itself, but a stored NaN is the same content as another.
    return tuple(repr(v) if isinstance(v, float) else v for v in row.values())


def with_id(columns: Sequence[str]) -> list[str]:
    """These columns, and ``event_id`` if it is not among them."""
    return list(columns) if "event_id" in columns else ["event_id", *columns]


def empty_table(columns: Sequence[str]) -> pa.Table:
    """No rows, with these columns of the log."""
    return pa.schema([DATAGEN_SCHEMA.field(name) for name in columns]).empty_table()
