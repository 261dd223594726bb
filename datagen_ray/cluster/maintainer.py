"""The maintainer of a run: one process that keeps the log small and quick to read meanwhile.

Vocabulary. The *maintainer* of a run is one actor, named after experiment and run, so one Ray
cluster has one. The *lease* beside the log (``store/lease.py``) makes it one also across jobs and
clusters: whoever holds it makes passes, the others are candidates. *Orphan shards* are those of
slots that this run does not use; no worker merges them, so the maintainer does.

It begins by itself when its process starts, so that one which Ray restarts goes on without being
told. It claims no shard, writes no event and answers nobody's question but for ``status``. Losing
it costs nothing but time: another takes the lease once it has seen its counter stand still for
the lease time, and every part of a pass can be cut off anywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from datagen_ray.errors import DatagenError, RunSupersededError
from datagen_ray.store.lease import LEASE_S, MaintenanceLease
from datagen_ray.store.maintenance import (
    MaintenanceOptions,
    MaintenanceReport,
    maintain_until,
)
from datagen_ray.store.runs import RunTerm, check_not_superseded
from datagen_ray.store.shared_compaction import Rewriter

_LOGGER = logging.getLogger("datagen_ray.maintainer")

PASS_EVERY_S = 60.0
TRY_AGAIN_S = 5.0


@dataclass(frozen=True)
class MaintainerOptions:
    """When a run has a maintainer, and what it may use.

    It starts once a run has gone on for ``after_s``, and makes a pass every ``interval_s``.
    ``num_cpus`` is what Ray reserves for it: 0 means that it takes no place from any worker. What
    it rewrites goes to CPUs that are free at that moment, and waits for none.
    """

    after_s: float = 10.0
    interval_s: float = PASS_EVERY_S
    lease_s: float = LEASE_S
    num_cpus: float = 0.0
    passes: MaintenanceOptions = field(default_factory=MaintenanceOptions)


@dataclass(frozen=True)
class MaintainerConfig:
    """What a maintainer needs to start. ``slots`` are those whose workers merge for themselves."""

    log_uri: str
    term: RunTerm
    slots: tuple[str, ...]
    options: MaintainerOptions = field(default_factory=MaintainerOptions)
    storage_options: Mapping[str, str] | None = None
    fsync: bool = True


@dataclass(frozen=True)
class MaintainerStatus:
    """How a maintainer is: the lease term that it holds, if any, and what it has done."""

    holder: str
    pid: int
    lease_term: int | None
    passes: int
    compactions: int
    failures: tuple[str, ...]


class Maintainer:
    """Maintains one log in a thread of its own, while elected, until it is stopped.

    ``holder`` must be unique among all that ever take part in the election.
    """

    def __init__(
        self,
        config: MaintainerConfig,
        *,
        holder: str,
        pid: int,
        rewriter: Rewriter | None = None,
        on_report: Callable[[MaintenanceReport], None] | None = None,
    ) -> None:
        self._config = config
        self._pid = pid
        self._rewriter = rewriter
        self._on_report = on_report
        self._lease = MaintenanceLease(
            config.log_uri,
            holder,
            lease_s=config.options.lease_s,
            storage_options=config.storage_options,
        )
        self._stop = threading.Event()
        self._passes = 0
        self._compactions = 0
        self._failures: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="maintainer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the part that is being done, and leave office."""
        self._stop.set()
        self._thread.join()

    def status(self) -> MaintainerStatus:
        return MaintainerStatus(
            self._lease.holder,
            self._pid,
            self._lease.term,
            self._passes,
            self._compactions,
            self._failures,
        )

    def _run(self) -> None:
        config = self._config
        while not self._stop.is_set():
            try:
                check_not_superseded(config.log_uri, config.term, config.storage_options)
                maintain_until(
                    self._stop,
                    config.log_uri,
                    self._lease,
                    interval_s=config.options.interval_s,
                    storage_options=config.storage_options,
                    fsync=config.fsync,
                    skip_slots=config.slots,
                    options=config.options.passes,
                    rewriter=self._rewriter,
                    on_report=self._note,
                )
            except RunSupersededError as error:
                _LOGGER.warning("%s", error)
                return
            except DatagenError as error:
                # Whatever it is, workers go on without; the next pass may succeed.
                _LOGGER.warning("maintenance broke off: %s", error)
                self._failures = (str(error),)
                self._stop.wait(TRY_AGAIN_S)

    def _note(self, report: MaintenanceReport) -> None:
        self._passes += 1
        self._compactions += bool(report.compaction and report.compaction.fragments_removed)
        self._failures = tuple(f"{each.part}: {each.error}" for each in report.failures)
        for failure in self._failures:
            _LOGGER.warning("maintenance: %s", failure)
        if self._on_report is not None:
            self._on_report(report)
        config = self._config
        check_not_superseded(config.log_uri, config.term, config.storage_options)
