"""What placed steps ask of a cluster, and a ledger that is lost; no Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayError

from datagen_ray.cluster import shared_actors
from datagen_ray.cluster.shared_actors import RayLimits, cpus_for_steps, ray_resources
from datagen_ray.cluster.step_processes import StepActor, StepSource, run_task
from datagen_ray.pipeline.limits import Ledger, RateLimit
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import Call, Placement
from datagen_ray.pipeline.steps import step


@step(num_actors=3)
class Model:
    def __init__(self, factor: int = 2) -> None:
        if factor == 0:
            raise OSError("no weights")
        self.factor = factor

    def __call__(self, item: Any) -> dict[str, Any]:
        return {"x": item["n"] * self.factor}


def plain(item: Any) -> dict[str, Any]:
    return {"x": 1 / item["n"]}


PIPELINE = Pipeline("p", [step(name="far", num_cpus=0.5)(plain), Model(), step(plain)])
SOURCE = StepSource(cloudpickle.dumps(PIPELINE), ())


def test_an_own_cluster_gets_room_for_placed_steps() -> None:
    # Three actors of one CPU, and as many tasks of half a CPU as there are cores.
    assert cpus_for_steps(PIPELINE, 4) == 3 + 2
    assert cpus_for_steps(Pipeline("p", [plain]), 4) == 0


def test_a_gpu_or_a_resource_takes_no_cpu_unless_asked() -> None:
    placement = Placement(num_gpus=1, resources={"accelerator": 1})
    assert ray_resources(placement) == {
        "num_cpus": 0.0,
        "num_gpus": 1,
        "resources": {"accelerator": 1},
    }
    assert ray_resources(Placement(num_actors=2))["num_cpus"] == 1


def packed(n: int) -> bytes:
    return bytes(cloudpickle.dumps(Call(({"n": n},), {}, None)))


def test_a_task_says_that_it_begins_and_then_how_it_ended() -> None:
    begun, outcome = run_task(SOURCE, "far", packed(2))
    assert begun == b"begun"
    assert cloudpickle.loads(outcome).get() == {"x": 0.5}
    _, outcome = run_task(SOURCE, "far", packed(0))
    with pytest.raises(ZeroDivisionError):
        cloudpickle.loads(outcome).get()


def test_a_task_whose_pipeline_cannot_be_loaded_answers_so() -> None:
    _, outcome = run_task(StepSource(b"no pickle", ()), "far", packed(1))
    with pytest.raises(Exception, match="invalid load key"):
        cloudpickle.loads(outcome).get()


def test_an_actor_builds_its_instance_once_and_says_what_went_wrong() -> None:
    async def play() -> None:
        actor = StepActor(SOURCE, "Model")
        assert cloudpickle.loads(await actor.set_up()).get() is None
        first = actor._function
        answers = [answer async for answer in actor.call(packed(4))]
        assert cloudpickle.loads(answers[1]).get() == {"x": 8}
        assert actor._function is first
        broken = StepSource(cloudpickle.dumps(Pipeline("p", [Model(0)])), ())
        failed = cloudpickle.loads(await StepActor(broken, "Model").set_up())
        with pytest.raises(OSError, match="no weights"):
            failed.get()

    asyncio.run(play())


class Method:
    def __init__(self, function: Any, lost: list[int]) -> None:
        self._function = function
        self._lost = lost

    async def remote(self, *args: Any) -> Any:
        if self._lost:
            self._lost.pop()
            raise RayError("gone for a moment")
        return await self._function(*args)


def test_a_ledger_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_actors, "ASK_AGAIN_S", 0)
    lost = [1, 1]

    class Far:
        ledger = Ledger()

        def __getattr__(self, name: str) -> Method:
            return Method(getattr(self.ledger, name), lost)

    async def play() -> None:
        limits = RayLimits(Far())
        assert await limits.take("s", 2, "me", 5) == 2
        assert not lost
        await limits.renew("me", {"s": 1})
        assert await limits.take("s", 2, "you", 5) == 1
        await limits.give_back("s", "me", 1)
        assert await limits.reserve("s", RateLimit(1), 1) == [0]
        await limits.pause("s", 1)

    asyncio.run(play())
