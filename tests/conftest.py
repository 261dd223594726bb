"""What holds for every test."""

from __future__ import annotations

import os

# Ray starts workers at niceness 15. Beside anything else that is busy, such a worker takes minutes
# to import what it needs, and tests that wait for it fail for no fault of ours.
os.environ.setdefault("RAY_worker_niceness", "0")
