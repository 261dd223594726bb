"""A worker that the cluster has given up, and that is alive: it acknowledges nothing any more."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.store.layout import shard_uuid
from datagen_ray.store.store import DatagenStore
from tests.crash import gated_job
from tests.crash.counted_job import CountedJob, completed
from tests.crash.nodes import Nodes
from tests.crash.processes import wait_until

ROOTS = 8

# How soon a head gives up a node that does not answer.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def held(job: CountedJob) -> int:
    return sum(name == "held" for _, name, _ in job.executions())


def epochs_of(job: CountedJob, step: str) -> set[str]:
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        rows = [
            row
            for batch in store.events(columns=["event_type", "step_name", "writer_epoch"])
            for row in batch.to_pylist()
        ]
    return {
        row["writer_epoch"]
        for row in rows
        if row["event_type"] == "STEP_COMPLETED" and row["step_name"] == step
    }


@pytest.mark.soak
@pytest.mark.timeout(280)
@pytest.mark.parametrize("way", ["cut off", "stopped and continued"])
def test_a_worker_whose_shard_was_claimed_meanwhile_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    gate = tmp_path / "gate"
    job = CountedJob(
        tmp_path / "job",
        gated_job.__file__,
        "gated",
        ROOTS,
        step_s=0,
        options=["--workers", "2", "--concurrency", "4"],
        env={gated_job.GATE_VARIABLE: str(gate), "RAY_AUTH_MODE": "token", **HEALTH_CHECKS},
    )
    token = os.environ.get("RAY_AUTH_TOKEN", "0" * 64)
    for name, value in {**job.variables, "RAY_AUTH_TOKEN": token}.items():
        monkeypatch.setenv(name, value)
    job.env["RAY_AUTH_TOKEN"] = token
    nodes = Nodes(3)
    session = None
    try:
        session = job.start("--address", nodes.address)
        wait_until(lambda: held(job) == ROOTS, "all roots to be held")
        zombie = nodes.workers()[0]
        nodes.stop_node_of(zombie)
        if way != "cut off":
            os.kill(zombie, signal.SIGSTOP)
        wait_until(lambda: held(job) == ROOTS + 4, "its roots to be taken up elsewhere")
        lost = {f"worker-{n}:1" for n in range(2)} - set(now_owning(job))
        assert len(lost) == 1
        assert Path(f"/proc/{zombie}").exists(), "the worker itself lives"
        if way != "cut off":
            os.kill(zombie, signal.SIGCONT)
        gate.touch()
        assert session.process.wait(120) == 0, session.output()
    finally:
        if session is not None:
            session.kill_all()
        nodes.close()
    summary = json.loads(session.output().splitlines()[-1])
    assert (summary["completed"], summary["failed"]) == (ROOTS, 0)
    assert epochs_of(job, "held").isdisjoint(lost), "nothing of it was taken"
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        assert set(completed(store).values()) == {1}
    assert sum(name == "first" for _, name, _ in job.executions()) == ROOTS
    assert status_of(["verify", job.log_uri]) == 0


def now_owning(job: CountedJob) -> list[str]:
    """The worker epochs of the log's shards, read from their manifests."""
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        report = store.verify()
    epochs = {shard.shard_id: shard.epoch for shard in report.shards}
    names = {shard_uuid(f"worker-{n}"): f"worker-{n}" for n in range(2)}
    return [f"{names[shard]}:{epoch}" for shard, epoch in epochs.items() if shard in names]
