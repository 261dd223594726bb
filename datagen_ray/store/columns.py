"""The events of many items as small numbers: what deciding their states needs, 30 bytes a row.

A log's text columns hold few different words, and each item id many times, mostly in rows that
follow one another. Rows are taken in piece by piece, every text becomes a number, and only the
numbers are kept, so that memory grows with the number of events by little and with the number of
items by their ids. Ids are numbered by Arrow, never made into Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


class Words:
    """Numbers the different texts of one column, in order of first sight, behind the known ones."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.texts: list[str] = list(known)
        self.known = len(self.texts)
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self._parts: list[Numbers] = []

    def add(self, column: pa.ChunkedArray) -> None:
        """Take in one piece of the column."""
        self._parts.extend(self._of_chunk(chunk) for chunk in column.chunks)

    def numbers(self) -> Numbers:
        """One number a row of all that was taken in; :data:`ABSENT` for null."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)

    def _of_chunk(self, chunk: Any) -> Numbers:
        # Hashing is what costs, and many columns are mostly null.
        texts = chunk.drop_null() if chunk.null_count else chunk
        encoded = texts.dictionary_encode()
        table = np.empty(len(encoded.dictionary), self._dtype)
        for place, text in enumerate(encoded.dictionary.to_pylist()):
            table[place] = self._number(text)
        found: Numbers = table[encoded.indices.to_numpy()]
        if not chunk.null_count:
            return found
        numbered = np.full(len(chunk), ABSENT, self._dtype)
        numbered[chunk.is_valid().to_numpy(zero_copy_only=False)] = found
        return numbered

    @property
    def _dtype(self) -> type[np.signedinteger[Any]]:
        return np.int8 if self.known else np.int32

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            # Words that the format does not have are few, and all the same here.
            number = self._numbers[text] = self.known if self.known else len(self.texts)
            if not self.known:
                self.texts.append(text)
        return number


class ItemIds:
    """Numbers item ids in order of first sight. Equal neighbours are hashed once."""

    _UNNUMBERED_RUNS = 1 << 20

    def __init__(self) -> None:
        self._ids = pa.array([], pa.large_string())
        self._runs: list[pa.Array] = []
        self._run_count = 0
        self._numbers: list[Numbers] = []
        self._lengths: list[Numbers] = []

    def add(self, column: pa.ChunkedArray) -> None:
        """Take in one piece of the column, which has no nulls."""
        for chunk in column.chunks:
            if len(chunk) == 0:
                continue
            runs = pc.run_end_encode(chunk)
            # Large: the ids of a long log may be more than 2 GB together.
            self._runs.append(runs.values.cast(pa.large_string()))
            self._lengths.append(np.diff(runs.run_ends.to_numpy(), prepend=0))
            self._run_count += len(runs.values)
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
        given = set(columns)
        items, kind, status = ItemIds(), Words(EVENT_TYPES), Words(STATUSES)
        details = _Details() if given.issuperset(DETAIL_COLUMNS) else None
        with_failures = given.issuperset(FAILURE_COLUMNS)
        seq: list[Numbers] = []
        newer: list[Marks] = []
        roots: list[Marks] = []
        failed: list[pa.Table] = []
        for piece in pieces:
            if piece.num_rows == 0:
                continue
            items.add(piece.column("item_id"))
            kind.add(piece.column("event_type"))
            status.add(piece.column("status"))
            seq.append(piece.column("item_seq").to_numpy())
            newer.append(piece.column("schema_version").to_numpy() > DATAGEN_SCHEMA_VERSION)
            if "parent_item_id" in given:
                roots.append(~_present(piece.column("parent_item_id")))
            if details is not None:
                details.add(piece)
            if with_failures:
                is_failed = pc.equal(piece.column("event_type"), DatagenEventType.FAILED.value)
                failed.append(piece.select(list(FAILURE_COLUMNS)).filter(is_failed))
        ids, item = items.numbered()
        rows = cls(
            ids=ids,
            item=item,
            seq=np.concatenate(seq) if seq else np.zeros(0, np.int64),
            kind=kind.numbers().astype(np.int8, copy=False),
            status=status.numbers().astype(np.int8, copy=False),
            is_newer=_joined(newer),
            details=None if details is None else details.taken(),
            is_root=_joined(roots) if "parent_item_id" in given else None,
        )
        if failed:
            of_failed = item[rows.kind == EVENT_TYPES.index(DatagenEventType.FAILED.value)]
            table = pa.concat_tables(failed, promote_options="permissive")
            rows.failed = table.append_column("item", pa.array(of_failed, pa.int32()))
        return rows


@dataclass
class _Details:
    """Takes in the columns of :class:`RowDetails`."""

    step_kind: Words = field(default_factory=lambda: Words(STEP_KINDS))
    value_kind: Words = field(default_factory=lambda: Words(KINDS))
    step_name: Words = field(default_factory=Words)
    field_name: Words = field(default_factory=Words)
    field_type: Words = field(default_factory=Words)
    codec_version: list[Numbers] = field(default_factory=list)
    has_codec_version: list[Marks] = field(default_factory=list)
    has_step_index: list[Marks] = field(default_factory=list)

    _WORDS = ("step_kind", "value_kind", "step_name", "field_name", "field_type")

    def add(self, piece: pa.Table) -> None:
        for name in self._WORDS:
            getattr(self, name).add(piece.column(name))
        version = piece.column("codec_version")
        self.codec_version.append(version.fill_null(0).to_numpy())
        self.has_codec_version.append(_present(version))
        self.has_step_index.append(_present(piece.column("step_index")))

    def taken(self) -> RowDetails:
        versions = self.codec_version
        return RowDetails(
            **{name: getattr(self, name).numbers() for name in self._WORDS},
            codec_version=np.concatenate(versions) if versions else np.zeros(0, np.int32),
            has_codec_version=_joined(self.has_codec_version),
            has_step_index=_joined(self.has_step_index),
            step_names=self.step_name.texts,
        )


def _joined(marks: list[Marks]) -> Marks:
    return np.concatenate(marks) if marks else np.zeros(0, bool)


def _present(column: pa.ChunkedArray) -> Marks:
    if column.null_count == 0:
        return np.ones(len(column), bool)
    return np.asarray(column.is_valid().to_numpy()).astype(bool)
