"""A run whose cluster grows and shrinks under it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datagen_ray.cli.main import status_of
from tests.crash import counting_job, noted_job
from tests.crash.counted_job import CountedJob, check_acknowledged
from tests.crash.nodes import Nodes
from tests.crash.notes import ACKNOWLEDGED, NOTES_VARIABLE, Note, checkpoints_of, read_notes
from tests.crash.processes import Session, wait_until

ROOTS = 60
CONCURRENCY = 4


class Growing:
    """A run that starts with one worker, on a cluster of one node, and wants up to three."""

    def __init__(self, folder: Path, environment: pytest.MonkeyPatch) -> None:
        self._notes, self._holds = folder / "notes", folder / "holds"
        self._notes.touch()
        self._holds.mkdir()
        token = {"RAY_AUTH_MODE": "token"}
        self.calm = self._job(folder / "calm", token)
        self.job = self._job(
            folder / "job",
            {
                **token,
                NOTES_VARIABLE: str(self._notes),
                noted_job.HOLDS_VARIABLE: str(self._holds),
            },
        )
        for name, value in self.job.variables.items():
            # Workers have the variables of their node, not those of the driver.
            environment.setenv(name, value)
        self.nodes = Nodes(1)
        self.session: Session = self.job.start("--address", self.nodes.address)

    def _job(self, folder: Path, env: dict[str, str]) -> CountedJob:
        return CountedJob(
            folder,
            noted_job.__file__,
            "noted",
            ROOTS,
            step_s=0.2,
            options=["--min-workers=1", "--max-workers=3", f"--concurrency={CONCURRENCY}"],
            env=env,
        )

    def notes(self) -> list[Note]:
        return read_notes(self._notes)

    def at_work(self) -> set[int]:
        """The processes that made a checkpoint, alive or not."""
        notes = self.notes()
        return {each.pid for each in notes if checkpoints_of(notes, each.pid)}

    def unfinished_of(self, worker: int) -> set[str]:
        """Roots that a worker began and that have not ended."""
        notes = self.notes()
        ended = {
            each.item_id
            for each in notes
            if each.kind == ACKNOWLEDGED and each.event_type in ("COMPLETED", "FILTERED")
        }
        return {each.item_id for each in notes if each.pid == worker} - ended

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            assert self.session.running, self.session.output()
            return bool(condition())

        try:
            wait_until(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.session.output()}") from error

    def finish(self) -> None:
        (self._holds / noted_job.FINISH).touch()

    def close(self) -> None:
        self.session.kill_all()
        self.nodes.close()


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Growing]:
    monkeypatch.delenv(counting_job.COUNT_VARIABLE, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", "0" * 64))
    made = Growing(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.mark.soak
@pytest.mark.timeout(280)
@pytest.mark.parametrize("in_order", [True, False], ids=["told to end", "killed"])
def test_a_node_that_is_added_gets_a_worker_and_roots_and_loses_none_when_it_is_removed(
    growing: Growing, in_order: bool
) -> None:
    growing.wait(lambda: len(growing.at_work()) == 1, "the first worker to be at work")
    (first,) = growing.at_work()
    assert growing.nodes.workers() == [first], "it is the only one that there is room for"
    growing.nodes.add()
    growing.wait(lambda: len(growing.at_work()) == 2, "the new node to have a worker at work")
    (second,) = growing.at_work() - {first}
    growing.wait(
        lambda: len(growing.unfinished_of(second)) == CONCURRENCY, "it to have its hands full"
    )
    taken = growing.unfinished_of(second)
    growing.nodes.remove_node_of(second, in_order=in_order)
    growing.finish()
    assert growing.session.process.wait(120) == 0, growing.session.output()
    summary = json.loads(growing.session.output().splitlines()[-1])
    assert summary["completed"] + summary["filtered"] == ROOTS
    assert summary["failed"] == 0
    notes = growing.notes()
    assert taken <= {each.item_id for each in notes if each.pid == first}, "its roots moved on"
    check_acknowledged(growing.job, notes, {second})
    growing.calm.run_here(noted_job.pipeline)
    assert growing.job.export() == growing.calm.export()
    assert status_of(["verify", growing.job.log_uri]) == 0
