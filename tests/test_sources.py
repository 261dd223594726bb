from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datagen_ray.errors import SourceError
from datagen_ray.sources import count_keys, open_source, source_rows

ROWS = [{"id": "a", "n": 1}, {"id": "b/c", "n": 2}, {"id": "é:0", "n": 3}]
IDS = ["a", "b%2Fc", "é%3A0"]


def _write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "csv":
        names = list(rows[0])
        lines = [names, *([str(row[name]) for name in names] for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    else:
        lance.write_dataset(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv", "lance"])
def test_every_format_streams_the_same_roots_twice(tmp_path: Path, kind: str) -> None:
    source = open_source(_write(tmp_path, kind, ROWS))
    assert count_keys(source, "id") == 3
    for _ in range(2):
        found = list(source_rows(source, "id"))
        assert [row.root_id for row in found] == IDS
        assert [int(row.fields["n"]) for row in found] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "lance"])
def test_without_a_key_the_row_number_is_the_key(tmp_path: Path, kind: str) -> None:
    source = open_source(_write(tmp_path, kind, ROWS))
    assert count_keys(source, None) == 3
    assert [row.root_id for row in source_rows(source, None)] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "lance"])
def test_a_repeated_key_is_named_with_its_rows(tmp_path: Path, kind: str) -> None:
    source = open_source(_write(tmp_path, kind, [*ROWS, {"id": "a", "n": 4}]))
    with pytest.raises(SourceError, match=r"1 repeated key\(s\) in column 'id': 'a' in rows 0, 3"):
        count_keys(source, "id")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "lance"])
def test_a_missing_key_column_is_named_with_those_there_are(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SourceError, match="no column 'key' for the key; it has 'id', 'n'"):
        count_keys(open_source(_write(tmp_path, kind, ROWS)), "key")


@pytest.mark.parametrize("key", ["", None])
def test_an_empty_key_is_named_by_its_row(key: str | None) -> None:
    with pytest.raises(SourceError, match="row 1 has an empty key in column 'id'"):
        count_keys(open_source([{"id": "a"}, {"id": key}]), "id")


@pytest.mark.parametrize("key", [1.5, True, b"x", ["x"]])
def test_a_key_that_is_neither_text_nor_integer_is_refused(key: object) -> None:
    with pytest.raises(SourceError, match="keys are text or integers"):
        count_keys(open_source([{"id": key}]), "id")


def test_number_and_text_of_one_spelling_are_one_key() -> None:
    with pytest.raises(SourceError, match="'5' in rows 0, 1"):
        count_keys(open_source([{"id": 5}, {"id": "5"}]), "id")


@pytest.mark.parametrize("key", ["a\0b", "\ud800"])
def test_a_key_that_no_log_can_hold_is_refused(key: str) -> None:
    with pytest.raises(SourceError, match="row 0"):
        count_keys(open_source([{"id": key}]), "id")


def test_an_iterator_can_still_be_checked_before_it_is_streamed() -> None:
    source = open_source(iter(ROWS))
    assert count_keys(source, "id") == 3
    assert len(list(source_rows(source, "id"))) == 3


def test_a_callable_is_asked_again_for_each_reading() -> None:
    source = open_source(lambda: (dict(row) for row in ROWS))
    assert count_keys(source, "id") == 3
    assert len(list(source_rows(source, "id"))) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.parquet", None, "no such file"),
        ("none.lance", None, "no such Lance dataset"),
        ("rows.txt", "x", "a source ends in one of"),
        ("rows.parquet", "x", "cannot be read as parquet"),
        ("rows.jsonl", '{"id": 1}\n{"id"\n', "line 2 is not JSON"),
        ("rows.jsonl", "[1]\n", "a row is an object"),
        ("rows.csv", "id,n\n1\n", "line 2 has not 2 values"),
        ("rows.csv", "id,id\n1,2\n", "names a column twice"),
        ("rows.csv", "", "is empty"),
    ],
)
def test_a_source_that_cannot_be_read_says_so_in_one_line(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(SourceError, match=message) as caught:
        count_keys(open_source(path), "id")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_read_file_by_file_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    source = open_source(tmp_path)
    assert [row.root_id for row in source_rows(source, "id")] == ["1", "2"]
    (tmp_path / "c.csv").write_text("id\n3\n")
    with pytest.raises(SourceError, match="mixes csv, jsonl"):
        open_source(tmp_path)


@pytest.mark.parametrize("source", [5, {"id": 1}, None])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(SourceError, match="has no rows"):
        open_source(source)


def test_values_that_a_log_has_no_kind_for_become_text(tmp_path: Path) -> None:
    table = pa.table({"id": [1], "at": pa.array([0], pa.timestamp("us", tz="UTC"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    (row,) = source_rows(open_source(tmp_path / "rows.parquet"), "id")
    assert row.fields["at"] == "1970-01-01T00:00:00+00:00"


class DataSet:
    """What a Hugging Face data set can do, as far as it is used."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self._rows = rows
        self.column_names = list(rows[0])

    def select_columns(self, names: list[str]) -> DataSet:
        return DataSet([{name: row[name] for name in names} for row in self._rows])

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self._rows)


def test_a_data_set_is_read_by_its_columns() -> None:
    source = open_source(DataSet([{"k": "a", "x": 1}, {"k": "b", "x": 2}]))  # type: ignore[arg-type]
    assert count_keys(source, "k") == 2
    assert [row.root_id for row in source_rows(source, "k")] == ["a", "b"]
    assert [row.root_id for row in source_rows(source, None)] == ["0", "1"]
    assert list(source.columns("x")) == [{"x": 1}, {"x": 2}]
    with pytest.raises(SourceError, match="no column 'id' for the key; it has 'k', 'x'"):
        count_keys(source, "id")
