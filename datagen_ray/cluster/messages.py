"""What a driver and its workers say to each other. Everything here pickles.

The driver *offers* assignments to a worker in chunks and *collects* outcomes in chunks. Outcomes
are numbered by the worker and kept until the driver's next call acknowledges them, so that a reply
that is lost on the way costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from datagen_ray.pipeline.counts import RootCounts
from datagen_ray.pipeline.exhaustion import EXHAUSTED_AFTER
from datagen_ray.store.runs import RunTerm


class Mode(str, Enum):
    """How a worker takes up a root."""

    FRESH = "fresh"
    """Nothing of it is in the log: start without reading."""
    RESUME = "resume"
    """Read its history first; it may turn out to be empty or complete."""
    BURY = "bury"
    """It killed every worker that ran it: record that it failed, run nothing."""


class WorkerState(str, Enum):
    READY = "ready"
    DRAINING = "draining"
    """Takes no more roots: it was told to end."""
    FENCED = "fenced"
    """Another writer owns its shard; it acknowledges nothing and will exit."""
    SUPERSEDED = "superseded"
    """A later run took over the experiment."""
    BROKEN = "broken"
    """Its storage failed and it cannot tell what is durable; it must be started anew."""


class OutcomeStatus(str, Enum):
    COMPLETED = "completed"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker needs to start: where the log is, for which run, and the pipeline.

    ``pipeline`` is the pickled pipeline; ``import_paths`` are where the modules that it names lie,
    relative ones against the working directory of the worker. ``slot`` is the name of the shard.
    A root with ``exhausted_after`` FAILED rows in one stream is left alone; None: never. ``shared``
    names what the run's workers share, as the cluster at hand has it. ``labels`` are those of its
    metrics.
    """

    log_uri: str
    slot: str
    term: RunTerm
    pipeline: bytes
    import_paths: tuple[str, ...] = ()
    concurrency: int = 64
    exhausted_after: int | None = EXHAUSTED_AFTER
    storage_options: Mapping[str, str] | None = None
    fsync: bool = True
    drain_s: float = 20.0
    shared: Any = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Assignment:
    """One root to be run. ``inputs`` is None for a root that is no longer in the source."""

    root_id: str
    mode: Mode
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """How one root ended on a worker.

    ``can_retry`` is False where running it again cannot help, as for a damaged item.
    """

    root_id: str
    status: OutcomeStatus
    steps_executed: int = 0
    checkpoints: int = 0
    error: str | None = None
    can_retry: bool = True


@dataclass(frozen=True)
class WorkerReport:
    """A worker that claimed its shard."""

    slot: str
    incarnation: str
    writer_epoch: str
    host: str
    pid: int


@dataclass(frozen=True)
class Collected:
    """Outcomes with consecutive numbers, the last of which is ``last``; and how the worker is.

    ``begun`` of its roots have begun and not ended.
    """

    last: int
    outcomes: tuple[Outcome, ...] = ()
    state: WorkerState = WorkerState.READY
    reason: str | None = None
    begun: int = 0


@dataclass(frozen=True)
class RootFailure:
    """A root that did not end, with its last error."""

    root_id: str
    error: str


@dataclass(kw_only=True)
class RunCounts(RootCounts):
    """The numbers of a run on a cluster, as they grow."""

    workers: int = 0
    failures: list[RootFailure] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Roots about which nothing more will be done in this run."""
        return self.skipped + self.completed + self.filtered + self.failed
