"""The main job through ``ray job submit`` on a cluster that wants a token."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.log.events import DatagenEventType
from datagen_ray.pipeline.local import run_local
from datagen_ray.store.store import DatagenStore
from jobs import io_prediction
from jobs.io_pipeline import make_pipeline, row_of
from jobs.output import write_rows
from jobs.stdlib_functions import discover
from tests.cluster.ray_head import RayHead
from tests.crash.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(280)]

REPOSITORY = Path(io_prediction.__file__).parents[1]
# More than one worker runs at once, so that when the first ends others have not begun.
LIMIT = 72
BEFORE_STOP = 1


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    started = RayHead()
    yield started
    started.close()


@pytest.fixture(scope="module")
def refused(
    head: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """A run with a wrong token. Ray takes its time to give up, so it goes on beside the rest."""
    root = tmp_path_factory.getbasetemp() / "refused"
    with subprocess.Popen(
        [
            sys.executable, "jobs/io_prediction.py", "--limit", "2", "--root", str(root),
            "--address", head.address,
        ],
        env=head.env_with(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="6" * 64),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def roots_done(log: Path) -> int:
    if not (log / "_versions").is_dir():
        return 0
    with DatagenStore.open(str(log), read_only=True) as store:
        statuses = store.root_item_statuses()
        return sum(statuses.is_terminated(root_id) for root_id in statuses)


def undisturbed_rows(folder: Path) -> str:
    """The rows of a run of the same functions in this process, without Ray and without a stop."""
    functions = io_prediction.select(discover(), LIMIT)
    summary = run_local(
        make_pipeline(0),
        [row_of(each) for each in functions],
        key="function",
        root=folder / "root",
        experiment="calm",
        fsync=False,
    )
    assert summary.failed == 0
    rows = io_prediction.completed_rows(summary.log_uri)
    return Path(write_rows(rows, folder, "calm").jsonl).read_text()


def waited(head: RayHead, name: str, condition: Callable[[], bool], what: str) -> None:
    try:
        wait_until(condition, what, 120)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{head.job('logs', name).stdout}") from error


def ended(head: RayHead, name: str, state: str) -> bool:
    said = head.job("status", name)
    assert state == "failed" or "failed" not in said.stderr + said.stdout, head.job("logs", name)
    return state in said.stderr + said.stdout


def test_a_job_that_is_stopped_and_submitted_again_ends_and_runs_no_durable_step_twice(
    tmp_path: Path, head: RayHead, refused: subprocess.Popen[str]
) -> None:
    root = tmp_path / "root"
    log = root / "datagen_checkpoints" / "io_prediction" / "seed-0" / "log.lance"

    def submit(name: str) -> None:
        done = head.job(
            "submit", "--no-wait", "--submission-id", name, "--working-dir", str(REPOSITORY),
            "--", sys.executable, "jobs/io_prediction.py", "--limit", str(LIMIT),
            "--workers", "1", "--root", str(root),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    submit("first")
    waited(head, "first", lambda: roots_done(log) >= BEFORE_STOP, "some roots to end")
    assert head.job("stop", "first").returncode == 0
    waited(head, "first", partial(ended, head, "first", "stopped"), "the job to be stopped")
    done_before = roots_done(log)
    assert BEFORE_STOP <= done_before < LIMIT

    submit("second")
    waited(head, "second", partial(ended, head, "second", "succeeded"), "the job to end")
    logs = head.job("logs", "second").stdout
    assert f"{LIMIT} functions: " in logs
    assert f" 0 failed, {done_before} skipped, " in logs

    assert status_of(["verify", str(log)]) == 0
    with DatagenStore.open(str(log), read_only=True) as store:
        found = store.overview()
        steps: Counter[tuple[str, str, int]] = Counter()
        for batch in store.events(columns=["item_id", "event_type", "step_name", "step_index"]):
            for row in batch.to_pylist():
                if row["event_type"] == DatagenEventType.STEP_COMPLETED.value:
                    steps[row["item_id"], row["step_name"], row["step_index"]] += 1
    assert found.completed + found.filtered == LIMIT
    assert max(steps.values()) == 1
    rows = (root / "io_prediction" / "seed-0.jsonl").read_text()
    assert rows.count("\n") > LIMIT
    assert rows == undisturbed_rows(tmp_path / "calm")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no authentication token was found"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "6" * 64}, "invalid or incorrect"),
    ],
    ids=["no token", "a wrong token"],
)
def test_a_job_without_the_token_is_refused(
    head: RayHead, variables: dict[str, str], said: str
) -> None:
    refused = head.job(
        "submit", "--no-wait", "--submission-id", "refused", "--", "python", "-c", "1",
        env=head.env_with(**variables),
    )  # fmt: skip
    assert refused.returncode != 0
    assert said in refused.stderr
    assert "refused" not in head.job("list").stdout


def test_a_run_with_a_wrong_token_says_so_and_writes_nothing(
    refused: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, errors = refused.communicate(timeout=120)
    assert refused.returncode == 2, errors
    assert "token" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not (tmp_path_factory.getbasetemp() / "refused").exists()
