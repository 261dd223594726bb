"""The command of the job: what it selects, and what it says of mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import io_prediction
from jobs.io_prediction import main, select
from jobs.stdlib_functions import discover

SCRIPT = Path(io_prediction.__file__)


def test_a_smaller_limit_takes_a_part_of_a_larger_one() -> None:
    functions = discover()
    few, more = select(functions, 10), select(functions, 50)
    assert few == more[:10]
    assert len({function.module for function in more}) > 10
    assert sorted(select(functions, None), key=lambda f: f.key) == functions


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "0"], "0 is not at least 1"),
        (["--limit", "many"], "many"),
        (["--workers", "-1"], "-1 is not at least 1"),
        (["--experiment", "a/b"], "a/b"),
        (["--experiment", "../up"], "../up"),
        (["--root", "file"], "file"),
        (["--output", "file"], "file"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_writes_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    errors = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert said in errors[-1]
    assert [line for line in errors if line.startswith("io_prediction")] == errors[-1:]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_mistake_ends_the_script_with_status_2(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--experiment", "a/b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "a/b" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
