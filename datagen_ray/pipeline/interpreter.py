"""What Python does otherwise while roots run: how soon threads take turns, how often it collects.

The thread that writes the log gives Python's lock away at each system call, some times a WAL entry,
and gets it back from a busy event loop only after a switch interval. At Python's 5 ms that is much
of what a checkpoint waits for; below 2 ms the switches themselves cost more than they save.

Hundreds of roots in flight hold thousands of objects that nearly all end by themselves. Looking for
cycles among them after every 700 new ones, as Python does, took a tenth of the event loop's time,
and stopped all roots at once for each full collection.
"""

from __future__ import annotations

import gc
import sys
import threading

SWITCH_S = 0.002
COLLECT_AFTER = 5_000


class Interpreter:
    """Changes the settings of this process while anybody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._switch_s = 0.0
        self._thresholds = (0, 0, 0)

    def begin(self) -> None:
        with self._lock:
            self._asked += 1
            if self._asked > 1:
                return
            self._switch_s = sys.getswitchinterval()
            _set_switch_interval(min(self._switch_s, SWITCH_S))
            self._thresholds = gc.get_threshold()
            young, *older = self._thresholds
            if young:  # zero is how somebody turned collecting off
                gc.set_threshold(max(young, COLLECT_AFTER), *older)

    def end(self) -> None:
        """As often as :meth:`begin`; the last one restores what was there."""
        with self._lock:
            self._asked -= 1
            if self._asked == 0:
                _set_switch_interval(self._switch_s)
                gc.set_threshold(*self._thresholds)


def _set_switch_interval(seconds: float) -> None:
    # Python cuts off to whole microseconds, also what it told itself a moment ago.
    sys.setswitchinterval(seconds + 5e-7)


INTERPRETER = Interpreter()
