"""A counting job as a command that can be started again, and the account of what it ran.

Steps of the job write down each execution (``counting_job.count``). What was durable before an
execution is known by looking at the log first and at the executions after.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from datagen_ray.cli.main import status_of
from datagen_ray.log.events import DatagenEventType
from datagen_ray.pipeline.local import run_local
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.store.store import DatagenStore
from tests.crash import counting_job
from tests.crash.notes import ACKNOWLEDGED, RAN, Note
from tests.crash.processes import Session

Key = tuple[str, str, int]


class CountedJob:
    """A pipeline of ``file`` over ``roots`` rows, on a log below ``folder``."""

    def __init__(
        self,
        folder: Path,
        file: str,
        name: str,
        roots: int,
        *,
        step_s: float,
        options: Sequence[str],
        env: dict[str, str],
    ) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.roots = roots
        self.counts = self.folder / "counts"
        self.counts.touch()
        self.root = self.folder / "root"
        self.log_uri = str(self.root / "datagen_checkpoints" / name / "crash" / "log.lance")
        self.source = self.folder / "rows.jsonl"
        self.source.write_text(
            "".join(json.dumps({"id": f"k{n}/é", "n": n}) + "\n" for n in range(roots))
        )
        self._command = [
            sys.executable, "-m", "datagen_ray", "run", f"{file}:pipeline",
            "--source", str(self.source), "--key", "id", "--root", str(self.root),
            "--experiment", "crash", "--json", *options,
        ]  # fmt: skip
        self.variables = {
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            counting_job.COUNT_VARIABLE: str(self.counts),
            counting_job.SLEEP_VARIABLE: str(step_s),
            **env,
        }
        self.env = {**os.environ, **self.variables}

    def start(
        self, *more: str, inside: Callable[[list[str]], list[str]] = lambda command: command
    ) -> Session:
        """Start the run; ``inside`` makes of its command one that runs it elsewhere."""
        return Session(inside([*self._command, *more]), self.env, self.folder / "output")

    def run_here(self, pipeline: Pipeline) -> None:
        """The undisturbed run, in this process. Its counting follows this process's variables."""
        run_local(pipeline, self.source, key="id", root=self.root, experiment="crash", fsync=False)

    def executions(self, since: int = 0) -> list[Key]:
        """What steps ran, in order, from a position in the file on."""
        found = []
        for line in self.counts.read_bytes()[since:].decode().splitlines():
            item_id, name, index = line.split("\t")
            found.append((item_id, name, int(index)))
        return found

    def executed(self) -> int:
        return self.counts.read_bytes().count(b"\n")

    def export(self) -> list[str]:
        path = self.folder / "rows.out.jsonl"
        assert status_of(["export", self.log_uri, "--to", str(path)]) == 0
        return path.read_text().splitlines()


class Ledger:
    """What was durable when it was last looked at, and from where on executions came later."""

    def __init__(self, job: CountedJob) -> None:
        self._job = job
        self._looks: list[tuple[frozenset[Key], int]] = []

    def look(self) -> None:
        if not Path(self._job.log_uri).is_dir():
            return
        with DatagenStore.open(self._job.log_uri, read_only=True) as store:
            durable = completed(store)
        # Only now: a step that is durable by the look began before the look.
        self._looks.append((frozenset(durable), self._job.counts.stat().st_size))

    def check(self) -> int:
        """No step ran after a look that had found it durable. Returns how many were checked."""
        for durable, since in self._looks:
            again = durable.intersection(self._job.executions(since))
            assert not again, f"ran again although durable: {sorted(again)[:5]}"
        return sum(len(durable) for durable, _ in self._looks)


def completed(store: DatagenStore) -> Counter[Key]:
    """How often the log says of each step of each item that it was completed."""
    found: Counter[Key] = Counter()
    for batch in store.events(columns=["item_id", "event_type", "step_name", "step_index"]):
        for row in batch.to_pylist():
            if row["event_type"] == DatagenEventType.STEP_COMPLETED.value:
                found[row["item_id"], row["step_name"], row["step_index"]] += 1
    return found


def check_acknowledged(job: CountedJob, notes: Sequence[Note], lost: Collection[int]) -> None:
    """Whatever was acknowledged is in the log, once, and nothing of it ran again.

    ``lost`` are the processes that the cluster gave up. They may have begun, after their shard was
    claimed, what others had run by then; nobody may have run what they had acknowledged.
    """
    acknowledged = [each for each in notes if each.kind == ACKNOWLEDGED]
    with DatagenStore.open(job.log_uri, read_only=True) as store:
        assert set(completed(store).values()) == {1}
        rows = {
            row["event_id"]: row["writer_epoch"]
            for batch in store.events(columns=["event_id", "writer_epoch"])
            for row in batch.to_pylist()
        }
    assert len({each.event_id for each in acknowledged}) == len(acknowledged)
    for each in acknowledged:
        assert rows.get(each.event_id or "") == each.writer_epoch, each
    by = {each.key: each.pid for each in acknowledged if each.is_checkpoint}
    for each in notes:
        if each.kind == RAN and each.key in by and each.pid not in lost:
            assert by[each.key] == each.pid, f"ran although it was durable: {each}"
