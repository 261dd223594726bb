"""Three steps that write down what they and their process do, and that a test can hold up.

A step does not end while there is a file with the name of its host in the folder of holds, and the
last step of some roots not before there is one named ``finish``: so a test does what it does while
a run is under way, and a worker finishes its steps when the test says so.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Filtered
from datagen_ray.pipeline.steps import step
from tests.crash.counting_job import count, work_s
from tests.crash.notes import note_run

HOLDS_VARIABLE = "DATAGEN_RAY_TEST_HOLDS_FOLDER"
FINISH = "finish"
LATE_EVERY = 5
"""One of so many roots is late: its last step waits for the file named above."""


async def work(ctx: StepContext, *, late: bool = False) -> None:
    count(ctx)
    note_run(ctx)
    await asyncio.sleep(work_s())
    folder = os.environ.get(HOLDS_VARIABLE)
    if folder is None:
        return
    hold, finish = Path(folder, socket.gethostname()), Path(folder, FINISH)
    while hold.exists() or (late and not finish.exists()):
        await asyncio.sleep(0.02)


@step
async def first(item: Any, ctx: StepContext) -> dict[str, Any]:
    await work(ctx)
    return {"a": item["n"] + ctx.seed % 1000}


@step
async def second(item: Any, ctx: StepContext) -> dict[str, Any]:
    await work(ctx)
    if item["a"] % 13 == 0:
        raise Filtered("thirteen")
    return {"b": item["a"] * 2}


@step
async def third(item: Any, ctx: StepContext) -> dict[str, Any]:
    await work(ctx, late=item["n"] % LATE_EVERY == 0)
    return {"c": f"{item['id']}: {item['b']}"}


pipeline = Pipeline("noted", [first, second, third], seed=5)
