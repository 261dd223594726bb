"""A compaction rewritten by Ray tasks on several nodes: planned once, committed once, or not."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import ray

from datagen_ray.cli.main import status_of
from datagen_ray.cluster.actors import RayFleet, RayOptions
from datagen_ray.cluster.maintainer import MaintainerConfig
from datagen_ray.crashpoints import ENVIRONMENT_VARIABLE
from datagen_ray.store import layout
from datagen_ray.store.compaction import ROWS_PER_FRAGMENT
from datagen_ray.store.creation import open_log
from datagen_ray.store.maintenance import finish_log
from datagen_ray.store.runs import begin_run
from datagen_ray.store.store import DatagenStore
from tests.cluster.maintained import EAGER
from tests.crash.nodes import Nodes
from tests.crash.processes import wait_until
from tests.store.writer_support import new_log

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(280)]

ROWS = int(ROWS_PER_FRAGMENT * 2.1)
FRAGMENTS = 12
NODES = 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", "0" * 64))
        environment.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        made = Nodes(NODES)
        yield made
        made.close()


def log_of_small_fragments(folder: Path) -> str:
    """A log of so many items, each only created, that joining its fragments takes several tasks."""
    uri = new_log(folder)
    with DatagenStore.open(uri, shard_id="slot") as store:
        store.open_stream("k", run_id="run")
    finish_log(uri)
    dataset = open_log(uri)
    table = dataset.to_table().take(pa.array([0] * ROWS))
    roots = [f"k{number}" for number in range(ROWS)]
    columns = {
        "item_id": roots,
        "root_item_id": roots,
        "event_id": [str(uuid.uuid5(uuid.NAMESPACE_OID, root)) for root in roots],
        "checkpoint_id": [f"{root}\0created" for root in roots],
    }
    for name, values in columns.items():
        field = dataset.schema.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, pa.array(values, field.type)
        )
    lance.write_dataset(table, uri, mode="append", max_rows_per_file=ROWS // FRAGMENTS)
    return uri


def content(uri: str) -> pa.Table:
    return open_log(uri).to_table().sort_by("event_id")


def files_of(uri: str) -> set[str]:
    return {path.name for path in (Path(uri) / "data").iterdir()}


def named_files(uri: str) -> set[str]:
    fragments = open_log(uri).get_fragments()
    return {Path(file.path).name for each in fragments for file in each.data_files()}


def lease_terms(uri: str) -> int:
    folder = Path(layout.experiment_of(uri)) / layout.MAINTENANCE_FOLDER
    return len(list(folder.glob("lease-*.json"))) if folder.is_dir() else 0


def maintainer(uri: str, nodes: Nodes, **variables: str) -> RayFleet:
    """A maintainer as a run starts it; its process, and those of its tasks, have the variables."""
    fleet = RayFleet(RayOptions(address=nodes.address, runtime_env={"env_vars": variables}))
    fleet.open()
    wait_until(lambda: ray.available_resources().get("CPU") == NODES, "all nodes to be free")
    fleet.name = f"datagen_ray/test/{uuid.uuid5(uuid.NAMESPACE_URL, uri)}/{len(variables)}"
    term = begin_run(uri, "ours", pipeline_tree={}, fingerprint="f", origin="test")
    fleet.maintenance = MaintainerConfig(uri, term, ("worker-0",), EAGER)
    fleet.start_maintainer()
    return fleet


def rewriters() -> list[str]:
    """The worker processes that have run tasks of compactions, one entry a task."""
    events: list[dict[str, Any]] = ray.timeline()
    return [each["tid"] for each in events if each["cat"] == "task::compaction"]


def wait_for_joined_fragments(uri: str, fleet: RayFleet) -> None:
    wait_until(lambda: len(named_files(uri)) <= FRAGMENTS // 2, "fragments to be joined")
    fleet.close()


@pytest.mark.soak
def test_the_tasks_of_one_compaction_run_on_several_workers_and_change_no_row(
    tmp_path: Path, nodes: Nodes
) -> None:
    uri = log_of_small_fragments(tmp_path)
    before = content(uri)
    fleet = maintainer(uri, nodes)
    # What ran is told to the head a little later.
    wait_until(lambda: len(set(rewriters())) >= 2, "two workers to have rewritten fragments")
    wait_for_joined_fragments(uri, fleet)
    assert content(uri).equals(before)


@pytest.mark.soak
def test_a_maintainer_killed_between_rewriting_and_commit_leaves_the_log_as_it_was(
    tmp_path: Path, nodes: Nodes
) -> None:
    uri = log_of_small_fragments(tmp_path)
    before, named = content(uri), named_files(uri)
    fleet = maintainer(uri, nodes, **{ENVIRONMENT_VARIABLE: "before_compaction:1"})
    # Ray brings it back, to be killed at the same place.
    wait_until(lambda: lease_terms(uri) >= 2, "the maintainer to be killed, and replaced")
    fleet.close()
    assert named_files(uri) == named, "nothing was committed"
    assert len(files_of(uri) - named) >= 2, "though several tasks had written their files"
    assert content(uri).equals(before)
    wait_for_joined_fragments(uri, maintainer(uri, nodes))
    assert content(uri).equals(before)
    assert status_of(["verify", uri]) == 0
