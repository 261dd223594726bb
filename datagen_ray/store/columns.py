"""The events of many items as small numbers: what deciding their states needs, 30 bytes a row.

A log's text columns hold few different words, and each item id many times, mostly in rows that
follow one another. Rows are taken in piece by piece, every text becomes a number, and only the
numbers are kept, so that memory grows with the number of events by little and with the number of
items by their ids. Ids are numbered by Arrow, never made into Python objects. Pieces are encoded by
several threads, as Arrow does without the interpreter's lock, and put together in order by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.log.events import (
    DATAGEN_SCHEMA_VERSION,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
)
from datagen_ray.log.values import VALUE_KINDS
from datagen_ray.store.parallel import in_parallel

Numbers: TypeAlias = "npt.NDArray[Any]"
Marks: TypeAlias = "npt.NDArray[np.bool_]"

EVENT_TYPES = tuple(member.value for member in DatagenEventType)
STATUSES = tuple(member.value for member in DatagenItemStatus)
STEP_KINDS = tuple(member.value for member in DatagenStepKind)
KINDS = tuple(sorted(VALUE_KINDS))

ABSENT = -1
"""The number of a null."""

LIFECYCLE_COLUMNS: tuple[str, ...] = (
    "item_id",
    "item_seq",
    "event_type",
    "status",
    "schema_version",
)
"""What deciding a status needs of each event."""

DETAIL_COLUMNS: tuple[str, ...] = (
    "step_name",
    "step_kind",
    "step_index",
    "field_name",
    "field_type",
    "codec_version",
    "value_kind",
)
"""What it takes besides to tell whether the fold refuses an item for its steps or fields."""

FAILURE_COLUMNS: tuple[str, ...] = ("root_item_id", "run_id", "error_type")


@dataclass(frozen=True)
class _Encoded:
    """One piece of a text column: ``texts[indices]`` where it is not null."""

    texts: list[str]
    indices: Numbers
    present: Marks | None

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Encoded:
        # Hashing is what costs, and many columns are mostly null.
        present = _present(column) if column.null_count else None
        encoded = column.drop_null().combine_chunks().dictionary_encode()
        return cls(encoded.dictionary.to_pylist(), encoded.indices.to_numpy(), present)


class Words:
    """Numbers the different texts of one column, in order of first sight, behind the known ones."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.texts: list[str] = list(known)
        self._known = len(self.texts)
        self._dtype = np.int8 if self._known else np.int32
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self._parts: list[Numbers] = []

    def add(self, piece: _Encoded) -> None:
        """Take in one piece of the column."""
        table = np.array([self._number(text) for text in piece.texts], self._dtype)
        found = table[piece.indices]
        if piece.present is None:
            self._parts.append(found)
            return
        numbered = np.full(len(piece.present), ABSENT, self._dtype)
        numbered[piece.present] = found
        self._parts.append(numbered)

    def numbers(self) -> Numbers:
        """One number a row of all that was taken in; :data:`ABSENT` for null."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, self._dtype)

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            # Words that the format does not have are all the same here.
            number = self._numbers[text] = self._known or len(self.texts)
            if not self._known:
                self.texts.append(text)
        return number


@dataclass(frozen=True)
class _Runs:
    """One piece of the column of item ids: each id of a run of equal neighbours, and its length."""

    ids: list[pa.Array]
    lengths: list[Numbers]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Runs:
        runs = [pc.run_end_encode(chunk) for chunk in column.chunks if len(chunk)]
        return cls(
            # Large: the ids of a long log may be more than 2 GB together.
            [run.values.cast(pa.large_string()) for run in runs],
            [np.diff(run.run_ends.to_numpy(), prepend=0) for run in runs],
        )


class ItemIds:
    """Numbers item ids in order of first sight. Equal neighbours are hashed once."""

    _UNNUMBERED_RUNS = 1 << 20

    def __init__(self) -> None:
        self._ids = pa.array([], pa.large_string())
        self._runs: list[pa.Array] = []
        self._run_count = 0
        self._numbers: list[Numbers] = []
        self._lengths: list[Numbers] = []

    def add(self, piece: _Runs) -> None:
        """Take in one piece of the column, which has no nulls."""
        self._runs.extend(piece.ids)
        self._lengths.extend(piece.lengths)
        self._run_count += sum(map(len, piece.ids))
        # What is numbered needs no text any more; doubling keeps the work in proportion.
        if self._run_count > max(self._UNNUMBERED_RUNS, len(self._ids)):
            self._number()

    def numbered(self) -> tuple[pa.Array, Numbers]:
        """All different ids, and one number a row of all that was taken in."""
        self._number()
        if not self._numbers:
            return self._ids, np.zeros(0, np.int32)
        numbers = np.concatenate(self._numbers)
        return self._ids, np.repeat(numbers, np.concatenate(self._lengths))

    def _number(self) -> None:
        if not self._runs:
            return
        # The chunks of one column share one dictionary; those already numbered come first in it.
        encoded = pa.chunked_array([self._ids, *self._runs]).dictionary_encode().chunks
        numbers = np.concatenate([chunk.indices.to_numpy() for chunk in encoded])
        self._numbers.append(numbers[len(self._ids) :])
        self._ids = encoded[-1].dictionary
        self._runs, self._run_count = [], 0


@dataclass
class RowDetails:
    """The columns of :data:`DETAIL_COLUMNS`, one entry a row."""

    step_kind: Numbers
    value_kind: Numbers
    step_name: Numbers
    field_name: Numbers
    field_type: Numbers
    codec_version: Numbers
    has_codec_version: Marks
    has_step_index: Marks
    step_names: list[str]


@dataclass
class EventColumns:
    """One entry a row. Made by :meth:`of`; every array is as long as there are rows.

    ``item`` numbers ``ids``. ``kind`` and ``status``, and of the details ``step_kind`` and
    ``value_kind``, number the format's words; a number at or over their count is a word that the
    format does not have. ``failed`` has :data:`FAILURE_COLUMNS` and ``item`` of the FAILED rows.
    """

    ids: pa.Array
    item: Numbers
    seq: Numbers
    kind: Numbers
    status: Numbers
    is_newer: Marks
    details: RowDetails | None = None
    is_root: Marks | None = None
    failed: pa.Table | None = None

    def __len__(self) -> int:
        return len(self.item)

    @classmethod
    def of(cls, pieces: Iterable[pa.Table], columns: Iterable[str]) -> EventColumns:
        """Take in tables that have ``columns``: at least :data:`LIFECYCLE_COLUMNS`.

        :data:`DETAIL_COLUMNS`, ``parent_item_id`` and :data:`FAILURE_COLUMNS` are taken in when
        they are among them.
        """
        given = frozenset(columns)
        taken = _Taken()
        for piece in in_parallel(lambda rows: _Piece.of(rows, given), pieces):
            taken.add(piece)
        return taken.columns(given)


_KNOWN_WORDS: Mapping[str, tuple[str, ...]] = {
    "event_type": EVENT_TYPES,
    "status": STATUSES,
    "step_kind": STEP_KINDS,
    "value_kind": KINDS,
}
_WORD_COLUMNS = (*_KNOWN_WORDS, "step_name", "field_name", "field_type")


@dataclass(frozen=True)
class _Piece:
    """What is kept of one table."""

    items: _Runs
    words: Mapping[str, _Encoded]
    arrays: Mapping[str, Numbers]
    failed: pa.Table | None

    @classmethod
    def of(cls, rows: pa.Table, given: frozenset[str]) -> _Piece:
        arrays: dict[str, Numbers] = {
            "seq": rows.column("item_seq").to_numpy(),
            "is_newer": rows.column("schema_version").to_numpy() > DATAGEN_SCHEMA_VERSION,
        }
        if "parent_item_id" in given:
            arrays["is_root"] = ~_present(rows.column("parent_item_id"))
        if "codec_version" in given:
            version = rows.column("codec_version")
            arrays["codec_version"] = version.fill_null(0).to_numpy()
            arrays["has_codec_version"] = _present(version)
            arrays["has_step_index"] = _present(rows.column("step_index"))
        failed = None
        if given.issuperset(FAILURE_COLUMNS):
            is_failed = pc.equal(rows.column("event_type"), DatagenEventType.FAILED.value)
            failed = rows.select(list(FAILURE_COLUMNS)).filter(is_failed)
        return cls(
            items=_Runs.of(rows.column("item_id")),
            words={name: _Encoded.of(rows.column(name)) for name in _WORD_COLUMNS if name in given},
            arrays=arrays,
            failed=failed,
        )


class _Taken:
    """All pieces together."""

    def __init__(self) -> None:
        self._items = ItemIds()
        self._words = {name: Words(_KNOWN_WORDS.get(name, ())) for name in _WORD_COLUMNS}
        self._arrays: defaultdict[str, list[Numbers]] = defaultdict(list)
        self._failed: list[pa.Table] = []

    def add(self, piece: _Piece) -> None:
        self._items.add(piece.items)
        for name, encoded in piece.words.items():
            self._words[name].add(encoded)
        for name, array in piece.arrays.items():
            self._arrays[name].append(array)
        if piece.failed is not None:
            self._failed.append(piece.failed)

    def columns(self, given: frozenset[str]) -> EventColumns:
        ids, item = self._items.numbered()
        rows = EventColumns(
            ids=ids,
            item=item,
            seq=self._array("seq"),
            kind=self._words["event_type"].numbers(),
            status=self._words["status"].numbers(),
            is_newer=self._array("is_newer", bool),
            details=self._details() if given.issuperset(DETAIL_COLUMNS) else None,
            is_root=self._array("is_root", bool) if "parent_item_id" in given else None,
        )
        if self._failed:
            of_failed = item[rows.kind == EVENT_TYPES.index(DatagenEventType.FAILED.value)]
            table = pa.concat_tables(self._failed, promote_options="permissive")
            rows.failed = table.append_column("item", pa.array(of_failed, pa.int32()))
        return rows

    def _details(self) -> RowDetails:
        return RowDetails(
            step_kind=self._words["step_kind"].numbers(),
            value_kind=self._words["value_kind"].numbers(),
            step_name=self._words["step_name"].numbers(),
            field_name=self._words["field_name"].numbers(),
            field_type=self._words["field_type"].numbers(),
            codec_version=self._array("codec_version"),
            has_codec_version=self._array("has_codec_version", bool),
            has_step_index=self._array("has_step_index", bool),
            step_names=self._words["step_name"].texts,
        )

    def _array(self, name: str, dtype: type[Any] = np.int64) -> Numbers:
        # Popped, so that the pieces do not outlive what is made of them.
        parts = self._arrays.pop(name, [])
        return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _present(column: pa.ChunkedArray) -> Marks:
    if column.null_count == 0:
        return np.ones(len(column), bool)
    return np.asarray(column.is_valid().to_numpy()).astype(bool)
