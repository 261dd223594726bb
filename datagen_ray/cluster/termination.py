"""SIGTERM: to the process of a driver, whose run it ends as Ctrl-C does, and to that of a worker.

Of a driver: Ray puts a handler of its own over ours, twice: a Python one that exits, and below it
one in C++ that prints the stack of every thread and aborts. So ours is put back after Ray has
started. It turns into an interrupt, for which the event loop, Ray and the caller are prepared.

Of a worker: Ray's handler exits, and Ray starts the actor anew while the old process is still
there. So a worker that wants to end its steps first has to do it before that. Python runs handlers
on the main thread alone, where code of an actor never gets; what can be had from the actor's thread
is the function that Ray's handler calls.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray._private import worker as ray_worker

_LOGGER = logging.getLogger("datagen_ray.cluster")

_TERMINATED = threading.Event()


def was_terminated() -> bool:
    """Whether this process was sent SIGTERM, and took it for an interrupt."""
    return _TERMINATED.is_set()


class SigtermAsInterrupt:
    """Takes SIGTERM until it is closed. A handler that the program has set itself is left alone."""

    def __init__(self) -> None:
        self._before: object = None
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._before = signal.getsignal(signal.SIGTERM)

    def take(self) -> None:
        """To be called once Ray has started."""
        if not self._active:
            return
        if callable(self._before) or self._before == signal.SIG_IGN:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]
        else:
            signal.signal(signal.SIGTERM, _interrupt)

    def close(self) -> None:
        if self._active and threading.current_thread() is threading.main_thread():
            before = self._before
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # type: ignore[arg-type]


RAYS_EXIT = "raise_sys_exit_with_custom_error_message"
"""What the handler of a Ray worker calls, found in Ray 2.60."""


def before_exit_by_sigterm(begin: Callable[[], bool]) -> None:
    """Have ``begin`` called when this process, a Ray worker, is sent SIGTERM.

    It is called on the main thread, must return at once, and says whether the exit is left to it:
    then the signal counts as taken, and the process goes on until it is sent the next one.
    """
    exit_now = getattr(ray_worker, RAYS_EXIT, None)
    if exit_now is None:
        _LOGGER.warning(
            "this version of Ray has no %s: SIGTERM ends the steps of this worker at once",
            RAYS_EXIT,
        )
        return

    def exit_or_leave(*args: Any, **keywords: Any) -> None:
        if not begin():
            exit_now(*args, **keywords)

    setattr(ray_worker, RAYS_EXIT, exit_or_leave)


def _interrupt(_: int, __: FrameType | None) -> None:
    if not _TERMINATED.is_set():
        _TERMINATED.set()
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL, None):
            # As in a process that a shell started in the background.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
