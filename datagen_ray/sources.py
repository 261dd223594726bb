"""Where the roots of a pipeline come from: Parquet, JSONL, CSV, Lance, Python rows, data sets.

A source yields rows one at a time and can be read more than once: :func:`count_keys` reads the
keys alone first, so that a missing, empty or repeated key is an error before anything is written;
then the driver streams the rows. Neither holds the rows in memory.

A row's key becomes the id of its root. Keys are text or integers; ``5`` and ``"5"`` are the same
key, and a source that has both is refused. Without a key column the row's number is its key.

Dates, times, decimals and UUIDs are handed to a pipeline as text, since a field of the log is a
number, text, bytes or JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from datagen_ray.errors import InvalidItemIdError, SourceError
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.store.rows import open_rows

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Iterable[Row] | Callable[[], Iterable[Row]]

_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".lance": "lance",
}
_COMPRESSED = (".gz", ".zst", ".bz2")
_BATCH_ROWS = 1024
_MAX_LISTED = 5


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read again from the start."""

    @property
    def name(self) -> str:
        """How an error speaks of the source."""

    def rows(self) -> Iterator[Row]:
        """All rows, in an order that does not change."""

    def columns(self, column: str | None) -> Iterator[Row]:
        """The rows with that one column alone where the format allows it; as many as ``rows``."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One root: its id, made safe, and its fields."""

    root_id: str
    fields: Row


def open_source(
    source: str | Path | Rows | RowSource, *, storage_options: Mapping[str, str] | None = None
) -> RowSource:
    """The source for a path, a URI, or Python rows.

    A path is one file, or a folder of files of one type. A data set of Ray Data or of Hugging
    Face is known by its ``select_columns``. Python rows are a sequence, a callable
    that returns an iterable, or an iterator, which is read into memory as it can be read once only.
    Raises :class:`SourceError` when it is missing or of a type that is not known.
    """
    if isinstance(source, str | Path):
        return _open_path(str(source), storage_options)
    if isinstance(source, RowSource):
        return source
    if callable(getattr(source, "select_columns", None)):
        return _DataSetSource(source)
    if callable(source):
        return _PythonSource(source)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise SourceError(
            f"a source of type {type(source).__name__} has no rows; "
            "hand in a path, a list of dicts, or a function that returns them"
        )
    if isinstance(source, Iterator):
        kept = list(source)
        return _PythonSource(lambda: kept)
    return _PythonSource(lambda: source)


def count_keys(source: RowSource, key: str | None) -> int:
    """The number of rows, once every key was found usable and unique.

    Raises :class:`SourceError` that names the offending rows. Keeps one integer a row.
    """
    seen: set[int] = set()
    suspects: set[int] = set()
    total = 0
    for index, row in enumerate(source.columns(key)):
        digest = hash(_root_id(source, row, key, index))
        if digest in seen:
            suspects.add(digest)
        seen.add(digest)
        total += 1
    if suspects:
        _refuse_repeated(source, key, suspects)
    return total


def source_rows(source: RowSource, key: str | None) -> Iterator[SourceRow]:
    """The roots of the source, one after the other."""
    for index, row in enumerate(source.rows()):
        root_id = _root_id(source, row, key, index)
        yield SourceRow(root_id, {name: _plain(value) for name, value in row.items()})


def _refuse_repeated(source: RowSource, key: str | None, suspects: set[int]) -> None:
    """Tells keys that repeat from texts that merely hash alike, by a second look."""
    rows: dict[str, list[int]] = {}
    for index, row in enumerate(source.columns(key)):
        root_id = _root_id(source, row, key, index)
        if hash(root_id) in suspects:
            rows.setdefault(root_id, []).append(index)
    repeated = {root_id: found for root_id, found in rows.items() if len(found) > 1}
    if not repeated:
        return
    listed = "; ".join(
        f"{root_id!r} in rows {', '.join(map(str, found[:_MAX_LISTED]))}"
        for root_id, found in list(repeated.items())[:_MAX_LISTED]
    )
    more = f" and {len(repeated) - _MAX_LISTED} more" if len(repeated) > _MAX_LISTED else ""
    raise SourceError(
        f"{source.name}: {len(repeated)} repeated key(s) in column {key!r}: {listed}{more}; "
        "make keys unique, or leave --key out to use the row number"
    )


def _root_id(source: RowSource, row: object, key: str | None, index: int) -> str:
    if not isinstance(row, Mapping):
        raise SourceError(
            f"{source.name}: row {index} is a {type(row).__name__}; a row is a mapping of fields"
        )
    if key is None:
        return str(index)
    if key not in row:
        raise SourceError(
            f"{source.name}: row {index} has no column {key!r} for the key; "
            f"it has {', '.join(map(repr, row)) or 'none'}"
        )
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        if value is None:
            raise SourceError(
                f"{source.name}: row {index} has an empty key in column {key!r}; "
                "give every row a key, or leave --key out to use the row number"
            )
        raise SourceError(
            f"{source.name}: row {index} has a key of type {type(value).__name__} in column "
            f"{key!r}; keys are text or integers"
        )
    text = str(value)
    if not text or "\0" in text:
        what = "an empty key" if not text else f"the key {text!r}, which holds a NUL,"
        raise SourceError(
            f"{source.name}: row {index} has {what} in column {key!r}; "
            "give every row a key, or leave --key out to use the row number"
        )
    try:
        return str(DatagenItemId.from_source_key(text))
    except InvalidItemIdError as error:
        raise SourceError(f"{source.name}: row {index}, column {key!r}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class _PythonSource:
    make: Callable[[], Iterable[Row]]
    name: str = "the rows handed in"

    def rows(self) -> Iterator[Row]:
        return iter(self.make())

    def columns(self, column: str | None) -> Iterator[Row]:  # noqa: ARG002 - no cheaper way
        return self.rows()


@dataclass(frozen=True, slots=True)
class _DataSetSource:
    """A data set of Ray Data (``iter_rows``) or of Hugging Face (iterated), by what it can do.

    Its rows must come in the same order each time where their numbers are the keys.
    """

    data: Any
    name: str = "the data set handed in"

    def rows(self) -> Iterator[Row]:
        return self._iterate(self.data)

    def columns(self, column: str | None) -> Iterator[Row]:
        if column is None:
            return self.rows()
        names = _column_names(self.data)
        if column not in names:
            raise SourceError(
                f"{self.name}: no column {column!r} for the key; it has "
                f"{', '.join(map(repr, names)) or 'none'}"
            )
        return self._iterate(self.data.select_columns([column]))

    def _iterate(self, data: Any) -> Iterator[Row]:
        rows = getattr(data, "iter_rows", None)
        return iter(data if rows is None else rows())


def _column_names(data: Any) -> list[str]:
    """Hugging Face has them as an attribute, which a stream may not know; Ray Data is asked."""
    columns = getattr(data, "columns", None)
    if callable(columns):
        return list(columns() or ())
    return list(getattr(data, "column_names", None) or ())


@dataclass(frozen=True, slots=True)
class _FileSource:
    """Files of one type on a file system that pyarrow knows."""

    name: str
    kind: str
    filesystem: pafs.FileSystem
    paths: Sequence[str]

    def rows(self) -> Iterator[Row]:
        return self._read(None)

    def columns(self, column: str | None) -> Iterator[Row]:
        return self._read([column] if column is not None else [])

    def _read(self, columns: list[str] | None) -> Iterator[Row]:
        for path in self.paths:
            try:
                if self.kind == "parquet":
                    yield from self._parquet(path, columns)
                elif self.kind == "jsonl":
                    yield from self._jsonl(path)
                else:
                    yield from self._csv(path, "\t" if self.kind == "tsv" else ",")
            except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
                raise SourceError(
                    f"{path}: cannot be read as {self.kind}: {_first_line(error)}"
                ) from error

    def _parquet(self, path: str, columns: list[str] | None) -> Iterator[Row]:
        with pq.ParquetFile(path, filesystem=self.filesystem) as file:
            names = file.schema_arrow.names
            missing = [name for name in columns or () if name not in names]
            if missing:
                raise SourceError(
                    f"{path}: no column {missing[0]!r} for the key; "
                    f"it has {', '.join(map(repr, names))}"
                )
            if columns == []:
                yield from ({} for _ in range(file.metadata.num_rows))
                return
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()

    def _jsonl(self, path: str) -> Iterator[Row]:
        for number, line in enumerate(self._text(path), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SourceError(
                    f"{path}: line {number} is not JSON: {_json_fault(error)}"
                ) from error
            if not isinstance(row, dict):
                raise SourceError(
                    f"{path}: line {number} is a JSON {type(row).__name__}; a row is an object"
                )
            yield row

    def _csv(self, path: str, delimiter: str) -> Iterator[Row]:
        reader = csv.DictReader(self._text(path, newline=""), delimiter=delimiter, strict=True)
        names = reader.fieldnames
        if names is None:
            raise SourceError(f"{path}: is empty; the first line names the columns")
        if len(set(names)) != len(names):
            raise SourceError(f"{path}: names a column twice in its first line: {names}")
        for row in reader:
            if None in row or None in row.values():
                raise SourceError(
                    f"{path}: line {reader.line_num} has not {len(names)} values as the first line"
                )
            yield row

    def _text(self, path: str, newline: str | None = None) -> Iterator[str]:
        with self.filesystem.open_input_stream(path, compression="detect") as stream:
            yield from io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)


@dataclass(frozen=True, slots=True)
class _LanceSource:
    name: str
    storage_options: Mapping[str, str] | None

    def rows(self) -> Iterator[Row]:
        return open_rows(self.name, None, self.storage_options)

    def columns(self, column: str | None) -> Iterator[Row]:
        return open_rows(self.name, [column] if column is not None else [], self.storage_options)


def _kind(path: str) -> str | None:
    text = path.rstrip("/").lower()
    for ending in _COMPRESSED:
        text = text.removesuffix(ending)
    return next((kind for suffix, kind in _SUFFIXES.items() if text.endswith(suffix)), None)


def _open_path(text: str, storage_options: Mapping[str, str] | None) -> RowSource:
    known = ", ".join(sorted(_SUFFIXES))
    if not text:
        raise SourceError("the source is empty; name a file")
    if _kind(text) == "lance":
        if "://" not in text and not Path(text).is_dir():
            raise SourceError(f"{text}: no such Lance dataset; check the path of the source")
        return _LanceSource(text, storage_options)
    try:
        if "://" in text:
            filesystem, path = pafs.FileSystem.from_uri(text)
        else:
            filesystem, path = pafs.LocalFileSystem(), str(Path(text).absolute())
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.NotFound:
            raise SourceError(f"{text}: no such file; check the path of the source")
        found = [path]
        if info.type == pafs.FileType.Directory:
            listing = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            found = sorted(each.path for each in listing if each.is_file and _kind(each.path))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{text}: cannot be reached: {_first_line(error)}") from error
    kinds = {_kind(each) for each in found}
    if not found:
        raise SourceError(f"{text}: the folder holds no file of a known type ({known})")
    if len(kinds) > 1:
        raise SourceError(
            f"{text}: the folder mixes {', '.join(sorted(map(str, kinds)))}; name one type's files"
        )
    kind = kinds.pop()
    if kind is None:
        raise SourceError(f"{text}: a source ends in one of {known}")
    return _FileSource(text, kind, filesystem, found)


def _json_fault(error: ValueError) -> str:
    """What is wrong and in which column; the decoder's own line number is always 1 here."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in column {error.colno}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
