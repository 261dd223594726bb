"""The command of the job from start to end, on a Ray that it starts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import io_prediction

SCRIPT = Path(io_prediction.__file__)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--limit", "8", "--workers", "2", "--root", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRIPT.parent.parent,
    )


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_writes_the_data_set_and_a_second_one_skips_every_root(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    jsonl = tmp_path / "io_prediction" / "seed-0.jsonl"
    rows = [json.loads(line) for line in jsonl.read_text("utf-8").splitlines()]
    assert len(rows) > 100
    assert pq.read_table(jsonl.with_suffix(".parquet")).to_pylist() == rows
    assert str(jsonl) in first.stdout
    log = tmp_path / "datagen_checkpoints" / "io_prediction" / "seed-0" / "log.lance"
    assert f" show {log} {rows[0]['function']}" in first.stdout
    before = jsonl.read_bytes()
    second = run(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "all 8 functions were done already: every root was skipped" in second.stdout
    assert jsonl.read_bytes() == before
