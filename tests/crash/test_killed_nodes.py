"""A job on many nodes goes on while nodes and workers are killed, and after the head was, too."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.store.store import DatagenStore
from tests.crash import counting_job, fanout_job
from tests.crash.counted_job import CountedJob, Ledger, completed
from tests.crash.nodes import Nodes
from tests.crash.processes import Session, wait_until

NODES = 4
WORKERS = 4


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def reached(job: CountedJob, session: Session, target: int) -> bool:
    assert session.running, session.output()
    return job.executed() >= target


def scene(
    tmp_path: Path,
    environment: pytest.MonkeyPatch,
    *,
    roots: int,
    kills: int,
    step_s: float,
    concurrency: int,
    timeout_s: float,
) -> None:
    seed = int(os.environ.get("DATAGEN_RAY_TEST_SEED", random.SystemRandom().randrange(10**6)))
    say(f"seed {seed}: set DATAGEN_RAY_TEST_SEED={seed} to repeat the kills")
    rng = random.Random(seed)
    env = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}

    def job_of(name: str) -> CountedJob:
        return CountedJob(
            tmp_path / name,
            fanout_job.__file__,
            "fanout",
            roots,
            step_s=step_s,
            options=["--workers", str(WORKERS), "--concurrency", str(concurrency)],
            env=env,
        )

    calm = job_of("calm")
    calm.run_here(fanout_job.pipeline)
    expected = calm.export()
    assert 0 < len(expected) < roots, "some roots are to be filtered"

    job = job_of("killed")
    for name, value in job.variables.items():
        # Workers have the variables of their node, not those of the driver.
        environment.setenv(name, value)
    ledger = Ledger(job)
    steps = 4 * roots
    points = sorted(rng.randrange(steps // 20, steps * 3 // 4) for _ in range(kills))
    nodes = Nodes(NODES)
    began = time.monotonic()
    session = job.start("--address", nodes.address)
    try:
        for number, point in enumerate(points):
            target = max(point, job.executed() + 1)
            wait_until(partial(reached, job, session, target), f"execution {target}", timeout_s)
            ledger.look()
            what = rng.choice(("node", "worker"))
            if what == "node":
                nodes.kill_node(rng)
                nodes.add()
            else:
                nodes.kill_worker(rng)
            say(f"{time.monotonic() - began:6.1f} s  {job.executed():7d} steps  {what} {number}")
        target = max(steps * 4 // 5, job.executed() + 1)
        wait_until(partial(reached, job, session, target), f"execution {target}", timeout_s)
        ledger.look()
        nodes.kill_head()
        say(f"{time.monotonic() - began:6.1f} s  {job.executed():7d} steps  the head")
        wait_until(lambda: not session.running, "the driver to end after its head was killed")
        assert session.process.returncode != 0, session.output()
        # Workers that are cut off may go on for a while: the next run fences them.
        ledger.look()
        after = Nodes(NODES)
        try:
            session.kill_all()
            session = job.start("--address", after.address)
            assert session.process.wait(timeout_s) == 0, session.output()
        finally:
            after.close()
    finally:
        session.kill_all()
        nodes.close()
    say(f"{time.monotonic() - began:6.1f} s  {job.executed():7d} steps  the end")

    summary = json.loads(session.output().splitlines()[-1])
    say(json.dumps(summary))
    assert summary["failed"] == 0
    assert summary["completed"] + summary["filtered"] + summary["skipped"] == roots
    assert summary["skipped"] + summary["resumed"] > 0
    assert job.export() == expected
    checked = ledger.check()
    assert checked > 0
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        twice = {key: times for key, times in completed(store).items() if times > 1}
    assert not twice, f"completed twice: {twice}"
    repeated = job.executed() - len(set(job.executions()))
    say(f"{checked} times a durable step was looked for; {repeated} not durable ones ran again")
    assert status_of(["verify", job.log_uri]) == 0


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", "0" * 64))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    monkeypatch.delenv(counting_job.COUNT_VARIABLE, raising=False)
    return monkeypatch


@pytest.mark.soak
@pytest.mark.timeout(280)
def test_nodes_workers_and_the_head_are_killed_and_the_rows_are_those_of_an_undisturbed_run(
    tmp_path: Path, token: pytest.MonkeyPatch
) -> None:
    scene(tmp_path, token, roots=1_000, kills=6, step_s=0.3, concurrency=16, timeout_s=120)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_same_with_20000_roots_and_more_kills(
    tmp_path: Path, token: pytest.MonkeyPatch
) -> None:
    scene(tmp_path, token, roots=20_000, kills=22, step_s=0.4, concurrency=48, timeout_s=1200)
