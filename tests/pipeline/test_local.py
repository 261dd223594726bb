"""run_local on a real log: start, stop, kill, go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.crashpoints import ENVIRONMENT_VARIABLE
from datagen_ray.errors import CodecError, ConfigError, PipelineMismatchError, SourceError
from datagen_ray.pipeline.local import run_local
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Permanent
from datagen_ray.pipeline.steps import step
from datagen_ray.store.layout import log_uri
from datagen_ray.store.runs import list_runs
from datagen_ray.store.store import DatagenStore
from tests.pipeline.grammar import impossible
from tests.pipeline.local_program import Calls, make_pipeline
from tests.pipeline.local_program import run as run_program
from tests.pipeline.support import durable_completions

REPOSITORY = Path(__file__).parents[2]


def state_of(uri: str) -> dict[str, Any]:
    """Everything that must not depend on how the log came about."""
    state: dict[str, Any] = {}
    with DatagenStore.open(uri, read_only=True) as store:
        statuses = store.root_item_statuses()
        assert not statuses.violations
        for root_id in sorted(statuses):
            events = store.events_for_root(root_id)
            for item_id in sorted({event.item_id for event in events}):
                folded = store.fold_item(item_id, load_blobs=True).folded()
                assert folded is not None
                state[item_id] = (
                    str(folded.status),
                    {name: kept.to_dict() for name, kept in folded.fields.items()},
                    [str(cursor.position) for cursor in folded.trajectory.ordered],
                )
    return state


def all_events(uri: str) -> list[Any]:
    with DatagenStore.open(uri, read_only=True) as store:
        return [
            event for root in store.root_item_statuses() for event in store.events_for_root(root)
        ]


def test_a_run_ends_and_a_second_one_skips(tmp_path: Path) -> None:
    calls = Calls(tmp_path / "calls", 0)
    first = run_program(tmp_path, calls)
    assert (first.fresh, first.completed, first.filtered, first.failed) == (12, 10, 2, 0)
    assert first.steps_executed == len(calls.take())
    second = run_program(tmp_path, calls)
    assert (second.skipped, second.roots_total, second.steps_executed) == (12, 12, 0)
    assert not calls.take()
    assert second.run_id != first.run_id


def killed_until_done(tmp_path: Path, kills: list[tuple[int, str | None]]) -> None:
    """Kill a process at each of these calls or crash points, then let one run to the end.

    After each the log must be possible, nothing durable may have run again, and in the end it must
    be the log of a run that nobody disturbed.
    """
    undisturbed = tmp_path / "undisturbed"
    run_program(undisturbed, Calls(tmp_path / "calls", 0))
    expected = state_of(log_uri(str(undisturbed), "local", "e"))
    calls = Calls(tmp_path / "noted", 0)
    root = tmp_path / "killed"
    uri = log_uri(str(root), "local", "e")
    pipeline = make_pipeline(calls)
    durable: list[Any] = []
    for kill_at, crash_at in [*kills, (0, None)]:
        done = durable_completions(durable)
        ended = {event.item_id for event in durable if str(event.event_type) == "TERMINAL"}
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        if crash_at is not None:
            environment[ENVIRONMENT_VARIABLE] = crash_at
        code = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.pipeline.local_program",
                str(root),
                str(calls.path),
                str(kill_at),
            ],
            cwd=REPOSITORY,
            env=environment,
            timeout=240,
            check=False,
        ).returncode
        assert code == (-signal.SIGKILL if kill_at or crash_at else 0)
        assert not [call for call in calls.take() if call in done or call[0] in ended]
        durable = all_events(uri)
        assert impossible(pipeline, durable) is None
    assert state_of(uri) == expected


@pytest.mark.slow
def test_killed_in_steps_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    killed_until_done(tmp_path, [(call, None) for call in (1, 4, 9, 15, 11)])


@pytest.mark.slow
def test_killed_while_writing_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    points = ("before_put:3", "after_put:6", "before_acknowledge:8", "after_acknowledge:10")
    killed_until_done(tmp_path, [(0, point) for point in (*points, "before_flush:1")])


def flaky(failing: list[bool]) -> Pipeline:
    @step
    def a(item: Any) -> dict[str, Any]:
        return {"a": item["q"]}

    @step
    def b(item: Any) -> dict[str, Any]:
        if failing and item["q"] == 1:
            raise OSError("down")
        return {"b": item["a"]}

    return Pipeline("p", [a, b])


TWO = [{"id": 1, "q": 1}, {"id": 2, "q": 2}]


def test_a_failed_root_is_retried_then_reported_and_stops_nobody(tmp_path: Path) -> None:
    failing = [True]
    pipeline = flaky(failing)
    options: dict[str, Any] = {"key": "id", "root": tmp_path, "fsync": False}
    first = run_local(pipeline, TWO, **options)
    assert (first.completed, first.failed, first.ok) == (1, 1, False)
    assert first.failures[0].error == "OSError: down"
    second = run_local(pipeline, TWO, exhausted_after=3, **options)
    assert second.steps_executed == 0
    error = second.failures[0].error or ""
    assert error.startswith("exhausted: 3 failures")
    assert "retry_exhausted=True" in error
    failing.clear()
    third = run_local(pipeline, TWO, exhausted_after=3, retry_exhausted=True, **options)
    assert (third.skipped, third.resumed, third.completed, third.steps_executed) == (1, 1, 1, 1)


def test_a_step_that_was_mended_after_a_failed_run_goes_on_at_the_next_one(tmp_path: Path) -> None:
    failing = [True]
    pipeline = flaky(failing)
    options: dict[str, Any] = {"key": "id", "root": tmp_path, "fsync": False}
    assert run_local(pipeline, TWO, **options).failed == 1
    failing.clear()
    second = run_local(pipeline, TWO, **options)
    assert (second.resumed, second.completed, second.failed) == (1, 1, 0)


def test_running_roots_that_left_the_source_are_resumed(tmp_path: Path) -> None:
    failing = [True]
    pipeline = flaky(failing)
    options: dict[str, Any] = {"key": "id", "root": tmp_path, "fsync": False}
    run_local(pipeline, TWO, max_root_retries=0, **options)
    failing.clear()
    summary = run_local(pipeline, [{"id": 3, "q": 3}], **options)
    assert (summary.fresh, summary.resumed, summary.completed) == (1, 1, 2)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"id": "x"}, {"id": "x"}], "'x'"),
        ([{"id": 5}, {"id": "5"}], "'5'"),
        ([{"id": ""}], "empty key"),
        ([{"id": None}], "empty key"),
        ([{"q": 1}], "no column 'id'"),
        ([{"id": 1.5}], "float"),
        (["x"], "a row is a mapping"),
    ],
)
def test_bad_keys_are_found_before_anything_is_written(
    tmp_path: Path, rows: Any, named: str
) -> None:
    with pytest.raises(SourceError, match=named):
        run_local(flaky([]), rows, key="id", root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        run_local(flaky([]), TWO, root=tmp_path, log_uri=str(tmp_path / "log.lance"))
    with pytest.raises(ConfigError, match="concurrency"):
        run_local(flaky([]), TWO, root=tmp_path, concurrency=0)


def test_a_changed_pipeline_is_reported_and_touches_only_its_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"key": "id", "root": tmp_path, "fsync": False}
    run_local(flaky([True]), TWO, max_root_retries=0, **options)
    renamed = Pipeline("p", [step(name="other")(lambda item: None)])
    summary = run_local(renamed, [*TWO, {"id": 3, "q": 3}], **options)
    assert (summary.skipped, summary.failed, summary.completed) == (1, 1, 1)
    assert (summary.failures[0].error or "").startswith(PipelineMismatchError.__name__)
    assert "removed: a (leaf)" in caplog.text
    assert "1 running roots were begun by another pipeline" in caplog.text


def test_it_runs_where_an_event_loop_runs_already(tmp_path: Path) -> None:
    async def notebook() -> Any:
        return run_local(flaky([]), TWO, key="id", root=tmp_path, fsync=False)

    assert asyncio.run(notebook()).completed == 2


def test_an_error_in_set_up_reaches_the_caller_and_the_log_stays_usable(tmp_path: Path) -> None:
    @step
    class Model:
        def __init__(self) -> None:
            raise OSError("no such model")

        def __call__(self, item: Any) -> None: ...

    options: dict[str, Any] = {"key": "id", "root": tmp_path, "fsync": False}
    with pytest.raises(ValueError, match="no such model"):
        run_local(Pipeline("p", [Model()]), TWO, **options)
    assert run_local(flaky([]), TWO, **options).completed == 2


def test_a_second_run_with_another_key_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    def answer(_: Any) -> dict[str, str]:
        return {"answer": "42"}

    pipeline = Pipeline("keyed", [step(answer)])
    rows = [{"url": "a", "id": "1"}, {"url": "b", "id": "2"}]
    run_local(pipeline, rows, root=tmp_path, experiment="e", key="id")
    uri = log_uri(str(tmp_path), "keyed", "e")
    before = all_events(uri)
    for key in ("url", None):
        with pytest.raises(ConfigError, match="are named by the column 'id'"):
            run_local(pipeline, rows, root=tmp_path, experiment="e", key=key)
    assert all_events(uri) == before
    assert len(list_runs(uri)) == 1


def test_a_step_that_cancels_its_own_task_fails_its_root_and_no_other(tmp_path: Path) -> None:
    @step
    async def rash(item: Any) -> None:
        if item["id"] == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    rows = [{"id": n} for n in range(3)]
    summary = run_local(Pipeline("p", [rash]), rows, key="id", root=tmp_path, fsync=False)
    assert (summary.completed, summary.failed) == (2, 1)
    assert "cancelled" in (summary.failures[0].error or "")


@pytest.mark.parametrize(
    ("error", "calls_in_a_run"),
    [(Permanent("never"), 1), (CodecError("a wrong value"), 1), (ValueError("maybe"), 3)],
)
def test_what_says_that_it_would_fail_again_is_not_resumed_in_the_same_run(
    tmp_path: Path, error: Exception, calls_in_a_run: int
) -> None:
    calls: list[int] = []

    @step
    def parse(item: Any) -> None:
        calls.append(1)
        raise error

    for run in (1, 2):
        summary = run_local(Pipeline("p", [parse]), [{"id": 1}], key="id", root=tmp_path)
        assert summary.failed == 1
        assert len(calls) == run * calls_in_a_run
