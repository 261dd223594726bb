"""Threads for user functions that block.

The threads are daemons and are not joined: a function that never returns must neither hold up the
end of the process nor take a place from those that do return.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from datagen_ray.waiting import within

T = TypeVar("T")


class _Job(NamedTuple):
    context: contextvars.Context
    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class StepThreads:
    """Runs functions in threads, at most ``limit`` that anybody still waits for."""

    def __init__(self, limit: int) -> None:
        self._permits = asyncio.Semaphore(limit)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._names = itertools.count()
        self._closed = False

    async def run(
        self, function: Callable[..., T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """``function(*args)`` in a thread. The wait for a thread does not count as its time.

        On a timeout or a cancellation the caller goes on at once and the thread is left to
        itself. What the function raises, of any kind, is raised here.
        """
        async with self._permits:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            self._submit(_Job(contextvars.copy_context(), function, args, future, loop))
            outcome, value = await within(future, timeout_s)
        if outcome:
            result: T = value
            return result
        try:
            raise value
        finally:
            del value  # a traceback that holds the frame that holds the error is a cycle

    def close(self) -> None:
        """Let idle threads end; busy ones end when their function does."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor was closed")
            self._jobs.put(job)
            if self._idle:
                self._idle -= 1
                return
            self._threads += 1
        threading.Thread(
            target=self._work, name=f"datagen-step-{next(self._names)}", daemon=True
        ).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                outcome: tuple[bool, Any] = (True, job.context.run(job.function, *job.args))
            except BaseException as error:  # noqa: BLE001 - carried to whoever waits
                outcome = (False, error)
            # Idle before the answer: the caller may submit its next call at once.
            with self._lock:
                self._idle += 1
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, outcome)
            except RuntimeError:
                # The event loop is closed, so nobody waits for this any more.
                return
            del job, outcome


def _settle(future: asyncio.Future[Any], outcome: tuple[bool, Any]) -> None:
    if not future.done():
        future.set_result(outcome)
