"""The levels that rows lie on, and which of their parts can hold an item.

SSTables and WAL entries are immutable and many, and the rows of one item lie in few of them. What a
reader has fetched therefore keeps, once somebody asks for an item, the sorted hashes of the ids in
it: a read of an item opens only the parts that can hold it, at about two microseconds for each of
the others, where a scan that finds nothing takes about two milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import StorageError
from datagen_ray.log.schema import BLOB_COLUMN
from datagen_ray.store.lance_errors import LANCE_ERRORS, is_vanished, translate
from datagen_ray.store.parallel import all_in_parallel

SCAN_BATCH_ROWS = 65_536

KeyColumn: TypeAlias = Literal["item_id", "root_item_id"]
_Hashes: TypeAlias = "npt.NDArray[np.int64]"


class SourceVanishedError(StorageError):
    """An SSTable was drained and collected between listing and reading it; read again."""


class Level(str, Enum):
    """Where rows lie, from the oldest to the newest."""

    BASE = "base"
    SSTABLE = "sstable"
    TAIL = "tail"


@dataclass(frozen=True)
class Keys:
    """The filter that lets pass the rows whose ``column`` is one of ``ids``."""

    column: KeyColumn
    ids: tuple[str, ...]

    @cached_property
    def expression(self) -> pc.Expression:
        if len(self.ids) == 1:
            return pc.field(self.column) == self.ids[0]
        return pc.field(self.column).isin(pa.array(self.ids, pa.string()))

    @cached_property
    def hashes(self) -> _Hashes:
        """Sorted."""
        return np.sort(hashes_of(self.ids))


def hashes_of(ids: Sequence[str]) -> _Hashes:
    """Python's own hashes, which only this process can compare."""
    return np.fromiter(map(hash, ids), np.int64, len(ids))


def are_among(ordered: _Hashes, hashes: _Hashes) -> npt.NDArray[np.bool_]:
    """Which of ``hashes`` are in ``ordered``, which is sorted."""
    if len(ordered) == 0:
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[places] == hashes
    return found


Where: TypeAlias = "pc.Expression | Keys | None"
"""Which rows: a pyarrow expression over the log's columns, items or roots by their ids, or all."""


def expression_of(where: Where) -> pc.Expression | None:
    """The filter as Lance and pyarrow take it."""
    return where.expression if isinstance(where, Keys) else where


_KEY_COLUMNS: tuple[KeyColumn, ...] = ("item_id", "root_item_id")


class HeldKeys:
    """The sorted hashes of the ids that one immutable part holds."""

    def __init__(self, rows: pa.Table) -> None:
        self._sorted = {
            name: np.sort(hashes_of(pc.unique(rows.column(name)).to_pylist()))
            for name in _KEY_COLUMNS
        }

    def may_hold(self, keys: Keys) -> bool:
        """Whether the part can have rows of ``keys``."""
        few, many = sorted((self._sorted[keys.column], keys.hashes), key=len)
        return bool(are_among(many, few).any())


@dataclass(frozen=True, eq=False)
class Entry:
    """Rows in memory: a WAL entry, or those that an SSTable hides."""

    rows: pa.Table

    @cached_property
    def keys(self) -> HeldKeys:
        return HeldKeys(self.rows)

    def may_hold(self, where: Where) -> bool:
        return not isinstance(where, Keys) or self.keys.may_hold(where)

    def read(self, columns: Sequence[str], where: Where) -> pa.Table:
        """The matching rows. Filtering copies, so it must not meet unwanted blobs."""
        rows = self.rows
        if where is not None:
            if BLOB_COLUMN not in columns:
                rows = rows.drop_columns([BLOB_COLUMN])
            rows = rows.filter(expression_of(where))
        return rows.select(list(columns))


@dataclass(frozen=True, eq=False)
class Flushed:
    """One SSTable: an immutable ``lance.LanceDataset``."""

    dataset: Any

    @cached_property
    def keys(self) -> HeldKeys:
        return HeldKeys(scan(self.dataset, _KEY_COLUMNS, None))

    def may_hold(self, where: Where) -> bool:
        return not isinstance(where, Keys) or self.keys.may_hold(where)


def holding(sstables: Sequence[Flushed], where: Where) -> list[Flushed]:
    """The SSTables that can hold matching rows. Raises what reading one raises."""
    if isinstance(where, Keys):
        unread = [sstable for sstable in sstables if "keys" not in vars(sstable)]
        all_in_parallel(lambda sstable: sstable.keys, unread)
    return [sstable for sstable in sstables if sstable.may_hold(where)]


def scan(dataset: Any, columns: Sequence[str], where: Where, *, row_ids: bool = False) -> pa.Table:
    """The matching rows of a Lance dataset as one table."""
    try:
        return dataset.scanner(
            columns=list(columns), filter=expression_of(where), with_row_id=row_ids
        ).to_table()
    except LANCE_ERRORS as error:
        raise read_error(error, dataset) from error


def batches(
    dataset: Any, columns: Sequence[str], where: Where, batch_rows: int = SCAN_BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The matching rows of a Lance dataset, streaming."""
    try:
        # Reading the filtered columns first, and the others after, pays for filters that leave
        # little. Those have an index here; the others leave much.
        yield from dataset.scanner(
            columns=list(columns),
            filter=expression_of(where),
            batch_size=batch_rows,
            late_materialization=False,
        ).to_batches()
    except LANCE_ERRORS as error:
        raise read_error(error, dataset) from error


def read_error(error: Exception, dataset: Any) -> Exception:
    """What a failed read of a dataset is raised as."""
    if is_vanished(error):
        return SourceVanishedError(f"{dataset.uri} was collected while it was read")
    return translate(error, f"reading {dataset.uri}")
