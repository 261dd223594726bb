"""SIGTERM to the process of a driver ends its run as Ctrl-C does.

Ray puts a handler of its own over ours, twice: a Python one that exits, and below it one in C++
that prints the stack of every thread and aborts. So ours is put back after Ray has started. It
turns into an interrupt, for which the event loop, Ray and the caller are prepared already.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

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


def _interrupt(_: int, __: FrameType | None) -> None:
    if not _TERMINATED.is_set():
        _TERMINATED.set()
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL, None):
            # As in a process that a shell started in the background.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
