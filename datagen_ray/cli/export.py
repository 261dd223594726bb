"""``datagen-ray export``: the fields of completed roots as a file.

The file appears whole or not at all: it is written beside its place under another name, synced,
then renamed. Rows come in the order of root ids, numbers by their value, a part of the log at a
time; the log is read once.

A field that the log keeps as JSON becomes a column of text, numbers or booleans where all its
values are of that kind, and of JSON text where they are not. That is known only at the end, so the
rows of a Parquet file wait in a file without a name beside it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from datagen_ray.cli.items import by_value
from datagen_ray.cli.look import LogUri, StorageOption, open_log
from datagen_ray.cli.text import shown
from datagen_ray.errors import ConfigError
from datagen_ray.log.events import DatagenItemStatus
from datagen_ray.log.fold import FoldedDatagenItem
from datagen_ray.log.values import DatagenBlobValue
from datagen_ray.store.storage import local_path
from datagen_ray.store.store import DatagenStore

ID_COLUMN = "item_id"
_SHIFTED = re.compile(f"{ID_COLUMN}(_field)*")
_ROOTS_A_READ = 2000
_TYPES = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}


def add_to(app: typer.Typer) -> None:
    app.command()(export)


def export(
    log_uri: LogUri,
    to: Annotated[str, typer.Option("--to", help="FILE.parquet or FILE.jsonl")],
    storage_option: StorageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="say what was done as JSON")] = False,
) -> int:
    """Write the fields of every completed root, with its item id, to a file."""
    path = Path(to)
    write = {".parquet": _write_parquet, ".jsonl": _write_jsonl}.get(path.suffix)
    if write is None:
        raise ConfigError(f"--to {to!r}: an export ends in .parquet or .jsonl")
    if not path.parent.is_dir():
        raise ConfigError(f"--to {to!r}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"--to {to!r} is a folder; name a file")
    _check_outside(path, log_uri)
    with open_log(log_uri, storage_option) as store:
        statuses = store.root_item_statuses()
        ids = sorted(statuses.with_status(DatagenItemStatus.COMPLETED), key=by_value)
        for item_id, error in sorted(statuses.violations.items()):
            typer.echo(shown(f"left out, damaged: {item_id}: {error}"), err=True)
        rows = _Rows(store, ids)
        _write_whole(path, lambda file: write(file, rows, path.parent))
    data = {"rows": len(ids), "path": str(path), "left_out": len(statuses.violations)}
    typer.echo(json.dumps(data) if as_json else f"{len(ids)} rows written to {path}")
    return 0


class _Rows:
    """The rows to export, in order."""

    def __init__(self, store: DatagenStore, ids: list[str]) -> None:
        self._store = store
        self._ids = ids

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._ids), _ROOTS_A_READ):
            part = self._ids[start : start + _ROOTS_A_READ]
            found = self._store.fold_items(part)
            for item_id in part:
                folded = found[item_id].folded()
                if folded is not None:
                    yield self._row(folded)

    def _row(self, folded: FoldedDatagenItem) -> dict[str, Any]:
        row: dict[str, Any] = {ID_COLUMN: folded.item_id}
        for name, field in sorted(folded.fields.items()):
            values = [
                self._store.load_blob(folded, name, place)
                if isinstance(value.raw, DatagenBlobValue)
                else value.value
                for place, value in enumerate(field.values)
            ]
            row[_column(name)] = values[-1] if field.mode == "set" else values
        return row


def _column(field_name: str) -> str:
    """A field may have the name of the id column, or the one that it then gets: none hides another.

    ``item_id`` becomes ``item_id_field``, that one ``item_id_field_field``, and so on.
    """
    return f"{field_name}_field" if _SHIFTED.fullmatch(field_name) else field_name


def _check_outside(path: Path, log_uri: str) -> None:
    log = local_path(log_uri)
    if log is not None and path.resolve().is_relative_to(Path(log).resolve()):
        raise ConfigError(f"--to {str(path)!r} lies in the log itself; name a file elsewhere")


def _write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); name another file with --to"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _write_jsonl(file: IO[bytes], rows: _Rows, _: Path) -> None:
    for row in rows:
        file.write(_line(row))


def _line(row: dict[str, Any]) -> bytes:
    text = json.dumps(_tagged(row), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _tagged(value: Any) -> Any:
    """A value as JSON; what JSON cannot say is tagged as in the log's exchange form."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        return {name: _tagged(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(each) for each in value]
    return value


def _write_parquet(file: IO[bytes], rows: _Rows, beside: Path) -> None:
    with tempfile.TemporaryFile(dir=beside) as waiting:
        kinds: dict[str, set[type]] = {}
        for row in rows:
            for name, value in row.items():
                if value is not None:
                    kinds.setdefault(name, set()).add(_kind(value))
            waiting.write(_line(row))
        waiting.seek(0)
        columns = _columns(kinds)
        schema = pa.schema([(name, kind) for name, kind in columns.items()])
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for line in waiting:
                row = json.loads(line.decode("utf-8", "surrogatepass"))
                batch.append({name: _cell(row.get(name), kind) for name, kind in columns.items()})
                if len(batch) == _ROOTS_A_READ:
                    writer.write_table(pa.Table.from_pylist(batch, schema))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, schema))


def _columns(kinds: dict[str, set[type]]) -> dict[str, pa.DataType]:
    columns = {ID_COLUMN: pa.string()}
    for name, found in sorted(kinds.items()):
        if name == ID_COLUMN:
            continue
        if found == {int, float}:
            found = {float}
        only = next(iter(found)) if len(found) == 1 else object
        columns[name] = _TYPES.get(only, pa.string())
    return columns


def _kind(value: Any) -> type:
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**63:
        return object
    return kind if kind in _TYPES else object


def _cell(value: Any, kind: pa.DataType) -> Any:
    """A value as it waited, tagged, as its column takes it."""
    if value is None:
        return None
    if kind == pa.string():
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == pa.float64():
        return float(value["$float"] if isinstance(value, dict) else value)
    if kind == pa.binary():
        return base64.b64decode(value["$bytes"])
    return value
