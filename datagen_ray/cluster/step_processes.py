"""What runs in the processes of placed steps: one call of a task, or an actor of a pool.

A call is a stream of two values: :data:`BEGUN`, as soon as the process has the call in hand, and
the outcome as bytes. See ``remote_steps`` for who reads it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import Call
from datagen_ray.pipeline.sent import packed_call, packed_error, packed_result
from datagen_ray.pipeline.signature import shape_of
from datagen_ray.pipeline.steps import Step

BEGUN = b"begun"


@dataclass(frozen=True)
class StepSource:
    """The pickled pipeline, for processes that run steps of it."""

    pipeline: bytes
    import_paths: tuple[str, ...]

    def step(self, name: str) -> Step:
        """One step of the pipeline; it is loaded once a process."""
        known = _loaded.get(self.pipeline)
        if known is None:
            add_import_paths(self.import_paths)
            pipeline: Pipeline = cloudpickle.loads(self.pipeline)
            known = _loaded[self.pipeline] = {step.name: step for step in pipeline.steps()}
        return known[name]


_loaded: dict[bytes, dict[str, Step]] = {}


def add_import_paths(paths: Sequence[str]) -> None:
    """Let this process import what the driver could; relative paths are those of its folder."""
    for path in reversed(paths):
        absolute = os.path.abspath(path)
        if absolute not in sys.path:
            sys.path.insert(0, absolute)


def run_task(source: StepSource, step_name: str, packed: bytes) -> Iterator[bytes]:
    """One call of a step that is no actor's: the body of a Ray task."""
    yield BEGUN
    try:
        function = source.step(step_name).function
        call: Call = cloudpickle.loads(packed)
    except Exception as error:  # noqa: BLE001 - carried to whoever asked for the call
        yield packed_error(error, cloudpickle)
        return
    yield packed_call(function, call.args, call.keywords, cloudpickle)


class StepActor:
    """One actor of a pool: one instance of the step, used by one call at a time.

    An async step is called as often at once as its callers ask.
    """

    def __init__(self, source: StepSource, step_name: str) -> None:
        self._source = source
        self._step_name = step_name
        self._thread = ThreadPoolExecutor(1)
        self._turn = asyncio.Lock()
        self._function: Callable[..., Any] | None = None

    async def set_up(self) -> bytes:
        """Build the instance; the outcome tells what went wrong."""
        try:
            await self._made()
        except Exception as error:  # noqa: BLE001 - carried to whoever asked
            return packed_error(error, cloudpickle)
        return packed_result(None, cloudpickle)

    async def call(self, packed: bytes) -> AsyncIterator[bytes]:
        try:
            function = await self._made()
            call: Call = cloudpickle.loads(packed)
        except Exception as error:  # noqa: BLE001 - carried to whoever asked for the call
            yield BEGUN
            yield packed_error(error, cloudpickle)
            return
        if shape_of(function).is_async:
            yield BEGUN
            yield await self._awaited(function(*call.args, **call.keywords))
            return
        async with self._turn:
            yield BEGUN
            yield await asyncio.get_running_loop().run_in_executor(
                self._thread, packed_call, function, call.args, call.keywords, cloudpickle
            )

    async def _made(self) -> Callable[..., Any]:
        async with self._turn:
            if self._function is None:
                step = self._source.step(self._step_name)
                self._function = await asyncio.get_running_loop().run_in_executor(
                    self._thread, step.make
                )
            return self._function

    async def _awaited(self, call: Awaitable[Any]) -> bytes:
        try:
            return packed_result(await call, cloudpickle)
        except Exception as error:  # noqa: BLE001 - carried to whoever asked for the call
            return packed_error(error, cloudpickle)
