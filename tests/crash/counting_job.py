"""A pipeline whose steps count their own executions in a file outside the log.

Every execution appends one line, ``item_id TAB step TAB index``, before it does its work. One write
to a file opened with O_APPEND is whole, whichever process it comes from, and the order of the lines
is the order of the writes.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.nodes import Conditional, Loop, MapReduce, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.steps import step

COUNT_VARIABLE = "DATAGEN_RAY_TEST_COUNT_FILE"
SLEEP_VARIABLE = "DATAGEN_RAY_TEST_STEP_S"


def count(ctx: StepContext) -> None:
    path = os.environ.get(COUNT_VARIABLE)
    if path is None:
        return
    line = f"{ctx.item_id}\t{ctx.position.step_name}\t{ctx.position.step_index}\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def work_s() -> float:
    return float(os.environ.get(SLEEP_VARIABLE, "0"))


@step
async def prepare(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    return {"base": ctx.seed % 1000 + item["n"], "log": Append("prepared")}


@step
def attempt(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    time.sleep(work_s())
    return {"answer": item["x"] * 2 + ctx.seed % 7}


@step
async def judge(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    if ctx.seed % 11 == 0:
        raise Filtered("unlucky")
    return {"score": item["answer"] % 10}


@step
async def critique(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    return {"quality": ctx.seed % 100, "log": Append(f"round {ctx.position.step_index}")}


@step
async def polish(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    await asyncio.sleep(work_s())
    if item["total"] % 13 == 0:
        raise Filtered("thirteen")
    return {"text": f"{item['id']}: {item['total']} at {item['quality']}"}


def split(item: Any) -> list[dict[str, Any]]:
    return [{"x": item["base"] + number} for number in range(3)]


def total(item: Any, results: Any) -> dict[str, Any]:
    return {"total": sum(each["score"] for each in results if each.status == "completed")}


pipeline = Pipeline(
    "counting",
    [
        prepare,
        MapReduce(
            "solve",
            split=split,
            each=Sequence("try", [attempt, judge]),
            reduce=total,
            on_failure="drop",
        ),
        Loop(
            "revise",
            critique,
            until=lambda item, round: item["quality"] >= 60,  # noqa: A006
            max_rounds=3,
        ),
        Conditional("worth", when=lambda item: item["quality"] >= 20, then=polish),
    ],
    seed=7,
)
