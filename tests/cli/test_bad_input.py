"""What cannot be right: one line that names it, exit status 2, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.store.store import DatagenStore

GOOD = """
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step

@step
def one(item): return {"a": 1}

@step
def two(item): return {"a": 1}

pipeline = Pipeline("demo", [one])
number = 5
"""
TWICE = GOOD.replace("[one]", "[one, two.named('one')]")
ROWS = '{"id": "a"}\n{"id": "b"}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "twice.py").write_text(TWICE)
    (tmp_path / "raises.py").write_text("x = 1\nx / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "imports.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "empty_key.jsonl").write_text('{"id": "a"}\n{"id": ""}\n')
    (tmp_path / "twice.jsonl").write_text('{"id": "a"}\n{"id": "a"}\n')
    (tmp_path / "no_rows.jsonl").write_text("")
    (tmp_path / "not_json.jsonl").write_text('{"id": "a"}\n{"id":}\n')
    (tmp_path / "a_file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(
    pipeline: str = "good.py:pipeline", source: str = "rows.jsonl", **options: str
) -> list[str]:
    chosen = {"root": "root", "experiment": "e", "key": "id", **options}
    extra = [text for name, value in chosen.items() for text in (f"--{name}", value)]
    return ["run", pipeline, "--source", source, *extra]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    before = sorted(Path().rglob("*"))
    assert status_of(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("datagen-ray: ")
    assert message in line
    assert captured.out == ""
    assert "Traceback" not in captured.err
    after = [each for each in sorted(Path().rglob("*")) if "__pycache__" not in str(each)]
    assert after == before, "nothing was written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (run(source="none.parquet"), "none.parquet: no such file"),
        (run(source="good.py"), "good.py: a source ends in one of"),
        (run(source="empty_key.jsonl"), "row 1 has an empty key in column 'id'"),
        (run(source="twice.jsonl"), "'a' in rows 0, 1"),
        (run(key="other"), "no column 'other' for the key"),
        (run("twice.py:pipeline"), "has two steps named 'one'"),
        (run("raises.py"), "raises.py, line 2: ZeroDivisionError: division by zero"),
        (run("exits.py"), "exits.py, line 2: SystemExit: 3"),
        (run("broken.py"), "broken.py, line 1: SyntaxError"),
        (run("imports.py"), "no_such_module_anywhere"),
        (run("good.py:other"), "no pipeline named 'other'; it has pipeline"),
        (run("good.py:number"), "'number' is a int, not a Pipeline"),
        (run("none.py"), "none.py: no such file"),
        (run("rows.jsonl"), "write FILE.py:pipeline"),
        (run(root="a_file"), "a_file is not a folder"),
        (run(root="a_file/below"), "a_file is not a folder"),
        (run(experiment="a/b"), "'a/b' cannot be a folder"),
        (run(experiment=""), "cannot be a folder"),
        (run(root=""), "the durable root"),
        (run(workers="0"), "workers is 0; it must be at least 1"),
        (run(concurrency="0"), "concurrency is 0"),
        (run(**{"max-failures": "-1"}), "max_failures is -1; it must be at least 0"),
        (run(**{"max-retries": "-1"}), "max_retries is -1"),
        (run(**{"drain-s": "-1"}), "drain_s is -1"),
        (run(**{"drain-s": "nan"}), "drain_s is nan"),
        (run(**{"silence-s": "0"}), "silence_s is 0; it must be greater than 0"),
        (run(**{"maintainer-cpus": "-1"}), "maintainer_cpus is -1"),
        (run(workers="1", **{"min-workers": "2"}), "min_workers is 2"),
        ([*run(**{"max-failures": "3"}), "--fail-fast"], "give one of the two"),
        (run(key=""), "--key is empty"),
        (run(source="no_rows.jsonl"), "no_rows.jsonl: the source has no rows"),
        (run(source="not_json.jsonl"), "line 2 is not JSON: Expecting value in column 7"),
        (run("no_such_module:pipeline"), "no_such_module: ModuleNotFoundError"),
        (run("good:other"), "good: no pipeline named 'other'; it has pipeline"),
        (run(workers="many"), "'--workers'"),
        (run(**{"storage-option": "x"}), "is not NAME=VALUE"),
        (["run", "good.py"], "Missing option '--source'"),
        (["status", "none/log.lance"], "there is no log at none/log.lance"),
        (["status", "a_file"], "a_file"),
        (["show", "none/log.lance", "5"], "there is no log"),
        (["failures", "none/log.lance"], "there is no log"),
        (["export", "none/log.lance", "--to", "out.jsonl"], "there is no log"),
        (["export", "none/log.lance", "--to", "out.txt"], "ends in .parquet or .jsonl"),
        (["export", "none/log.lance", "--to", "none/out.jsonl"], "no folder none"),
        (["export", "none/log.lance"], "see datagen-ray export --help"),
        (["items", "none/log.lance"], "there is no log"),
        (["items", "none/log.lance", "--status", "failed"], "'--status'"),
        (["maintain", "none/log.lance", "--interval-s", "0"], "--interval-s is 0"),
        (["maintain", "none/log.lance", "--once", "--grace-s", "-1"], "--grace-s is -1"),
        (["maintain", "none/log.lance", "--once", "--grace-s", "inf"], "--grace-s is inf"),
        (
            ["maintain", "none/log.lance", "--once", "--version-retention-s", "1e300"],
            "--version-retention-s is 1e+300; it must be at most 3155760000",
        ),
        (["maintain", "none/log.lance", "--interval-s", "1e18"], "--interval-s is 1e+18"),
        (["status", "a\nb/log.lance"], "'a\\nb/log.lance' names no log"),
        (["maintain", "\x1b/log.lance", "--once"], "'\\x1b/log.lance' names no log"),
        (["maintain", "none/log.lance", "--small-fragments", "0"], "--small-fragments is 0"),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    refused(capsys, arguments, message)


def test_a_log_path_that_is_a_file_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "root" / "datagen_checkpoints" / "demo" / "e" / "log.lance"
    log.parent.mkdir(parents=True)
    log.write_text("not a log")
    refused(capsys, run(), "log.lance")


def test_an_unknown_item_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DatagenStore.open(str(folder / "log.lance")).close()
    refused(capsys, ["show", "log.lance", "5"], "no item '5' in log.lance")


@pytest.mark.parametrize("to", ["log.lance/out.jsonl", "log.lance/data/x.parquet", "link/x.jsonl"])
def test_an_export_into_the_log_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    DatagenStore.open(str(folder / "log.lance")).close()
    (folder / "log.lance" / "data").mkdir(exist_ok=True)
    (folder / "link").symlink_to(folder / "log.lance")
    refused(capsys, ["export", "log.lance", "--to", to], "lies in the log itself")


@pytest.fixture
def read_only_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place that even root cannot write to, or a plain folder without permission."""
    place = tmp_path_factory.mktemp("read_only")
    if os.geteuid() != 0:
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("neither mounting nor permissions can make a folder read-only here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_cannot_be_written_to_is_refused(
    folder: Path, read_only_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, run(root=str(read_only_folder / "root")), "cannot be written to")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("datagen-ray ")
