"""Electing one maintainer for an experiment, with a lease beside the log.

Vocabulary. A *term* is one holder's time in office; its file ``maintenance/lease-<term>.json``
is made with put-if-absent, so a term has one holder. The holder *renews* by counting up in its
own file. A *candidate* watches the newest term's counter.

A candidate that has seen the counter stand still for the lease time, by its own monotonic clock,
takes the next term; no two clocks are ever compared. A holder that leaves says so in its file,
and the next one need not wait. Terms have no gaps and their files are never removed, so looking
for the one after ours tells whether we were replaced.

Two holders for a moment, one of them slow to notice, do no harm: everything that a maintainer
does is safe beside another. The check before each commit keeps the moment short.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from datagen_ray.errors import ConfigError, DatagenError, LeaseLostError, StorageError
from datagen_ray.store import layout
from datagen_ray.store.storage import LogStorage

LEASE_S = 60.0
"""How long a holder's counter may stand still before somebody else takes over."""

MonotonicClock: TypeAlias = Callable[[], float]


@dataclass(frozen=True)
class _LeaseFile:
    holder: str
    count: int
    released: bool


@dataclass(frozen=True)
class _Sighting:
    """What a candidate last saw change, and when by its own clock."""

    term: int
    count: int
    at_s: float


class MaintenanceLease:
    """One process's part in the election. Safe to use from any thread.

    ``holder`` names this process and must be unique among all that ever take part. ``lease_s``
    should be the same for all; renew several times in it, or let `kept` do that.
    """

    def __init__(
        self,
        log_uri: str,
        holder: str,
        *,
        lease_s: float = LEASE_S,
        storage_options: Mapping[str, str] | None = None,
        monotonic: MonotonicClock = time.monotonic,
    ) -> None:
        if not holder:
            raise ConfigError("the holder of a lease needs a name of its own; pass a run id")
        if lease_s <= 0:
            raise ConfigError(f"a lease of {lease_s} s ends at once; pass a positive time")
        self.holder = holder
        self.lease_s = lease_s
        self._storage = LogStorage(layout.experiment_of(log_uri), storage_options, fsync=False)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sighting: _Sighting | None = None
        self._term: int | None = None
        self._count = 0
        self._failure: DatagenError | None = None

    @property
    def term(self) -> int | None:
        """The term that we hold, as far as we know; None for a candidate."""
        return self._term

    def try_acquire(self) -> bool:
        """Look at the lease and take it if it is free or its holder is gone.

        Never waits: call it again every few seconds. True as soon as, and as long as, we hold it.
        """
        with self._lock:
            if self._term is not None:
                return True
            latest = self._latest_term()
            if latest == 0 or self._is_abandoned(latest):
                return self._take(latest + 1)
            return False

    def renew(self) -> None:
        """Count up in our file. Raises LeaseLostError when somebody else was elected."""
        with self._lock:
            term = self._check()
            self._count += 1
            self._write(term, released=False)

    def check_still_leader(self) -> None:
        """Raise LeaseLostError if a higher term exists, or our file is gone, or we hold none.

        Call it right before each commit. Raises what a renewal in the background failed with.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._check()

    def release(self) -> None:
        """Leave office, so that the next candidate need not wait. Idempotent."""
        with self._lock:
            if self._term is None:
                return
            try:
                self._write(self._check(), released=True)
            except LeaseLostError:
                pass  # whoever replaced us does not need to hear that we go
            finally:
                self._term = None

    @contextmanager
    def kept(self) -> Iterator[MaintenanceLease]:
        """Renew in the background while the block runs, and release at its end.

        A renewal that fails is told by the next `check_still_leader`.
        """
        stop = threading.Event()

        def keep() -> None:
            while not stop.wait(self.lease_s / 4):
                try:
                    self.renew()
                except StorageError as error:
                    self._failure = error  # the next renewal may succeed
                except DatagenError as error:
                    self._failure = error
                    return
                else:
                    self._failure = None

        keeper = threading.Thread(target=keep, name="maintenance-lease", daemon=True)
        keeper.start()
        try:
            yield self
        finally:
            stop.set()
            keeper.join()
            self.release()

    def _check(self) -> int:
        term = self._term
        if term is None:
            raise LeaseLostError(f"{self.holder} does not hold the maintenance lease")
        if self._storage.exists(layout.lease_key(term + 1)):
            self._term = None
            successor = self._read(self._latest_term())
            name = successor.holder if successor else "another maintainer"
            raise LeaseLostError(
                f"{name} was elected to maintain {self._storage.uri} (term {term + 1} or later, "
                f"ours was {term}); this one stops maintaining"
            )
        if not self._storage.exists(layout.lease_key(term)):
            self._term = None
            raise LeaseLostError(
                f"the lease file of term {term} of {self._storage.uri} was removed; this one "
                "stops maintaining"
            )
        return term

    def _is_abandoned(self, term: int) -> bool:
        seen = self._read(term)
        if seen is not None and seen.released:
            return True
        count = -1 if seen is None else seen.count
        now = self._monotonic()
        last = self._sighting
        if last is None or (last.term, last.count) != (term, count):
            self._sighting = _Sighting(term, count, now)
            return False
        return now - last.at_s >= self.lease_s

    def _take(self, term: int) -> bool:
        self._count = 0
        if not self._storage.put_if_absent(layout.lease_key(term), self._content(released=False)):
            # a put whose answer was lost may have been repeated below us and found itself
            taken = self._read(term)
            if taken is None or taken.holder != self.holder:
                return False
        self._term, self._sighting, self._failure = term, None, None
        return True

    def _write(self, term: int, *, released: bool) -> None:
        self._storage.replace(layout.lease_key(term), self._content(released=released))

    def _content(self, *, released: bool) -> bytes:
        content = {"holder": self.holder, "count": self._count, "released": released}
        return json.dumps(content, sort_keys=True).encode()

    def _latest_term(self) -> int:
        files = self._storage.list_files(layout.MAINTENANCE_FOLDER)
        terms = (layout.parse_lease_name(file.name) for file in files)
        return max((term for term in terms if term is not None), default=0)

    def _read(self, term: int) -> _LeaseFile | None:
        """None for a file that cannot be read, which counts as a counter that stands still."""
        raw = self._storage.get(layout.lease_key(term))
        if raw is None:
            return None
        try:
            data = json.loads(raw)
            return _LeaseFile(str(data["holder"]), int(data["count"]), data["released"] is True)
        except (ValueError, KeyError, TypeError):
            return None
