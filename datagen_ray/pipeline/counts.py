"""The numbers of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RootCounts:
    """What became of the roots of a run, as it goes on.

    ``roots_total`` is skipped + resumed + fresh; resumed and fresh ones end completed, filtered or
    failed.
    """

    roots_total: int = 0
    skipped: int = 0
    resumed: int = 0
    fresh: int = 0
    completed: int = 0
    filtered: int = 0
    failed: int = 0
    steps_executed: int = 0
    checkpoints: int = 0
