"""The maintainer of a run: elected, alone, never a claimant, replaced when it is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from datagen_ray.cluster.actors import RayFleet, RayOptions
from datagen_ray.cluster.maintainer import (
    Maintainer,
    MaintainerConfig,
    MaintainerOptions,
    MaintainerStatus,
)
from datagen_ray.store import layout
from datagen_ray.store.maintenance import MaintenanceReport
from datagen_ray.store.runs import RunTerm, begin_run
from datagen_ray.store.shared_compaction import RewriteTask, rewrite
from tests.cluster.maintained import EAGER
from tests.crash.processes import wait_until
from tests.store.maintenance_support import (
    add_generations,
    base_ids,
    generations,
    ids_of,
    log_with_generations,
    manifest_of,
    visible_ids,
)


def config_of(uri: str, *slots: str, options: MaintainerOptions = EAGER) -> MaintainerConfig:
    return MaintainerConfig(uri, term_of(uri, "ours"), slots, options)


def term_of(uri: str, run_id: str) -> RunTerm:
    return begin_run(uri, run_id, pipeline_tree={}, fingerprint="f", origin="test")


def lease_terms(uri: str) -> list[dict[str, Any]]:
    folder = Path(layout.experiment_of(uri)) / layout.MAINTENANCE_FOLDER
    files = sorted(folder.glob("lease-*.json")) if folder.is_dir() else []
    return [json.loads(each.read_text()) for each in files]


class Passes:
    """Reports of passes, and a way to wait for the next."""

    def __init__(self) -> None:
        self.seen: list[MaintenanceReport] = []
        self._more = threading.Condition()

    def __call__(self, report: MaintenanceReport) -> None:
        with self._more:
            self.seen.append(report)
            self._more.notify_all()

    def wait(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.seen) >= count, 30)


def test_orphan_shards_are_merged_and_the_shards_of_the_run_are_left_to_their_workers(
    tmp_path: Path,
) -> None:
    uri = log_with_generations(tmp_path, "a", "b", slot="orphan")
    add_generations(uri, "c", slot="worker-0")
    before = {slot: manifest_of(uri, slot).writer_epoch for slot in ("orphan", "worker-0")}
    passes = Passes()
    maintainer = Maintainer(config_of(uri, "worker-0"), holder="m", pid=1, on_report=passes)
    maintainer.start()
    passes.wait(2)
    maintainer.stop()
    assert generations(uri, "orphan") == []
    assert len(generations(uri, "worker-0")) == 1
    assert sorted(base_ids(uri)) == ids_of("a", "b")
    assert visible_ids(uri) == ids_of("a", "b", "c")
    after = {slot: manifest_of(uri, slot).writer_epoch for slot in ("orphan", "worker-0")}
    assert after == before, "it claims nothing"
    assert [each["released"] for each in lease_terms(uri)] == [True]
    assert passes.seen[0].failures == []


def test_the_rewriting_is_done_by_others_and_committed_once(tmp_path: Path) -> None:
    uri = log_with_generations(tmp_path, *"abcd", slot="orphan")
    handed: list[RewriteTask] = []

    def rewriter(tasks: Any) -> list[str]:
        handed.extend(tasks)
        return [rewrite(task) for task in tasks]

    passes = Passes()
    maintainer = Maintainer(config_of(uri), holder="m", pid=1, rewriter=rewriter, on_report=passes)
    maintainer.start()
    passes.wait(1)
    maintainer.stop()
    assert maintainer.status().compactions == 1
    assert len(handed) == 1
    assert passes.seen[0].compaction is not None
    assert passes.seen[0].compaction.fragments_removed == 4
    assert passes.seen[0].indexes is not None
    assert passes.seen[0].indexes.uncovered_rows == 0
    assert sorted(base_ids(uri)) == ids_of(*"abcd")


def test_what_a_rewriter_lost_is_planned_again(tmp_path: Path) -> None:
    uri = log_with_generations(tmp_path, *"abcd", slot="orphan")
    calls: list[int] = []

    def rewriter(tasks: Any) -> list[str]:
        calls.append(len(tasks))
        return [] if len(calls) == 1 else [rewrite(task) for task in tasks]

    passes = Passes()
    maintainer = Maintainer(config_of(uri), holder="m", pid=1, rewriter=rewriter, on_report=passes)
    maintainer.start()
    passes.wait(2)
    maintainer.stop()
    assert calls[:2] == [1, 1]
    assert maintainer.status().compactions == 1
    assert sorted(base_ids(uri)) == ids_of(*"abcd")


def test_the_maintainer_of_a_superseded_run_ends(tmp_path: Path) -> None:
    uri = log_with_generations(tmp_path, "a", slot="orphan")
    config = config_of(uri)
    term_of(uri, "later")
    maintainer = Maintainer(config, holder="m", pid=1)
    maintainer.start()
    maintainer.stop()
    assert maintainer.status().passes == 0
    assert lease_terms(uri) == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "point", [pytest.param("before_compaction", marks=pytest.mark.soak), "after_compaction"]
)
def test_a_maintainer_killed_at_a_compaction_commit_is_replaced_within_the_lease_time(
    tmp_path: Path, point: str
) -> None:
    uri = log_with_generations(tmp_path, *"abcd", slot="orphan")
    killed = subprocess.run(
        [
            sys.executable, "-m", "datagen_ray", "maintain", uri, "--interval-s", "1",
            "--small-fragments", "2", "--lease-s", "2",
        ],
        env={**os.environ, "DATAGEN_RAY_CRASH_AT": f"{point}:1"},
        cwd=Path(__file__).resolve().parents[2],
        check=False,
        timeout=60,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert [each["released"] for each in lease_terms(uri)] == [False]
    passes = Passes()
    successor = Maintainer(config_of(uri), holder="successor", pid=1, on_report=passes)
    successor.start()
    passes.wait(1)
    assert lease_terms(uri)[1]["holder"] == "successor"
    successor.stop()
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of(*"abcd")
    assert passes.seen[0].failures == []


@pytest.fixture
def fleet(ray_here: None) -> Iterator[RayFleet]:
    made = RayFleet(RayOptions())
    yield made
    made.close()


def status(name: str) -> MaintainerStatus | None:
    try:
        actor = ray.get_actor(f"{name}/maintainer")
        found: MaintainerStatus = ray.get(actor.status.remote(), timeout=10)
    except (ValueError, ray.exceptions.RayError):
        return None
    return found


@pytest.mark.slow
@pytest.mark.ray
def test_ray_brings_a_killed_maintainer_back_and_it_takes_the_next_lease(
    tmp_path: Path, fleet: RayFleet
) -> None:
    uri = log_with_generations(tmp_path, *"abcd", slot="orphan")
    fleet.name = f"datagen_ray/test/{tmp_path.name}"
    fleet.maintenance = config_of(uri)
    fleet.start_maintainer()

    def at_work(than: int) -> bool:
        found = status(fleet.name)
        return found is not None and found.pid != than and found.passes > 0

    wait_until(lambda: at_work(0), "the first pass")
    first = status(fleet.name)
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: at_work(first.pid), "the next maintainer")
    second = status(fleet.name)
    assert second is not None
    assert second.lease_term == 2
    assert second.failures == ()
    assert generations(uri, "orphan") == []
    assert sorted(base_ids(uri)) == ids_of(*"abcd")
    fleet.close()
    assert [each["released"] for each in lease_terms(uri)] == [False, True]
    assert status(fleet.name) is None
