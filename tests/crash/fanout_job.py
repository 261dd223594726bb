"""A pipeline of three steps, the second one a fan-out; each execution is written down."""

from __future__ import annotations

import asyncio
from typing import Any

from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.nodes import MapReduce
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Filtered
from datagen_ray.pipeline.steps import step
from tests.crash.counting_job import count, work_s


@step
async def prepare(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    return {"base": ctx.seed % 1000 + item["n"]}


@step
async def attempt(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    return {"answer": item["x"] * 2 + ctx.seed % 7}


@step
async def polish(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    if item["total"] % 13 == 0:
        raise Filtered("thirteen")
    return {"text": f"{item['id']}: {item['total']}"}


pipeline = Pipeline(
    "fanout",
    [
        prepare,
        MapReduce(
            "solve",
            split=lambda item: [{"x": item["base"] + number} for number in range(2)],
            each=attempt,
            reduce=lambda item, results: {"total": sum(each["answer"] for each in results)},
        ),
        polish,
    ],
    seed=11,
)
