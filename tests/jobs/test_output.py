"""The files of the data set appear whole, in one order, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import output

FIELDS: dict[str, Any] = {
    "function": "math.gcd",
    "direct": {"rows": [{"prompt": "p\n", "completion": "'é'", "item_id": "r/x:0"}]},
    "doctest": {"rows": [{"prompt": "q", "completion": "2", "item_id": "r/x:1"}]},
}


def test_both_files_hold_the_same_rows_in_one_order(tmp_path: Path) -> None:
    rows = output.rows_of_root(FIELDS)
    assert [row["style"] for row in rows] == ["direct", "doctest"]
    written = output.write_rows(reversed(rows), tmp_path / "made", "set")
    lines = [json.loads(line) for line in written.jsonl.read_text("utf-8").splitlines()]
    assert lines == rows
    assert pq.read_table(written.parquet).to_pylist() == rows
    assert (written.rows, written.functions) == (2, 1)


def test_a_write_that_fails_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = output.write_rows(output.rows_of_root(FIELDS), tmp_path, "set").jsonl.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(output, "_write_jsonl", fails)
    with pytest.raises(OSError, match="disk full"):
        output.write_rows([], tmp_path, "set")
    assert (tmp_path / "set.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.jsonl", "set.parquet"]
