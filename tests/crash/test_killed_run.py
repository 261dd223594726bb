"""A running job is killed again and again, and loses nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.log.events import DatagenEventType
from datagen_ray.pipeline.local import run_local
from datagen_ray.store.store import DatagenStore
from tests.crash import counting_job
from tests.crash.processes import Session, wait_until

ROOTS = 40
STEP_S = 0.15
KILLS = ["worker", "driver", "node", "worker", "driver"]

Key = tuple[str, str, int]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    # The paths of Ray's sockets must be short, which those of tmp_path are not.
    folder = tempfile.mkdtemp(prefix="dgr", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Job:
    """The counting job over ``ROOTS`` rows, as a command that can be started again."""

    def __init__(self, folder: Path, name: str, ray_folder: str, *, step_s: float) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.counts = self.folder / "counts"
        self.counts.touch()
        self.log_uri = str(
            self.folder / "root" / "datagen_checkpoints" / "counting" / "crash" / "log.lance"
        )
        self.source = self.folder / "rows.jsonl"
        self.source.write_text(
            "".join(json.dumps({"id": f"k{n}/é", "n": n}) + "\n" for n in range(ROOTS))
        )
        self._command = [
            sys.executable, "-m", "datagen_ray", "run", f"{counting_job.__file__}:pipeline",
            "--source", str(self.source), "--key", "id", "--root", str(self.folder / "root"),
            "--experiment", "crash", "--workers", "2", "--concurrency", "4", "--json",
        ]  # fmt: skip
        self._env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "RAY_TMPDIR": ray_folder,
            counting_job.COUNT_VARIABLE: str(self.counts),
            counting_job.SLEEP_VARIABLE: str(step_s),
        }

    def start(self) -> Session:
        return Session(self._command, self._env, self.folder / "output")

    def executions(self, since: int = 0) -> list[Key]:
        """What steps ran, in order, from a position in the file on."""
        found = []
        for line in self.counts.read_bytes()[since:].decode().splitlines():
            item_id, name, index = line.split("\t")
            found.append((item_id, name, int(index)))
        return found

    def export(self) -> list[str]:
        path = self.folder / "rows.out.jsonl"
        assert status_of(["export", self.log_uri, "--to", str(path)]) == 0
        return path.read_text().splitlines()


class Ledger:
    """What was durable when it was last looked at, and from where on executions came later."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._looks: list[tuple[set[Key], int]] = []

    def look(self) -> None:
        if not Path(self._job.log_uri).is_dir():
            return
        with DatagenStore.open(self._job.log_uri, read_only=True) as store:
            durable = completed(store)
        # Only now: a step that is durable by the look began before the look.
        self._looks.append((set(durable), self._job.counts.stat().st_size))

    def check(self) -> int:
        """No step ran after a look that had found it durable. Returns how many were checked."""
        for durable, since in self._looks:
            again = durable.intersection(self._job.executions(since))
            assert not again, f"ran again although durable: {sorted(again)[:5]}"
        return sum(len(durable) for durable, _ in self._looks)


def completed(store: DatagenStore) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for batch in store.events(columns=["item_id", "event_type", "step_name", "step_index"]):
        for row in batch.to_pylist():
            if row["event_type"] == DatagenEventType.STEP_COMPLETED.value:
                found[row["item_id"], row["step_name"], row["step_index"]] += 1
    return found


def _reached(job: Job, session: Session, target: int) -> bool:
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
@pytest.mark.timeout(280)
def test_a_run_that_is_killed_again_and_again_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("DATAGEN_RAY_TEST_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"seed {seed}: set DATAGEN_RAY_TEST_SEED={seed} to repeat the kills\n")
    rng = random.Random(seed)

    calm = Job(tmp_path, "calm", ray_folder, step_s=0)
    monkeypatch.setenv(counting_job.COUNT_VARIABLE, str(calm.counts))
    run_local(
        counting_job.pipeline,
        calm.source,
        key="id",
        root=calm.folder / "root",
        experiment="crash",
        fsync=False,
    )
    expected = calm.export()
    assert 0 < len(expected) < ROOTS, "some roots are to be filtered"
    lines = len(calm.executions())

    job = Job(tmp_path, "killed", ray_folder, step_s=STEP_S)
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
