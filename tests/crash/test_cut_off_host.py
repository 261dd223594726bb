"""A host whose network is cut, while its worker lives and reaches the storage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.errors import WriterFencedError
from tests.crash import counting_job, noted_job
from tests.crash.counted_job import CountedJob, check_acknowledged
from tests.crash.hosts import Host, Hosts, HostsRefusedError
from tests.crash.notes import (
    ACKNOWLEDGED,
    NOTES_VARIABLE,
    Note,
    checkpoints_of,
    read_notes,
)
from tests.crash.processes import Session, wait_until

ROOTS = 60
STEP_S = 0.4
PATIENCE_S = 180

FENCED = WriterFencedError.__name__

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 64,
    # How soon a head gives up a node that does not answer.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class Scene:
    """Hosts, and a run that is started on the head of them, as often as need be."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.holds = folder / "holds"
        self.holds.mkdir()
        self.notes_file = folder / "notes"
        self.notes_file.touch()
        self.job = self._job(
            folder / "job",
            NOTES_VARIABLE=str(self.notes_file),
            HOLDS_VARIABLE=str(self.holds),
        )
        self.calm = self._job(folder / "calm")
        self.hosts = Hosts(hosts, self.job.env)
        self.session: Session | None = None

    def _job(self, folder: Path, **variables: str) -> CountedJob:
        names = {"NOTES_VARIABLE": NOTES_VARIABLE, "HOLDS_VARIABLE": noted_job.HOLDS_VARIABLE}
        return CountedJob(
            folder,
            noted_job.__file__,
            "noted",
            ROOTS,
            step_s=STEP_S,
            options=["--workers", "2", "--concurrency", "4"],
            env={**SETTINGS, **{names[name]: value for name, value in variables.items()}},
        )

    def start(self) -> Session:
        self.session = self.job.start(
            "--address", self.hosts.address, inside=self.hosts.head.inside
        )
        return self.session

    def notes(self) -> list[Note]:
        return read_notes(self.notes_file)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait, for a run that goes on meanwhile."""

        def holds() -> bool:
            assert self.session is not None
            assert self.session.running, self.session.output()
            return bool(condition())

        try:
            wait_until(holds, what, PATIENCE_S)
        except AssertionError as error:
            said = self.session.output() if self.session else ""
            raise AssertionError(f"{error}\n{said}") from error

    def checkpoints_of(self, pid: int, kind: str = ACKNOWLEDGED) -> int:
        return checkpoints_of(self.notes(), pid, kind)

    def claimed(self, writer_epoch: str) -> bool:
        """Whether a worker with this epoch has taken up a root."""
        return any(each.writer_epoch == writer_epoch for each in self.notes())

    def hold(self, host: Host) -> None:
        (self.holds / host.name).touch()

    def release(self, host: Host) -> None:
        (self.holds / host.name).unlink()

    def finish(self) -> dict[str, int]:
        """Let the run come to its end; its summary."""
        assert self.session is not None
        (self.holds / noted_job.FINISH).touch()
        assert self.session.process.wait(PATIENCE_S) == 0, self.session.output()
        summary: dict[str, int] = json.loads(self.session.output().splitlines()[-1])
        return summary

    def close(self) -> None:
        if self.session is not None:
            self.session.kill_all()
        self.hosts.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.delenv(counting_job.COUNT_VARIABLE, raising=False)
    try:
        made = Scene(tmp_path, 3)
    except HostsRefusedError as refused:
        pytest.skip(str(refused))
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def epoch_of(scene: Scene, pid: int) -> str:
    return next(e for each in scene.notes() if each.pid == pid and (e := each.writer_epoch))


def ended(node: Session) -> bool:
    return not node.running


def check_whole(scene: Scene, lost: set[int]) -> None:
    check_acknowledged(scene.job, scene.notes(), lost)
    scene.calm.run_here(noted_job.pipeline)
    assert scene.job.export() == scene.calm.export()
    assert status_of(["verify", scene.job.log_uri]) == 0


def cut_off(scene: Scene) -> tuple[int, Host]:
    """Cut a host of a run under way. Its worker makes checkpoints after that, and is held then."""
    scene.start()
    scene.wait(lambda: len(scene.job.executions()) > ROOTS // 3, "the run to be under way")
    worker = next(pid for host in scene.hosts.workers for pid in host.workers())
    host = scene.hosts.of(worker)
    host.cut()
    before = scene.checkpoints_of(worker)
    scene.wait(lambda: scene.checkpoints_of(worker) > before, "a checkpoint after the cut")
    scene.hold(host)
    return worker, host


def bring_back(scene: Scene, host: Host) -> None:
    """Mend the host. Its node is told that it counts as dead, and ends; a new one is started."""
    host.mend()
    assert host.node is not None
    node = host.node
    scene.wait(partial(ended, node), "the node to learn that it was given up, and to end")
    scene.hosts.join(host)


def check_end(scene: Scene, zombie: int, slot: str) -> None:
    summary = scene.finish()
    assert summary["completed"] + summary["filtered"] == ROOTS
    assert summary["failed"] == 0
    epochs = {each.writer_epoch for each in scene.notes()} - {None}
    assert epochs == {"worker-0:1", "worker-1:1", f"{slot}:2"}, "no other worker was disturbed"
    refused = sum(each.pid == zombie and each.kind == FENCED for each in scene.notes())
    kept = scene.checkpoints_of(zombie)
    sys.stdout.write(f"cut off: {kept} checkpoints acknowledged, {refused} rows refused\n")
    check_whole(scene, {zombie})


@pytest.mark.soak
@pytest.mark.timeout(280)
def test_a_worker_cut_off_from_the_cluster_acknowledges_nothing_once_its_shard_was_claimed(
    scene: Scene,
) -> None:
    zombie, host = cut_off(scene)
    slot = epoch_of(scene, zombie).partition(":")[0]
    scene.wait(lambda: scene.claimed(f"{slot}:2"), "its shard to be claimed")
    assert is_alive(zombie), "it is cut off from the cluster, and lives"
    scene.release(host)
    scene.wait(lambda: scene.checkpoints_of(zombie, FENCED), "its append to be refused")
    scene.wait(lambda: not is_alive(zombie), "the worker to end by itself")
    assert f"{slot} was left alone and ends: {FENCED}" in host.log_of(zombie)
    check_end(scene, zombie, slot)


@pytest.mark.soak
@pytest.mark.timeout(280)
def test_a_worker_whose_network_comes_back_after_its_shard_was_claimed_disturbs_nobody(
    scene: Scene,
) -> None:
    zombie, host = cut_off(scene)
    slot = epoch_of(scene, zombie).partition(":")[0]
    scene.wait(lambda: scene.claimed(f"{slot}:2"), "its shard to be claimed")
    assert is_alive(zombie), "it is cut off from the cluster, and lives"
    bring_back(scene, host)
    scene.wait(lambda: not is_alive(zombie), "the worker to end with its node")
    scene.release(host)
    check_end(scene, zombie, slot)


@pytest.mark.soak
@pytest.mark.timeout(280)
@pytest.mark.parametrize("driver", ["killed", "alive"])
def test_a_head_cut_off_from_all_workers_costs_no_durable_step(scene: Scene, driver: str) -> None:
    session = scene.start()
    scene.wait(lambda: len(scene.job.executions()) > ROOTS // 3, "the run to be under way")
    workers = {pid for host in scene.hosts.workers for pid in host.workers()}
    assert len(workers) == 2
    scene.hosts.head.cut()
    before = {pid: scene.checkpoints_of(pid) for pid in workers}
    scene.wait(
        lambda: all(scene.checkpoints_of(pid) > before[pid] for pid in workers),
        "checkpoints of all workers after the cut",
    )
    scene.wait(lambda: session.output().count("was lost (") >= 2, "the driver to miss the workers")
    if driver == "killed":
        session.kill_all()
    assert all(map(is_alive, workers)), "they are cut off from the head, and live"
    scene.hosts.head.mend()
    for host in scene.hosts.workers:
        assert host.node is not None
        wait_until(partial(ended, host.node), "a node that was given up to end", PATIENCE_S)
    wait_until(lambda: not any(map(is_alive, workers)), "the workers to end with their nodes")
    scene.hosts.join(*scene.hosts.workers)
    if driver == "killed":
        scene.start()
    summary = scene.finish()
    assert summary["failed"] == 0
    assert summary["completed"] + summary["filtered"] + summary["skipped"] == ROOTS
    if driver == "killed":
        assert summary["skipped"] + summary["resumed"] > 0
    check_whole(scene, workers)
