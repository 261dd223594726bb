"""What holds for every test."""

from __future__ import annotations

import os
import signal

# Ray starts workers at niceness 15. Beside anything else that is busy, such a worker takes minutes
# to import what it needs, and tests that wait for it fail for no fault of ours.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell has what it starts in the background ignore SIGINT, and so all that this starts, in turn.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
