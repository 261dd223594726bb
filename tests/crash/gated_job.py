"""A step that waits until a file is there, so that a test can do things meanwhile."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step
from tests.crash.counting_job import count

GATE_VARIABLE = "DATAGEN_RAY_TEST_GATE_FILE"


@step
async def first(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    return {"a": item["n"] + 1}


@step
async def held(item: Any, ctx: StepContext) -> dict[str, Any]:
    count(ctx)
    while not os.path.exists(os.environ[GATE_VARIABLE]):
        await asyncio.sleep(0.02)
    return {"b": item["a"] * 2}


pipeline = Pipeline("gated", [first, held])
