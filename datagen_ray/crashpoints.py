"""Named points at which a test can kill the process; no-ops otherwise.

``DATAGEN_RAY_CRASH_AT="<name>:<n>"`` kills the process with SIGKILL, as a lost machine would,
when it reaches that point for the n-th time. Every durable boundary has a name.
"""

from __future__ import annotations

import os
import signal
import threading

ENVIRONMENT_VARIABLE = "DATAGEN_RAY_CRASH_AT"

WRITER_POINTS = (
    "after_claim",
    "after_claim_sync",
    "before_put",
    "after_put",
    "after_fsync",
    "before_acknowledge",
    "after_acknowledge",
    "before_flush",
    "after_flush",
    "before_reopen",
    "after_reopen",
)
"""The points that a shard's writer passes, in the order of an entry's life."""

MAINTENANCE_POINTS = (
    "before_merge_commit",
    "after_merge_commit",
    "after_merge_sync",
    "after_drain",
    "before_compaction",
    "after_compaction",
    "after_index_refresh",
    "after_version_cleanup",
    "before_wal_removal",
    "after_wal_removal",
    "before_sstable_removal",
    "after_sstable_removal",
)
"""The points that merging, compaction and collection pass."""


class _Trigger:
    """The one armed point of this process."""

    def __init__(self, setting: str | None) -> None:
        name, _, count = (setting or "").partition(":")
        self.name = name or None
        self._left = int(count or 1)
        self._lock = threading.Lock()

    def reached(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


_trigger = _Trigger(os.environ.get(ENVIRONMENT_VARIABLE))


def crash_point(name: str) -> None:
    """Kill the process here if this point is armed and its count has run down."""
    if _trigger.name == name and _trigger.reached():
        os.kill(os.getpid(), signal.SIGKILL)
