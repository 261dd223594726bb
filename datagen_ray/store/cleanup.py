"""Merging a writer's own generations in the background, while it goes on appending.

Appends never wait for a merge. A merge starts when so many generations, or so many bytes, are
pending, and otherwise after the interval, which varies a little so that the workers of a run do
not all merge at once. If generations pile up all the same, because merging does not keep up, the
writer is slowed: each WAL entry is followed by a pause that grows with the pile, so that what
readers have to open stays bounded.

An error of a merge changes nothing about appends. It is handed to ``on_error`` at once, and
raised by the next `PeriodicCleanup.check` and by `PeriodicCleanup.close`, unless a later merge
has succeeded. A StorageError is tried again at the next turn; after any other the thread ends.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from datagen_ray.errors import ConfigError, DatagenError, InternalError, StorageError
from datagen_ray.store.bounds import check_count, check_seconds
from datagen_ray.store.merge import MergeReport, ShardMerger
from datagen_ray.store.shard import ShardManifest


@dataclass(frozen=True)
class CleanupOptions:
    """When to merge, and when to slow the writer.

    A merge starts at ``max_generations`` or ``max_bytes`` pending, or after the interval, which
    is varied by the ``jitter`` fraction. Above ``slow_generations`` each WAL entry is followed by
    a pause of ``slow_step_s`` for each generation above, at most ``longest_pause_s``.
    """

    max_generations: int = 4
    max_bytes: int = 256 << 20
    jitter: float = 0.2
    slow_generations: int = 16
    slow_step_s: float = 0.02
    longest_pause_s: float = 1.0

    def __post_init__(self) -> None:
        check_count("max_bytes", self.max_bytes)
        for name in ("slow_step_s", "longest_pause_s"):
            check_seconds(name, getattr(self, name))
        if self.max_generations < 1 or self.slow_generations < self.max_generations:
            raise ConfigError(
                f"cleanup at {self.max_generations} generations with the writer slowed above "
                f"{self.slow_generations}: the first must be at least 1, the second no smaller"
            )
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"a jitter of {self.jitter} is not a fraction of the interval")


@dataclass(frozen=True)
class CleanupStatistics:
    """What a background cleanup has done so far. ``held_back``: generations with conflicts."""

    merges: int = 0
    generations: int = 0
    events: int = 0
    held_back: int = 0
    merge_seconds: float = 0.0
    longest_merge_s: float = 0.0
    failures: int = 0


class PeriodicCleanup:
    """A thread that merges one shard. Made by `DatagenStore.spawn_periodic_cleanup`."""

    def __init__(
        self,
        merger: ShardMerger,
        interval_s: float,
        *,
        options: CleanupOptions | None = None,
        on_merge: Callable[[MergeReport], None] | None = None,
        on_error: Callable[[DatagenError], None] | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        check_seconds("interval_s", interval_s, above_zero=True)
        self._merger = merger
        self._interval_s = interval_s
        self._options = options or CleanupOptions()
        self._on_merge = on_merge
        self._on_error = on_error
        self._random = randomness or random.Random(merger.shard_id)  # noqa: S311 - only spreads work
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._failure: DatagenError | None = None
        self._statistics = CleanupStatistics()
        self._held_back: frozenset[int] = frozenset()
        self._thread = threading.Thread(
            target=self._run, name=f"merge-{merger.shard_id[:8]}", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def pause_after(self, manifest: ShardManifest) -> float:
        """Called by the writer after each WAL entry: start a merge if one is due.

        Returns the seconds to wait before the next entry, 0 as long as merging keeps up.
        """
        held_back = self._held_back
        pending = [t for t in manifest.sstables if t.generation not in held_back]
        options = self._options
        if (
            len(pending) >= options.max_generations
            or sum(table.in_memory_bytes for table in pending) >= options.max_bytes
        ):
            self._wake.set()
        above = len(pending) - options.slow_generations
        return min(above * options.slow_step_s, options.longest_pause_s) if above > 0 else 0.0

    def merge_soon(self) -> None:
        """Start a merge now rather than after the interval."""
        self._wake.set()

    def check(self) -> None:
        """Raise what the last merge failed with; return if it succeeded."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Let the generation that is being merged be finished, end the thread, then `check`."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self.check()

    def statistics(self) -> CleanupStatistics:
        with self._lock:
            return self._statistics

    def _run(self) -> None:
        while not self._stop.is_set():
            spread = 1 + self._options.jitter * (2 * self._random.random() - 1)
            self._wake.wait(self._interval_s * spread)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._merge_once()
            except StorageError as error:
                self._failed(error)
            except DatagenError as error:
                self._failed(error)
                return
            except Exception as error:  # noqa: BLE001 - whoever closes must hear of it
                failure = InternalError(f"the background merge broke down: {error!r}; report this")
                failure.__cause__ = error
                self._failed(failure)
                return

    def _merge_once(self) -> None:
        report = self._merger.run(stop=self._stop.is_set)
        times = [done.duration_s for done in report.generations]
        with self._lock:
            self._failure = None
            self._held_back = self._merger.held_back
            before = self._statistics
            self._statistics = CleanupStatistics(
                merges=before.merges + bool(times),
                generations=before.generations + len(times),
                events=before.events + report.inserted,
                held_back=len(self._held_back),
                merge_seconds=before.merge_seconds + sum(times),
                longest_merge_s=max([before.longest_merge_s, *times]),
                failures=before.failures,
            )
        if self._on_merge is not None and times:
            self._on_merge(report)

    def _failed(self, error: DatagenError) -> None:
        with self._lock:
            self._failure = error
            self._statistics = replace(self._statistics, failures=self._statistics.failures + 1)
        if self._on_error is not None:
            self._on_error(error)
