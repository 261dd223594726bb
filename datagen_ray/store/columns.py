"""The events of many items as small numbers: what deciding their states needs, 30 bytes a row.

A log's text columns hold few different words, and each item id many times. Rows are taken in piece
by piece, every text becomes a number, and only the numbers are kept, so that memory grows with the
number of events by little and with the number of items by their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


class Words:
    """Numbers the different texts of one column, in order of first sight, behind the known ones."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.texts: list[str] = list(known)
        self.known = len(self.texts)
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def numbers(self, column: pa.ChunkedArray, dtype: type[np.signedinteger[Any]]) -> Numbers:
        """One number a row; :data:`ABSENT` for null."""
        parts = [self._of_chunk(chunk, dtype) for chunk in column.chunks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def _of_chunk(self, chunk: Any, dtype: type[np.signedinteger[Any]]) -> Numbers:
        encoded = chunk.dictionary_encode()
        numbers, texts = self._numbers, self.texts
        table = np.empty(len(encoded.dictionary) + 1, dtype)
        for place, text in enumerate(encoded.dictionary.to_pylist()):
            number = numbers.get(text)
            if number is None:
                number = numbers[text] = len(texts)
                texts.append(text)
            table[place] = number
        table[-1] = ABSENT
        # A null has no index; -1 picks the last place of the table.
        indices = encoded.indices
        if indices.null_count:
            indices = indices.fill_null(-1)
        numbered: Numbers = table[indices.to_numpy(zero_copy_only=False)]
        return numbered


@dataclass
class _Column:
    words: Words
    dtype: type[np.signedinteger[Any]]


@dataclass
class EventColumns:
    """One entry a row. Made by :meth:`of`; every array is as long as there are rows.

    ``item`` numbers ``ids``. ``kind``, ``status``, ``step_kind`` and ``value_kind`` number the
    format's words; a number at or over their count is a word that the format does not have.
    """

    ids: list[str]
    item: Numbers
    seq: Numbers
    kind: Numbers
    status: Numbers
    step_kind: Numbers
    value_kind: Numbers
    step_name: Numbers
    field_name: Numbers
    field_type: Numbers
    codec_version: Numbers
    has_codec_version: Marks
    has_step_index: Marks
    is_newer: Marks
    is_root: Marks
    step_names: list[str] = field(default_factory=list)
    failed: pa.Table | None = None

    def __len__(self) -> int:
        return len(self.item)

    @classmethod
    def of(cls, pieces: Iterable[pa.Table], *, with_failures: bool = False) -> EventColumns:
        """Take in tables that have the columns of :data:`STATE_COLUMNS`.

        With ``with_failures`` also :data:`FAILURE_COLUMNS`, which are kept for FAILED rows.
        """
        items = Words()
        columns = {
            "event_type": _Column(Words(EVENT_TYPES), np.int8),
            "status": _Column(Words(STATUSES), np.int8),
            "step_kind": _Column(Words(STEP_KINDS), np.int8),
            "value_kind": _Column(Words(KINDS), np.int8),
            "step_name": _Column(Words(), np.int32),
            "field_name": _Column(Words(), np.int32),
            "field_type": _Column(Words(), np.int32),
        }
        parts: dict[str, list[Numbers]] = {name: [] for name in (*columns, *_OTHER_PARTS)}
        failed: list[pa.Table] = []
        for piece in pieces:
            if piece.num_rows == 0:
                continue
            for name, column in columns.items():
                numbers = column.words.numbers(piece.column(name), np.int32)
                # Words that the format does not have are few, and all the same here.
                if column.dtype is np.int8:
                    numbers = np.minimum(numbers, column.words.known)
                parts[name].append(numbers.astype(column.dtype))
            item = items.numbers(piece.column("item_id"), np.int32)
            parts["item"].append(item)
            parts["seq"].append(piece.column("item_seq").to_numpy())
            version = piece.column("codec_version")
            parts["codec_version"].append(version.fill_null(0).to_numpy())
            parts["has_codec_version"].append(_present(version))
            parts["has_step_index"].append(_present(piece.column("step_index")))
            newer = piece.column("schema_version").to_numpy() > DATAGEN_SCHEMA_VERSION
            parts["is_newer"].append(newer)
            parts["is_root"].append(~_present(piece.column("parent_item_id")))
            if with_failures:
                failed.append(_failures(piece, parts["event_type"][-1], item))
        arrays = {
            name: np.concatenate(found) if found else np.zeros(0, _dtype(name))
            for name, found in parts.items()
        }
        return cls(
            ids=items.texts,
            kind=arrays.pop("event_type"),
            step_names=columns["step_name"].words.texts,
            failed=pa.concat_tables(failed, promote_options="permissive") if failed else None,
            **arrays,
        )


_OTHER_PARTS = (
    "item",
    "seq",
    "codec_version",
    "has_codec_version",
    "has_step_index",
    "is_newer",
    "is_root",
)

STATE_COLUMNS: tuple[str, ...] = (
    "item_id",
    "parent_item_id",
    "item_seq",
    "event_type",
    "step_name",
    "step_kind",
    "step_index",
    "field_name",
    "field_type",
    "codec_version",
    "value_kind",
    "status",
    "schema_version",
)
"""What deciding a status, and whether an item is damaged, needs of each event."""

FAILURE_COLUMNS: tuple[str, ...] = ("root_item_id", "run_id", "error_type")


def _dtype(name: str) -> type[np.generic]:
    return np.bool_ if name.startswith(("has_", "is_")) else np.int64


def _present(column: pa.ChunkedArray) -> Marks:
    if column.null_count == 0:
        return np.ones(len(column), bool)
    return np.asarray(column.is_valid().to_numpy()).astype(bool)


def _failures(piece: pa.Table, kind: Numbers, item: Numbers) -> pa.Table:
    rows = kind == EVENT_TYPES.index(DatagenEventType.FAILED.value)
    table = piece.select(list(FAILURE_COLUMNS)).filter(pa.array(rows))
    return table.append_column("item", pa.array(item[rows], pa.int32()))
