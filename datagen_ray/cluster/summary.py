"""What a run tells whoever waits for it: the numbers while it goes on, and the summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from datagen_ray.cluster.messages import RootFailure, RunCounts

SUMMARY_KEYS = (
    "run_id",
    "log_uri",
    "roots_total",
    "skipped",
    "resumed",
    "fresh",
    "completed",
    "filtered",
    "failed",
    "steps_executed",
    "checkpoints",
    "elapsed_s",
)


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    ``roots_total`` counts the rows of the source, and roots that were running and have left it. It
    is skipped + resumed + fresh, unless the run ended early: then some were not looked at. Resumed
    and fresh ones end completed, filtered or failed.
    ``steps_executed`` and ``checkpoints`` are what workers reported; those of a worker that was
    killed before it could report are in the log, not here.
    """

    run_id: str
    log_uri: str
    roots_total: int
    skipped: int
    resumed: int
    fresh: int
    completed: int
    filtered: int
    failed: int
    steps_executed: int
    checkpoints: int
    elapsed_s: float
    failures: tuple[RootFailure, ...] = ()

    @classmethod
    def of(cls, counts: RunCounts, *, run_id: str, log_uri: str, elapsed_s: float) -> RunSummary:
        return cls(
            run_id=run_id,
            log_uri=log_uri,
            roots_total=counts.roots_total,
            skipped=counts.skipped,
            resumed=counts.resumed,
            fresh=counts.fresh,
            completed=counts.completed,
            filtered=counts.filtered,
            failed=counts.failed,
            steps_executed=counts.steps_executed,
            checkpoints=counts.checkpoints,
            elapsed_s=round(elapsed_s, 3),
            failures=tuple(counts.failures),
        )

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON, with exactly :data:`SUMMARY_KEYS`."""
        return {key: getattr(self, key) for key in SUMMARY_KEYS}

    @property
    def ok(self) -> bool:
        return self.failed == 0


class ProgressListener(Protocol):
    """Is told of a run as it goes on. Calls come from the driver and must return at once."""

    def phase(self, text: str) -> None:
        """The run entered another phase, such as ``reading the log``."""

    def counts(self, counts: RunCounts) -> None:
        """Some of the numbers changed."""

    def note(self, text: str) -> None:
        """Something that a person wants to know of, such as a lost worker."""


class Silent:
    """A listener that does nothing."""

    def phase(self, text: str) -> None:
        """Nothing is said."""

    def counts(self, counts: RunCounts) -> None:
        """Nothing is said."""

    def note(self, text: str) -> None:
        """Nothing is said."""
