"""Which roots are to be run: classifies the source, hands roots out, and keeps the count.

Vocabulary:

- *skipped*: terminal when the run began; *resume*: the log holds something of it; *fresh*: nothing;
- *in hand*: handed out to a slot and not settled; only the driver decides who has a root in hand;
- *again*: a root that was handed out and came back, from a lost slot, after a failure, or because
  an idle slot can take it sooner. It goes out as *resume* whatever it was before;
- *alone*: a root that was running at two unclean deaths of its worker, to be run with nothing
  beside it, so that a third death tells who is to blame.

The source is streamed: what is kept is one flag a root of the log, and the rows of roots in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from datagen_ray.cluster.messages import (
    Assignment,
    Mode,
    Outcome,
    OutcomeStatus,
    RootFailure,
    RunCounts,
)
from datagen_ray.sources import SourceRow

DEATHS_BEFORE_ALONE = 2
MAX_LISTED_FAILURES = 1000
_ROWS_A_READ = 20_000


class Statuses(Protocol):
    """What the log knows of each root."""

    def is_terminated(self, root_id: str) -> bool: ...

    def known(self, root_id: str) -> bool: ...

    def running(self) -> Iterator[str]: ...


@dataclass(frozen=True)
class Classified:
    """One read of the source: what is to be run, and how many were not."""

    assignments: tuple[Assignment, ...]
    skipped: int = 0
    resumed: int = 0
    fresh: int = 0
    exhausted: bool = False

    def and_then(self, later: Classified) -> Classified:
        return Classified(
            self.assignments + later.assignments,
            self.skipped + later.skipped,
            self.resumed + later.resumed,
            self.fresh + later.fresh,
            later.exhausted,
        )


class SourceReader:
    """Reads and classifies the source, a bit at a time. One reading at a time, in any thread."""

    def __init__(self, rows: Iterator[SourceRow], statuses: Statuses) -> None:
        self._rows = rows
        self._statuses = statuses
        self._running_seen: set[str] = set()
        self._leftovers: Iterator[str] | None = None

    def read(self, most: int) -> Classified:
        """Up to ``most`` roots to run, fewer where many had to be skipped on the way.

        After the source come the roots that are running in the log and have left the source.
        """
        found: list[Assignment] = []
        skipped = resumed = fresh = 0
        for _ in range(_ROWS_A_READ):
            if len(found) >= most:
                break
            if self._leftovers is not None:
                root_id = next(self._leftovers, None)
                if root_id is None:
                    return Classified(tuple(found), skipped, resumed, fresh, exhausted=True)
                if root_id not in self._running_seen:
                    found.append(Assignment(root_id, Mode.RESUME))
                    resumed += 1
                continue
            row = next(self._rows, None)
            if row is None:
                self._leftovers = iter(self._statuses.running())
            elif self._statuses.is_terminated(row.root_id):
                skipped += 1
            elif self._statuses.known(row.root_id):
                self._running_seen.add(row.root_id)
                found.append(Assignment(row.root_id, Mode.RESUME, row.fields))
                resumed += 1
            else:
                found.append(Assignment(row.root_id, Mode.FRESH, row.fields))
                fresh += 1
        return Classified(tuple(found), skipped, resumed, fresh)


class Roots:
    """The roots of one run. Belongs to the driver's event loop; knows nothing of workers."""

    def __init__(self, *, max_root_retries: int, max_failures: int | None = None) -> None:
        self.counts = RunCounts()
        self._max_root_retries = max_root_retries
        self._max_failures = max_failures
        self._again: deque[Assignment] = deque()
        self._alone: deque[Assignment] = deque()
        self._hands: dict[str, dict[str, Assignment]] = {}
        self._retries: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._exhausted = False

    def hand(self, slot: str) -> Mapping[str, Assignment]:
        """What the slot has in hand, oldest first."""
        return self._hands.get(slot, {})

    @property
    def exhausted(self) -> bool:
        """Whether the source has been read to its end, or nothing more of it is wanted."""
        return self._exhausted or self.stopped

    @property
    def stopped(self) -> bool:
        """Whether so many roots failed that no more are begun."""
        return self._max_failures is not None and self.counts.failed > self._max_failures

    @property
    def waiting(self) -> int:
        """Roots that came back and that nobody has in hand."""
        return len(self._again) + len(self._alone)

    @property
    def alone_waiting(self) -> bool:
        return bool(self._alone)

    @property
    def done(self) -> bool:
        if any(self._hands.values()):
            return False
        return self.stopped or (self._exhausted and not self.waiting)

    def take_again(self, slot: str, most: int) -> list[Assignment]:
        """Roots that came back, now in the hand of ``slot``."""
        taken: list[Assignment] = []
        while self._again and len(taken) < most and not self.stopped:
            taken.append(self._again.popleft())
        return self._into_hand(slot, taken)

    def take_alone(self, slot: str) -> list[Assignment]:
        """One root that is to be run alone, now in the hand of ``slot``, which must be empty."""
        if self.stopped or not self._alone:
            return []
        return self._into_hand(slot, [self._alone.popleft()])

    def take_classified(self, slot: str, read: Classified) -> list[Assignment]:
        """What was just read of the source, now counted and in the hand of ``slot``."""
        self.counts.skipped += read.skipped
        self.counts.resumed += read.resumed
        self.counts.fresh += read.fresh
        self._exhausted = self._exhausted or read.exhausted
        seen = self.counts.skipped + self.counts.resumed + self.counts.fresh
        self.counts.roots_total = max(self.counts.roots_total, seen)
        return self._into_hand(slot, list(read.assignments))

    def settle(self, slot: str, outcome: Outcome) -> None:
        """A root of ``slot`` ended. One that is not in its hand was settled before: ignored."""
        assignment = self._hands.get(slot, {}).pop(outcome.root_id, None)
        if assignment is None:
            return
        self.counts.steps_executed += outcome.steps_executed
        self.counts.checkpoints += outcome.checkpoints
        self._deaths.pop(outcome.root_id, None)
        if outcome.status is OutcomeStatus.COMPLETED:
            self.counts.completed += 1
        elif outcome.status is OutcomeStatus.FILTERED:
            self.counts.filtered += 1
        elif outcome.can_retry and self._retries.get(outcome.root_id, 0) < self._max_root_retries:
            self._retries[outcome.root_id] = self._retries.get(outcome.root_id, 0) + 1
            self._again.append(replace(assignment, mode=Mode.RESUME))
        else:
            self._failed(outcome.root_id, outcome.error or "failed")

    def give_back(self, slot: str, root_ids: tuple[str, ...]) -> None:
        """Roots that the slot had not begun and does not have any more."""
        hand = self._hands.get(slot, {})
        for root_id in root_ids:
            assignment = hand.pop(root_id, None)
            if assignment is not None:
                self._again.append(replace(assignment, mode=Mode.RESUME))

    def reoffered(self, slot: str) -> list[Assignment]:
        """The slot's hand, to be offered again to the same worker, since a call was lost."""
        return [
            each if each.mode is Mode.BURY else replace(each, mode=Mode.RESUME)
            for each in self.hand(slot).values()
        ]

    def lost(self, slot: str, *, unclean: bool, began: int) -> int:
        """The slot's shard has been claimed anew: what it had in hand may go to anyone.

        ``began`` is how many roots of its hand it may have begun, which are the oldest. Returns how
        many roots came back.
        """
        hand = self._hands.pop(slot, {})
        for place, assignment in enumerate(hand.values()):
            back = replace(assignment, mode=Mode.RESUME)
            deaths = self._deaths.get(back.root_id, 0)
            if unclean and place < began:
                deaths += 1
                self._deaths[back.root_id] = deaths
            if deaths > DEATHS_BEFORE_ALONE:
                self._again.append(replace(back, mode=Mode.BURY))
            elif deaths == DEATHS_BEFORE_ALONE:
                self._alone.append(back)
            else:
                self._again.append(back)
        return len(hand)

    def _into_hand(self, slot: str, taken: list[Assignment]) -> list[Assignment]:
        hand = self._hands.setdefault(slot, {})
        for each in taken:
            hand[each.root_id] = each
        return taken

    def _failed(self, root_id: str, error: str) -> None:
        self.counts.failed += 1
        if len(self.counts.failures) < MAX_LISTED_FAILURES:
            self.counts.failures.append(RootFailure(root_id, error))
