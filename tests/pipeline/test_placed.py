"""Steps that ask for a place of their own: refused, run here, and what is sent to and fro."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.here import HereCalls
from datagen_ray.pipeline.local import run_local
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import Call
from datagen_ray.pipeline.results import Append, Filtered, Permanent
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.sent import packed_call
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import ListLog, rerun, run


class Unpicklable(Exception):
    def __init__(self, *, needed: int) -> None:
        super().__init__(f"needed {needed}")


class SentAndBack(HereCalls):
    """Runs calls as a cluster does: all that crosses is pickled, outcomes are data."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    async def _run(self, function: Any, call: Call) -> Any:
        self.sent += 1
        there = cloudpickle.loads(cloudpickle.dumps(call))
        packed = await self._threads.run(
            packed_call, function, there.args, there.keywords, cloudpickle
        )
        return cloudpickle.loads(packed).get()


@step(num_cpus=1)
def asked(item: Any, ctx: Any) -> dict[str, Any]:
    return {"got": [item["q"], ctx.item_id, item["grown"], sorted(item), item["pic"].read().hex()]}


def test_placed_steps_are_refused_where_there_is_no_cluster(tmp_path: Path) -> None:
    pipeline = Pipeline("p", [asked])
    with pytest.raises(PipelineError, match=r"step 'asked' asks for num_cpus=1.*datagen-ray run"):
        run(pipeline)
    with pytest.raises(PipelineError, match="Ray cluster"):
        run_local(pipeline, [{"q": 1}], root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_placed_steps_can_be_run_here(tmp_path: Path) -> None:
    pipeline = Pipeline("p", [asked], fields={"grown": Append})
    rows = [{"q": 1, "pic": b"ab"}]
    summary = run_local(pipeline, rows, root=tmp_path, placed="here", fsync=False)
    assert summary.completed == 1


def test_items_arrive_with_all_their_fields() -> None:
    far = SentAndBack()
    pipeline = Pipeline("p", [asked], fields={"grown": Append})
    result, log = run(pipeline, {"q": {"a": [1]}, "pic": b"ab"}, remote=far)
    assert result.error is None
    assert log.fields()["got"] == [{"a": [1]}, "5", [], ["pic", "q"], "6162"]
    assert far.sent == 1


def raising(error: BaseException, **options: Any) -> tuple[Any, ListLog]:
    def fail(item: Any) -> None:
        raise error

    return run(Pipeline("p", [step(name="far", num_cpus=1, **options)(fail)]), remote=SentAndBack())


def test_control_flow_crosses_the_border() -> None:
    result, log = raising(Filtered("unwanted"))
    assert (result.status, log.events[-1].error_dump) == ("filtered", "unwanted")
    result, log = raising(Permanent("no use"), retry=Retry(attempts=3, wait_s=0))
    assert (result.error, result.steps_executed) == ("Permanent: no use", 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (Unpicklable(needed=3), "Unpicklable: needed 3"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_errors_cross_the_border_with_their_traceback(error: BaseException, said: str) -> None:
    result, log = raising(error)
    assert result.error == said
    failed = next(event for event in log.events if event.traceback)
    assert ", in fail" in (failed.traceback or "")


def test_a_result_that_cannot_be_sent_is_a_failure_that_says_so() -> None:
    far = step(name="far", num_cpus=1)(lambda item: {"lock": threading.Lock()})
    result, _ = run(Pipeline("p", [far]), remote=SentAndBack())
    assert "cannot be sent back" in (result.error or "")


def test_async_steps_run_to_their_end_over_there() -> None:
    async def later(item: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"x": 1}

    result, log = run(Pipeline("p", [step(num_cpus=1)(later)]), remote=SentAndBack())
    assert (result.status, log.fields()) == ("completed", {"x": 1})


def test_a_pool_has_as_many_instances_as_actors_and_serves_batches() -> None:
    made: list[int] = []

    @step(num_actors=2, batch_size=4, max_wait_ms=1)
    class Double:
        def __init__(self, by: int) -> None:
            made.append(by)

        def __call__(self, items: Any) -> list[dict[str, Any]]:
            return [{"y": item["x"] * 2} for item in items]

        def close(self) -> None:
            made.append(-1)

    from datagen_ray.pipeline.nodes import MapReduce

    fan = MapReduce(
        "m",
        split=lambda item: [{"x": n} for n in range(6)],
        each=Double(5),
        reduce=lambda results: {"ys": [each["y"] for each in results]},
    )
    result, log = run(Pipeline("p", [fan]), remote=SentAndBack())
    assert log.fields()["ys"] == [0, 2, 4, 6, 8, 10], result.error
    assert made == [5, 5, -1, -1]


def test_a_placed_step_is_not_run_again_once_recorded() -> None:
    far = SentAndBack()
    fails = [True]

    @step
    def end(item: Any) -> None:
        if fails:
            raise ValueError

    one = step(name="far", num_cpus=1)(lambda item: {"x": 1})
    pipeline = Pipeline("p", [one, end])
    _, log = run(pipeline, remote=far)
    fails.clear()
    assert rerun(pipeline, log, remote=far).status == "completed"
    assert far.sent == 1


def test_a_pool_that_cannot_be_built_says_which_step() -> None:
    @step(num_actors=1)
    class Model:
        def __init__(self) -> None:
            raise OSError("no weights")

        def __call__(self, item: Any) -> None: ...

    with pytest.raises(PipelineError, match="step 'Model' could not be set up: OSError: no wei"):
        run(Pipeline("p", [Model()]), remote=HereCalls())
