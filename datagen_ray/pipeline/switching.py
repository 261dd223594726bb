"""How soon threads take turns while roots run.

The thread that writes the log gives Python's lock away at each system call, some ten times a WAL
entry, and gets it back from a busy event loop only after a switch interval. At Python's 5 ms that
is most of what a checkpoint waits for.
"""

from __future__ import annotations

import sys
import threading

SWITCH_S = 0.001


class QuickTurns:
    """Shortens the interval of this process while anybody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._before = 0.0

    def begin(self) -> None:
        with self._lock:
            self._asked += 1
            if self._asked == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_S))

    def end(self) -> None:
        """As often as :meth:`begin`; the last one restores what was there."""
        with self._lock:
            self._asked -= 1
            if self._asked == 0:
                sys.setswitchinterval(self._before)


QUICK_TURNS = QuickTurns()
