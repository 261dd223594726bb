"""Whole runs on a Ray of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.cluster.run import RayOptions, run
from datagen_ray.cluster.summary import SUMMARY_KEYS, RunSummary, Silent
from datagen_ray.errors import ConfigError, RunSupersededError, SourceError
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.nodes import MapReduce
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Filtered
from datagen_ray.pipeline.steps import step
from datagen_ray.store.layout import shard_uuid
from datagen_ray.store.runs import latest_run, list_runs
from datagen_ray.store.shard import list_shards, read_latest_manifest, read_wal_tail
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from tests.cluster.maintained import EAGER
from tests.crash.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def note(item: Any, ctx: StepContext) -> None:
    """Append who runs this step to the file that the row names."""
    line = f"{ctx.item_id} {ctx.position.step_name} {os.getpid()}\n"
    with open(item["notes"], "ab", buffering=0) as file:
        file.write(line.encode())


def notes_of(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@step
async def first(item: Any, ctx: StepContext) -> dict[str, Any]:
    note(item, ctx)
    return {"a": item["n"] + 1}


@step
async def held(item: Any, ctx: StepContext) -> dict[str, Any]:
    """Waits until the file that the row names is there."""
    note(item, ctx)
    while not os.path.exists(item["gate"]):
        await asyncio.sleep(0.01)
    return {"b": item["a"] * 2}


@step
def judged(item: Any) -> dict[str, Any]:
    if item["n"] % 5 == 4:
        raise Filtered("four")
    if item["n"] == 7:
        raise ValueError("seven is wrong")
    return {"c": item["b"] + 1}


def pipeline() -> Pipeline:
    return Pipeline("demo", [first, held, judged])


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    return [
        {"n": n, "notes": str(folder / "notes"), "gate": str(folder / "gate")} for n in range(count)
    ]


def start(folder: Path, count: int, **options: Any) -> RunSummary:
    return run(
        pipeline(),
        rows(folder, count),
        root=folder / "root",
        experiment="e",
        key="n",
        **{"workers": 2, "concurrency": 4, **options},
    )


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool
        # Whatever a test left running can end.
        (tmp_path / "gate").touch()


class Told(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def count(self, words: str) -> int:
        return sum(words in note for note in self.notes)


def test_roots_end_and_a_second_run_skips_them_all(tmp_path: Path, ray_here: None) -> None:
    (tmp_path / "gate").touch()
    summary = start(tmp_path, 20)
    assert tuple(summary.to_dict()) == SUMMARY_KEYS
    assert (summary.roots_total, summary.fresh, summary.skipped) == (20, 20, 0)
    assert (summary.completed, summary.filtered, summary.failed) == (15, 4, 1)
    assert summary.failures[0].root_id == "7"
    assert "seven is wrong" in summary.failures[0].error
    # Each root runs three steps; the one that fails runs its last step twice more.
    assert summary.steps_executed == 20 * 3 + 2

    again = start(tmp_path, 20)
    assert (again.skipped, again.resumed, again.fresh) == (19, 1, 0)
    assert again.steps_executed == 3, "the failed root is tried again, as it may have been mended"

    start(tmp_path, 20)
    exhausted = start(tmp_path, 20)
    assert exhausted.steps_executed == 0, "it failed nine times over all runs"
    assert exhausted.failures[0].error.startswith("exhausted: 9 failures")

    asked = start(tmp_path, 20, retry_exhausted=True, max_root_retries=0)
    assert asked.steps_executed == 1
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        assert store.overview().failures == 10
        assert len(store.root_item_statuses()) == 20


def test_a_killed_worker_comes_back_and_its_roots_are_resumed(
    tmp_path: Path, ray_here: None, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(start, tmp_path, 4)
    notes = tmp_path / "notes"
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 4, "all roots to be held")
    workers = {note[2] for note in notes_of(notes)}
    for pid in workers:
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 8, "all roots to be back")
    (tmp_path / "gate").touch()
    summary = running.result(150)
    assert (summary.completed, summary.fresh) == (4, 4)
    ran = notes_of(notes)
    assert sum(note[1] == "first" for note in ran) == 4, "what was durable did not run again"
    assert not workers & {note[2] for note in ran[-4:]}
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        assert {store.fold_item(str(n)).folded().last_attempt for n in range(4)} == {1}  # type: ignore[union-attr]


def test_a_worker_told_to_end_lets_its_steps_end_and_no_step_runs_twice(
    tmp_path: Path, ray_here: None, threads: ThreadPoolExecutor
) -> None:
    told = Told()
    running = threads.submit(start, tmp_path, 4, listener=told)
    notes = tmp_path / "notes"
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 4, "all roots to be held")
    workers = {note[2] for note in notes_of(notes)}
    for pid in workers:
        os.kill(int(pid), signal.SIGTERM)
    wait_until(lambda: told.count("lets its steps end") == len(workers), "all to be draining")
    (tmp_path / "gate").touch()
    summary = running.result(150)
    assert (summary.completed, summary.failed) == (4, 0)
    assert sorted(note[:2] for note in notes_of(notes)) == sorted(
        [str(n), name] for n in range(4) for name in ("first", "held")
    )
    assert {note[2] for note in notes_of(notes)} == workers


def test_a_later_run_takes_over_and_the_earlier_one_names_it(
    tmp_path: Path, ray_here: None, threads: ThreadPoolExecutor
) -> None:
    earlier = threads.submit(start, tmp_path, 6)
    notes = tmp_path / "notes"
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 6, "the earlier run")
    later: Future[RunSummary] = threads.submit(start, tmp_path, 6)
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 12, "the later run")
    log = str(tmp_path / "root" / "datagen_checkpoints" / "demo" / "e" / "log.lance")
    latest = latest_run(log)
    assert latest is not None
    with pytest.raises(RunSupersededError, match=latest.run_id):
        earlier.result(150)
    (tmp_path / "gate").touch()
    summary = later.result(150)
    assert summary.run_id == latest.run_id
    assert (summary.resumed, summary.completed, summary.filtered) == (6, 5, 1)
    assert sum(note[1] == "first" for note in notes_of(notes)) == 6
    assert [each.term for each in list_runs(log)] == [1, 2]
    with DatagenStore.open(log, read_only=True) as store:
        assert not store.overview().violations


def test_running_roots_that_left_the_source_are_resumed(
    tmp_path: Path, ray_here: None, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(start, tmp_path, 2)
    notes = tmp_path / "notes"
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 2, "all roots to be held")
    later = threads.submit(start, tmp_path, 0, workers=1)
    with pytest.raises(RunSupersededError):
        running.result(150)
    (tmp_path / "gate").touch()
    summary = later.result(150)
    assert (summary.roots_total, summary.resumed, summary.completed) == (2, 2, 2)


def shards_at_work(log: str) -> dict[str, tuple[int, int]]:
    """For each shard: generations that wait, and WAL entries with rows that are not flushed."""
    storage = LogStorage(log)
    found = {}
    for shard in list_shards(storage):
        manifest = read_latest_manifest(storage, shard)
        assert manifest is not None
        tail = read_wal_tail(storage, shard, manifest.replay_after).entries
        found[shard] = (len(manifest.sstables), len(tail))
    return found


@pytest.mark.soak
def test_a_run_of_fewer_workers_adopts_and_merges_the_shards_that_are_left_over(
    tmp_path: Path, ray_here: None, threads: ThreadPoolExecutor
) -> None:
    small = RayOptions(num_cpus=0.25)
    earlier = threads.submit(start, tmp_path, 32, workers=8, ray_options=small, maintainer=None)
    notes = tmp_path / "notes"
    wait_until(lambda: sum(n[1] == "held" for n in notes_of(notes)) == 32, "eight workers")
    later = threads.submit(
        start, tmp_path, 32, workers=2, concurrency=16, ray_options=small, maintainer=EAGER
    )
    with pytest.raises(RunSupersededError):
        earlier.result(150)
    log = str(tmp_path / "root" / "datagen_checkpoints" / "demo" / "e" / "log.lance")
    own = {shard_uuid(f"worker-{number}") for number in range(2)}

    def adopted() -> bool:
        orphans = {s: found for s, found in shards_at_work(log).items() if s not in own}
        return len(orphans) == 6 and all(found == (0, 0) for found in orphans.values())

    wait_until(adopted, "the maintainer to merge the shards that nobody writes to")
    assert not later.done(), "while the run goes on"
    (tmp_path / "gate").touch()
    summary = later.result(150)
    assert (summary.resumed, summary.completed + summary.filtered + summary.failed) == (32, 32)
    assert sum(note[1] == "first" for note in notes_of(notes)) == 32
    assert len(shards_at_work(log)) == 8
    assert {found[0] for found in shards_at_work(log).values()} == {0}
    with DatagenStore.open(log, read_only=True) as store:
        report = store.verify()
    assert report.is_clean
    assert report.rows["base"] == report.events


@step
def square(item: Any) -> dict[str, Any]:
    return {"y": item["x"] ** 2}


@step
def deadly(item: Any) -> dict[str, Any]:
    if item["n"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"a": 1}


def test_a_root_that_kills_its_worker_is_recorded_and_the_others_end(
    tmp_path: Path, ray_here: None
) -> None:
    summary = run(
        Pipeline("killing", [deadly]),
        [{"n": n} for n in range(6)],
        root=tmp_path / "root",
        experiment="e",
        key="n",
        workers=1,
        concurrency=2,
    )
    assert (summary.completed, summary.failed) == (5, 1)
    assert summary.failures[0].root_id == "3"
    assert "WorkerDied" in summary.failures[0].error
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        (failure,) = store.item_failures("3")
        assert failure.error.error_type == "WorkerDied"


def test_a_pipeline_that_cannot_travel_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    lock = threading.Lock()

    @step
    def locked(item: Any) -> dict[str, Any]:
        with lock:
            return {}

    with pytest.raises(ConfigError, match="cannot be sent to workers"):
        run(Pipeline("p", [locked]), [{"n": 1}], root=tmp_path / "root", experiment="e")
    with pytest.raises(SourceError, match="repeated key"):
        run(pipeline(), [{"n": 1}, {"n": "1"}], root=tmp_path / "root", experiment="e", key="n")
    assert list(tmp_path.iterdir()) == []


def test_the_rows_of_a_ray_data_set_are_roots(tmp_path: Path, ray_here: None) -> None:
    ray_data = pytest.importorskip("ray.data")
    data = ray_data.from_items([{"k": f"k{n}", "x": n} for n in range(5)])
    summary = run(
        Pipeline("squares", [square]), data, root=tmp_path, experiment="e", key="k", workers=1
    )
    assert summary.completed == 5
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        folded = store.fold_item("k4").folded()
        assert folded is not None
        assert folded.fields["y"].value.value == 16
    with pytest.raises(SourceError, match="no column 'id' for the key; it has 'k', 'x'"):
        run(Pipeline("squares", [square]), data, root=tmp_path, experiment="f", key="id")


def test_fan_out_runs_under_its_root(tmp_path: Path, ray_here: None) -> None:
    spread = Pipeline(
        "spread",
        [
            MapReduce(
                "each",
                split=lambda item: [{"x": x} for x in range(item["n"])],
                each=square,
                reduce=lambda item, results: {"sum": sum(r["y"] for r in results)},
            )
        ],
    )
    summary = run(
        spread, [{"n": n} for n in range(5)], root=tmp_path, experiment="e", key="n", workers=1
    )
    assert summary.completed == 5
    with DatagenStore.open(summary.log_uri, read_only=True) as store:
        folded = store.fold_item("4").folded()
        assert folded is not None
        assert folded.fields["sum"].value.value == 14
