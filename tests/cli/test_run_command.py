"""``datagen-ray run`` as a command, on a Ray of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.cluster.summary import SUMMARY_KEYS
from tests.crash.processes import Session, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

JOB = """
import asyncio, os
from helper import double
import datagen_ray.pipeline.pipeline as p
from datagen_ray.pipeline.steps import step

print("a line of the job's own")

@step
async def twice(item):
    open(item["began"] + str(item["n"]), "a").close()
    while not os.path.exists(item["gate"]):
        await asyncio.sleep(0.01)
    return {"twice": double(item["n"])}

pipeline = p.Pipeline("job", [twice])
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """The command, its environment, and its folder; it is run from elsewhere."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "job.py").write_text(JOB)
    (code / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    row = {"began": str(tmp_path / "began"), "gate": str(tmp_path / "gate")}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"n": n, **row}) + "\n" for n in range(3))
    )
    command = [
        sys.executable, "-m", "datagen_ray", "run", str(code / "job.py"),
        "--source", str(tmp_path / "rows.jsonl"), "--root", str(tmp_path / "root"),
        "--experiment", "e", "--workers", "1", "--json", "--drain-s", "1",
    ]  # fmt: skip
    ray_folder = tempfile.mkdtemp(prefix="dgr", dir="/tmp")
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "RAY_TMPDIR": ray_folder,
        # Neither a home folder nor a token file is needed.
        "HOME": "/nonexistent",
    }
    yield command, env, tmp_path
    shutil.rmtree(ray_folder, ignore_errors=True)


def summary_of(session: Session) -> dict[str, Any]:
    """The one JSON object of a run's output."""
    (line,) = [line for line in session.output().splitlines() if line.startswith("{")]
    summary: dict[str, Any] = json.loads(line)
    return summary


def test_an_interrupted_run_goes_on_and_ends_with_one_json_object(
    job: tuple[list[str], dict[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command, env, folder = job
    session = Session(command, env, folder / "interrupted")
    try:
        wait_until(
            lambda: len(list(folder.glob("began*"))) == 3 or not session.running,
            "all steps to begin",
        )
        assert session.running, session.output()
        os.kill(session.process.pid, signal.SIGINT)
        assert session.process.wait(120) == 130, session.output()
        # Ray's own processes may still say something after it.
        last = "datagen-ray: interrupted; the same command goes on where this one was"
        assert last in session.output().splitlines(), session.output()
        assert "Traceback" not in session.output()
    finally:
        session.kill_all()

    (folder / "gate").touch()
    session = Session(command, env, folder / "resumed")
    try:
        assert session.process.wait(100) == 0, session.output()
    finally:
        session.kill_all()
    summary = summary_of(session)
    assert tuple(summary) == SUMMARY_KEYS
    # A root whose birth was still on its way to the log when the run was interrupted is fresh.
    assert summary["resumed"] + summary["fresh"] == summary["completed"] == 3

    session = Session(command, env, folder / "again")
    assert session.process.wait(100) == 0, session.output()
    assert summary_of(session)["skipped"] == 3

    assert status_of(["export", summary["log_uri"], "--to", str(folder / "rows.out.jsonl")]) == 0
    rows = [json.loads(line) for line in (folder / "rows.out.jsonl").read_text().splitlines()]
    assert [row["twice"] for row in rows] == [0, 2, 4]
    capsys.readouterr()


def test_a_run_that_is_sent_sigterm_ends_with_one_line(
    job: tuple[list[str], dict[str, str], Path],
) -> None:
    command, env, folder = job
    session = Session(command, env, folder / "terminated")
    try:
        wait_until(
            lambda: len(list(folder.glob("began*"))) == 3 or not session.running,
            "all steps to begin",
        )
        os.kill(session.process.pid, signal.SIGTERM)
        assert session.process.wait(120) == 143, session.output()
        last = "datagen-ray: ended by SIGTERM; the same command goes on where this one was"
        assert last in session.output().splitlines(), session.output()
        assert "SIGTERM received" not in session.output()
        assert "Traceback" not in session.output()
    finally:
        session.kill_all()
