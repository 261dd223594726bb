"""Placed steps and shared limits on a Ray of this module's own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from datagen_ray.cluster.run import run
from datagen_ray.cluster.summary import RunSummary, Silent
from datagen_ray.pipeline.limits import RateLimit
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Filtered, Permanent
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.steps import Step, step
from datagen_ray.store.store import DatagenStore

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="dgr", dir="/tmp")
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=6,
            resources={"accelerator": 2},
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
        )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def start(tmp_path: Path, steps: list[Step], rows: int, **options: Any) -> RunSummary:
    options = {"workers": 2, "max_root_retries": 0, **options}
    return run(
        Pipeline("p", steps),
        [{"n": n, "folder": str(tmp_path)} for n in range(rows)],
        root=tmp_path,
        experiment="e",
        fsync=False,
        **options,
    )


def fields(summary: RunSummary, name: str) -> list[Any]:
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        found = {
            item_id: folded.fields[name].value.value
            for item_id in store.root_item_statuses()
            if (folded := store.fold_item(item_id).folded()) and name in folded.fields
        }
    return [found[item_id] for item_id in sorted(found, key=int)]


def failure(summary: RunSummary) -> str:
    assert summary.failed == 1
    return summary.failures[0].error


@step(timeout_s=60)
def meet(item: Any) -> dict[str, Any]:
    """Returns when two workers have come as far as here."""
    here = Path(item["folder"])
    (here / f"worker-{os.getpid()}").touch()
    while len(list(here.glob("worker-*"))) < 2:
        time.sleep(0.01)
    return {"worker": os.getpid()}


def test_tasks_and_pools_run_outside_of_the_workers(tmp_path: Path) -> None:
    @step(num_cpus=2)
    def far(item: Any, ctx: Any) -> dict[str, Any]:
        if item["n"] == 3:
            raise Filtered("three is not wanted")
        if item["n"] == 4:
            raise Permanent("four is wrong")
        return {"task": [os.getpid(), ctx.item_id]}

    @step(num_actors=2, num_cpus=0.1, resources={"accelerator": 1}, batch_size=2)
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor
            self.calls = 0

        def __call__(self, items: Any) -> list[dict[str, Any]]:
            self.calls += 1
            return [{"pool": [os.getpid(), item["n"] * self.factor]} for item in items]

    @step(num_cpus=0.1, num_actors=1)
    async def asynchronous(item: Any) -> dict[str, Any]:
        return {"async": os.getpid()}

    summary = start(tmp_path, [meet, far, Model(10), asynchronous], 10, concurrency=4)
    assert (summary.completed, summary.filtered, summary.failed) == (8, 1, 1)
    assert failure(summary).startswith("Permanent: four is wrong")
    workers = set(fields(summary, "worker"))
    actors = {pid for pid, _ in fields(summary, "pool")}
    assert len(workers) == 2
    # Two actors, however many workers: they are the run's.
    assert 1 <= len(actors) <= 2
    assert not workers & (actors | {pid for pid, _ in fields(summary, "task")})
    assert not workers & set(fields(summary, "async"))
    assert [value for _, value in fields(summary, "pool")] == [
        10 * n for n in range(10) if n not in (3, 4)
    ]
    again = start(tmp_path, [meet, far, Model(10), asynchronous], 10)
    # The one that failed is tried again, from the step that failed on.
    assert (again.skipped, again.resumed, again.steps_executed) == (9, 1, 1)


def hang(item: Any) -> dict[str, Any]:
    """Hangs at its first call, as code does that no exception can reach."""
    seen = Path(item["folder"]) / "seen"
    if not seen.exists():
        seen.write_text(str(os.getpid()))
        time.sleep(600)
    return {"pids": [int(seen.read_text()), os.getpid()]}


@pytest.mark.parametrize("pool", [False, True])
def test_a_timeout_ends_the_process(tmp_path: Path, pool: bool) -> None:
    options: dict[str, Any] = {"num_actors": 1} if pool else {}
    slow = step(
        num_cpus=0.1, timeout_s=1, retry=Retry(attempts=2, wait_s=0, on=TimeoutError), **options
    )(hang)
    summary = start(tmp_path, [slow], 1, workers=1)
    assert (summary.completed, summary.steps_executed) == (1, 1)
    ((first, second),) = fields(summary, "pids")
    assert first != second
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("pool", [False, True])
def test_a_process_that_dies_is_replaced_and_the_step_called_again(
    tmp_path: Path, pool: bool
) -> None:
    def die(item: Any) -> dict[str, Any]:
        seen = Path(item["folder"]) / "died"
        if not seen.exists():
            seen.touch()
            os._exit(1)
        return {"x": 1}

    options: dict[str, Any] = {"num_actors": 1} if pool else {}
    summary = start(tmp_path, [step(num_cpus=0.1, **options)(die)], 1, workers=1)
    assert (summary.completed, fields(summary, "x")) == (1, [1])


def test_a_call_that_kills_every_process_is_a_failure_of_its_item(tmp_path: Path) -> None:
    def die(item: Any) -> None:
        if item["n"] == 0:
            os._exit(1)

    summary = start(tmp_path, [step(num_cpus=0.1)(die)], 2, workers=1)
    assert summary.completed == 1
    died = "StepProcessDied: the process of step 'die' died 4 times under this item, and 0 times"
    assert failure(summary).startswith(died)


def test_limits_hold_across_workers(tmp_path: Path) -> None:
    @step(max_in_flight_run=1, rate_limit=RateLimit(50, name="service"))
    def alone(item: Any) -> dict[str, Any]:
        place = Path(item["folder"]) / "inside"
        place.touch(exist_ok=False)
        place.unlink()
        return {"at": time.time()}

    summary = start(tmp_path, [meet, alone], 10, concurrency=4)
    assert summary.completed == 10, summary.failures
    assert len(set(fields(summary, "worker"))) == 2
    times = sorted(fields(summary, "at"))
    assert times[-1] - times[0] >= 9 / 50 * 0.8


def test_a_pool_that_cannot_be_built_stops_the_run(tmp_path: Path) -> None:
    @step(num_actors=1, num_cpus=0.1)
    class Model:
        def __init__(self) -> None:
            raise OSError("no weights")

        def __call__(self, item: Any) -> None: ...

    with pytest.raises(ValueError, match="step 'Model' could not be set up: OSError: no weights"):
        start(tmp_path, [Model()], 1)


class Notes(Silent):
    """Keeps what a run says before it begins."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_failures_are_redacted_as_asked_and_changes_are_told_first(tmp_path: Path) -> None:
    @step
    def fail(item: Any) -> None:
        raise ValueError("the customer is Ada")

    def redact(text: str) -> str:
        return text.replace("Ada", "[somebody]")

    assert failure(start(tmp_path, [fail], 1, workers=1, redact=redact)).startswith(
        "ValueError: the customer is [somebody]"
    )
    notes = Notes()
    start(tmp_path, [fail.named("other")], 1, workers=1, listener=notes)
    assert [note.strip() for note in notes.notes][1:4] == [
        "removed: fail (leaf)",
        "added: other (leaf)",
        "running roots that were begun before: 1; roots that ended stay as they are",
    ]
