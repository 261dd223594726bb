"""The data set that a run leaves: rows read back from the log, written whole or not at all.

Nothing is kept in memory while a run goes on. What is written comes from the log, so a second
run writes the same files, and so does a run that was killed and started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.rendering import STYLES

COLUMNS = ("prompt", "completion", "function", "style", "item_id")
_SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])


@dataclass(frozen=True)
class Written:
    """What was written, and where."""

    rows: int
    functions: int
    item: str | None  # the first function's root, to look at
    jsonl: Path
    parquet: Path


def rows_of_root(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of one completed root, from the values of its fields."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row["completion"],
            "function": fields["function"],
            "style": style,
            "item_id": row["item_id"],
        }
        for style in STYLES
        for row in fields[style]["rows"]
    ]


def write_rows(rows: Iterable[Mapping[str, str]], folder: Path, name: str) -> Written:
    """Write ``name.jsonl`` and ``name.parquet``; each appears complete or stays as it was."""
    ordered = sorted(rows, key=lambda row: (row["function"], row["style"], row["item_id"]))
    folder.mkdir(parents=True, exist_ok=True)
    jsonl, parquet = folder / f"{name}.jsonl", folder / f"{name}.parquet"
    _replace(jsonl, lambda out: _write_jsonl(ordered, out))
    _replace(parquet, lambda out: _write_parquet(ordered, out))
    functions = sorted({row["function"] for row in ordered})
    return Written(
        rows=len(ordered),
        functions=len(functions),
        item=functions[0] if functions else None,
        jsonl=jsonl,
        parquet=parquet,
    )


def _write_jsonl(rows: Sequence[Mapping[str, str]], out: IO[bytes]) -> None:
    for row in rows:
        line = json.dumps({name: row[name] for name in COLUMNS}, ensure_ascii=False)
        out.write(line.encode() + b"\n")


def _write_parquet(rows: Sequence[Mapping[str, str]], out: IO[bytes]) -> None:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=_SCHEMA), out)


def _replace(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    with _temporary_beside(path) as (handle, temporary):
        with os.fdopen(handle, "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        temporary.chmod(0o644)  # a temporary file is its owner's alone
        temporary.replace(path)


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[int, Path]]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        yield handle, temporary
    finally:
        temporary.unlink(missing_ok=True)
