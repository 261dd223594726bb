"""What the pipeline of the job makes on a real log, without Ray, and that kills change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import datagen_ray as dg
from jobs.counting import COUNT_DIR, position_text
from jobs.io_pipeline import (
    MAX_CHOSEN,
    MAX_ROUNDS,
    MIN_EXAMPLES,
    PIPELINE_NAME,
    make_pipeline,
    row_of,
)
from jobs.io_prediction import completed_rows
from jobs.rendering import STYLES
from jobs.stdlib_functions import discover

KEYS = (
    "builtins.str.partition",  # text
    "colorsys.rgb_to_hsv",  # a structure of floats
    "keyword.iskeyword",  # two outputs only
    "math.gcd",  # numbers
    "math.isnan",  # one output: more rounds, then filtered
    "operator.matmul",  # accepts no literals
    "textwrap.shorten",
)
ROWS = [row_of(function) for function in discover() if function.key in KEYS]

RUN = """
import sys
from datagen_ray import run_local
from jobs.io_pipeline import make_pipeline
from tests.jobs.test_io_pipeline import ROWS
run_local(make_pipeline(), ROWS[:3], key="function", root=sys.argv[1], experiment="killed")
"""


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dg.run_local(
        make_pipeline(), ROWS, key="function", root=tmp_path_factory.mktemp("log"), experiment="one"
    )


@pytest.fixture(scope="module")
def store(summary: Any) -> Iterator[dg.DatagenStore]:
    with dg.DatagenStore.open(summary.log_uri, read_only=True) as opened:
        yield opened


def folded(store: dg.DatagenStore, item_id: str) -> dg.FoldedDatagenItem:
    found = store.fold_item(item_id).folded()
    assert found is not None
    return found


def test_functions_end_completed_or_filtered(summary: Any, store: dg.DatagenStore) -> None:
    assert (summary.completed, summary.filtered, summary.failed) == (5, 2, 0)
    for key in ("math.isnan", "operator.matmul"):
        assert folded(store, key).status is dg.DatagenItemStatus.FILTERED


def test_every_kind_of_step_is_in_the_log(store: dg.DatagenStore) -> None:
    events = store.events_for_root("math.gcd")
    kinds = {event.position.step_kind.value for event in events if event.position is not None}
    assert kinds >= {"root", "leaf", "loop", "sequence", "map_reduce", "branch", "sub_pipeline"}
    selectors = {event.position.selector_step for event in events if event.position is not None}
    assert selectors >= {"quality_gate", "by_output_type"}


def test_hardening_stops_when_there_is_enough_or_the_rounds_are_over(
    store: dg.DatagenStore,
) -> None:
    assert len(folded(store, "textwrap.shorten").fields["rounds"].values) == 1
    assert len(folded(store, "math.isnan").fields["rounds"].values) == MAX_ROUNDS


def test_rows_have_both_styles_and_name_the_call_that_was_run(
    summary: Any, store: dg.DatagenStore
) -> None:
    rows = list(completed_rows(summary.log_uri))
    assert {row["function"] for row in rows} == set(KEYS) - {"math.isnan", "operator.matmul"}
    for key in {row["function"] for row in rows}:
        own = [row for row in rows if row["function"] == key]
        assert len({row["prompt"] for row in own}) == len(own)
        for style in STYLES:
            assert MIN_EXAMPLES <= sum(row["style"] == style for row in own) <= MAX_CHOSEN
    for row in rows[::9]:
        example = folded(store, row["item_id"]).fields["example"].value.value
        assert example["value"] == row["completion"]
        assert folded(store, row["item_id"]).root_item_id == row["function"]


def test_outputs_are_balanced(store: dg.DatagenStore) -> None:
    values = [e["value"] for e in folded(store, "keyword.iskeyword").fields["chosen"].value.value]
    assert set(values) == {"True", "False"}


def test_the_same_seed_gives_the_same_rows_and_another_gives_others(
    summary: Any, tmp_path: Path
) -> None:
    expected = list(completed_rows(summary.log_uri))
    for seed, equal in ((0, True), (1, False)):
        again = dg.run_local(
            make_pipeline(seed), ROWS, key="function", root=tmp_path, experiment=f"seed-{seed}"
        )
        assert (list(completed_rows(again.log_uri)) == expected) is equal


def test_a_second_run_skips_every_root(summary: Any) -> None:
    again = dg.run_local(make_pipeline(), ROWS, key="function", log_uri=summary.log_uri)
    assert (again.skipped, again.steps_executed) == (len(ROWS), 0)


def test_the_tree_of_the_pipeline_does_not_depend_on_the_seed() -> None:
    assert make_pipeline(1).fingerprint() == make_pipeline(2).fingerprint()
    assert make_pipeline().name == PIPELINE_NAME


def test_kills_change_no_row_and_repeat_no_recorded_step(summary: Any, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    environment = {**os.environ, COUNT_DIR: str(counts), "PYTHONPATH": os.pathsep.join(sys.path)}
    for point in ("after_put:9", "before_acknowledge:15", "after_acknowledge:21", None):
        if point is None:
            environment.pop("DATAGEN_RAY_CRASH_AT")
        else:
            environment["DATAGEN_RAY_CRASH_AT"] = point
        ended = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == (0 if point is None else -9), ended.stderr
    log = f"{tmp_path}/datagen_checkpoints/{PIPELINE_NAME}/killed/log.lance"
    keys = [row["function"] for row in ROWS[:3]]
    expected = [row for row in completed_rows(summary.log_uri) if row["function"] in keys]
    assert list(completed_rows(log)) == expected
    assert len(json.dumps(expected)) > 1000
    recorded: dict[tuple[str, str], int] = {}
    with dg.DatagenStore.open(log, read_only=True) as opened:
        for events in opened.events_for_roots(keys).values():
            for event in events:
                if event.event_type is dg.DatagenEventType.STEP_COMPLETED:
                    recorded[event.item_id, position_text(event.position)] = event.attempt
    ran = [
        (item_id, position, int(attempt))
        for path in counts.iterdir()
        for item_id, position, attempt in (
            line.split("\t") for line in path.read_text("utf-8").splitlines()
        )
    ]
    assert len({(item_id, position) for item_id, position, _ in ran}) > 50
    assert not [
        (item_id, position)
        for item_id, position, attempt in ran
        if attempt > recorded.get((item_id, position), attempt)
    ]
