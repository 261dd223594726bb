"""A running job is killed again and again, and loses nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from datagen_ray.store.store import DatagenStore
from tests.crash import counting_job
from tests.crash.counted_job import CountedJob, Ledger, completed
from tests.crash.processes import Session, wait_until

ROOTS = 40
STEP_S = 0.15
KILLS = ["worker", "driver", "node", "worker", "driver"]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    # The paths of Ray's sockets must be short, which those of tmp_path are not.
    folder = tempfile.mkdtemp(prefix="dgr", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _job(folder: Path, ray_folder: str, *, step_s: float) -> CountedJob:
    return CountedJob(
        folder,
        counting_job.__file__,
        "counting",
        ROOTS,
        step_s=step_s,
        options=["--workers", "2", "--concurrency", "4"],
        env={"RAY_TMPDIR": ray_folder},
    )


def _reached(job: CountedJob, session: Session, target: int) -> bool:
    return len(job.executions()) > target or not session.running


def _kill(session: Session, what: str) -> None:
    if what == "worker":
        workers = session.members("ray::WorkerActor")
        session.kill(workers[0])
        return
    if what == "node":
        # The raylet, and its workers, which would go on for a while; the driver is left to find
        # out and to end by itself.
        session.kill(*session.members("/raylet"), *session.members("ray::WorkerActor"))
        wait_until(lambda: not session.running, "the driver to end after its only node was killed")
        assert session.process.returncode == 1, session.output()
        assert "run the same command again" in session.output()
    elif what == "driver":
        session.kill(session.process.pid)
    session.kill_all()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(280)
def test_a_run_that_is_killed_again_and_again_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("DATAGEN_RAY_TEST_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"seed {seed}: set DATAGEN_RAY_TEST_SEED={seed} to repeat the kills\n")
    rng = random.Random(seed)

    calm = _job(tmp_path / "calm", ray_folder, step_s=0)
    monkeypatch.setenv(counting_job.COUNT_VARIABLE, str(calm.counts))
    calm.run_here(counting_job.pipeline)
    expected = calm.export()
    assert 0 < len(expected) < ROOTS, "some roots are to be filtered"
    lines = len(calm.executions())

    job = _job(tmp_path / "killed", ray_folder, step_s=STEP_S)
    ledger = Ledger(job)
    kills = rng.sample(KILLS, len(KILLS))
    # Spread over the first part of the work, so that there is work left for each.
    points = sorted(rng.randrange(lines // 20, lines // 2) for _ in kills)
    session = job.start()
    try:
        for what, point in zip(kills, points, strict=True):
            if not session.running:
                session = job.start()
            target = max(point, len(job.executions()))
            wait_until(partial(_reached, job, session, target), f"execution {target}")
            assert session.running, session.output()
            ledger.look()
            _kill(session, what)
            ledger.look()
        if not session.running:
            session = job.start()
        assert session.process.wait(120) == 0, session.output()
    finally:
        session.kill_all()

    summary = json.loads(session.output().splitlines()[-1])
    assert summary["failed"] == 0
    assert summary["completed"] + summary["filtered"] + summary["skipped"] == ROOTS
    assert job.export() == expected
    assert ledger.check() > 0
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        assert not store.overview().violations
        twice = {key: times for key, times in completed(store).items() if times > 1}
        attempts = {
            attempt
            for batch in store.events(columns=["attempt"])
            for attempt in batch.column("attempt").to_pylist()
        }
    assert not twice, f"completed twice: {twice}"
    assert max(attempts) >= 1, "some root was resumed"
