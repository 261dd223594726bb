"""The driver: takes over an experiment, classifies its roots, and keeps every worker fed.

It holds no truth. Everything that it knows comes from the log and the source, so it may be killed
at any moment and started again.

Order of a run::

    take the next run term        later than any other run; the ones before it are superseded
    claim every shard of the log  what earlier runs left running can write nothing more
    classify all roots            one pass over the log: skip / resume / fresh
    serve                         one task a slot: offer roots, collect outcomes
    stop the workers              each flushes and closes its shard

Losing a worker. Its roots stay in its hand until its shard has been claimed anew, by the actor that
Ray brought back or, when that takes too long, by the driver; only then may anybody run them, always
as *resume*. Until then the lost process might still be writing. A worker that was fenced is not
started again before the driver has made sure that its own run is still the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from datagen_ray.cluster.messages import (
    Assignment,
    Collected,
    RunCounts,
    WorkerReport,
    WorkerState,
)
from datagen_ray.cluster.roots import Classified, Roots, SourceReader, Statuses
from datagen_ray.cluster.summary import ProgressListener, Silent
from datagen_ray.errors import (
    DatagenError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.sources import SourceRow
from datagen_ray.waiting import within

T = TypeVar("T")

LOOK_AHEAD_LEAST = 4
CHECK_TERM_S = 5.0
RETRY_START_S = 0.2
ASK_AGAIN_S = 1.0
"""How often a worker without work asks the others for some, also if nothing has changed."""
CLOSING_S = 5.0
"""How long after its steps a worker of an interrupted run has to close."""
OFFER_FACTOR = 5.0
"""Taking an offer may include reading long histories, so it gets more time than other calls."""
MAX_BARREN_LIVES = 6
"""How often a slot may die in a row without ending a single root before the run gives up."""


class WorkerLostError(Exception):
    """A call to a worker did not come back. ``gone``: Ray will not bring that actor back."""

    def __init__(self, reason: str, *, gone: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.gone = gone


class WorkerHandle(Protocol):
    """One worker, however it is reached. Every call raises :class:`WorkerLostError` on its loss."""

    async def start(self) -> WorkerReport: ...

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None: ...

    async def collect(self, acknowledged: int) -> Collected: ...

    async def withdraw(self, most: int) -> tuple[str, ...]: ...

    async def stop(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


class Fleet(Protocol):
    """Where workers come from."""

    def open(self) -> None:
        """Get ready to spawn: start a cluster or join one."""

    def spawn(self, slot: str) -> WorkerHandle: ...

    def start_maintainer(self) -> None:
        """Start what keeps the log small during a long run; at once when called, and once."""

    async def check(self) -> None:
        """Raises ``ClusterLostError`` when no worker can ever be started again."""


class Ownership(Protocol):
    """The driver's own acts on the log, blocking; see ``store/runs.py``."""

    def claim_shard(self, slot: str) -> None: ...

    def check_not_superseded(self) -> None: ...


@dataclass(frozen=True)
class DriverConfig:
    """``slots`` are the shard names of the workers; the rest are limits.

    The first ``least`` of them are asked for at once, by default all; each other one when those
    before it are at work and the source has more.
    """

    slots: tuple[str, ...]
    least: int | None = None
    concurrency: int = 64
    max_root_retries: int = 2
    max_failures: int | None = None
    patience_s: float = 30.0
    """How long a lost worker may take to come back before its roots go to others."""
    drain_s: float = 20.0
    silence_s: float = 60.0
    """How long a worker may leave a call without an answer before it counts as lost. It answers
    several times a second, also while it has nothing to tell."""
    maintain_after_s: float = 10.0
    """How long a run goes on before it gets a maintainer; shorter ones are tidied at their end."""


class _HaltedError(Exception):
    """A worker said that it cannot go on."""

    def __init__(self, state: WorkerState, reason: str | None) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason or state.value


@dataclass
class _Life:
    """One life of a slot's worker, from its claim on."""

    incarnation: str
    acknowledged: int = 0
    reoffer: bool = False
    unclean: bool = True
    """Whether it ended, if it ends now, without a word: then what it ran may be to blame."""
    begun: int = 0
    """How many roots had begun and not ended when it last said so."""
    just_ended: int = 0
    """How many had ended then since the time before. As many may have begun since."""

    @property
    def may_have_begun(self) -> int:
        """How many of the oldest roots of its hand may be running."""
        return self.begun + self.just_ended


class Driver:
    """Runs the roots of ``rows`` that are not terminal in the log, on the workers of a fleet.

    Make it after the term was taken and every shard was claimed. ``total`` is the number of rows,
    for progress. All of it belongs to one event loop.
    """

    def __init__(
        self,
        config: DriverConfig,
        *,
        fleet: Fleet,
        ownership: Ownership,
        rows: Iterator[SourceRow],
        statuses: Statuses,
        total: int = 0,
        listener: ProgressListener | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._ownership = ownership
        self._listener = listener or Silent()
        self._roots = Roots(
            max_root_retries=config.max_root_retries, max_failures=config.max_failures
        )
        self._roots.counts.roots_total = total
        self._reader = SourceReader(rows, statuses)
        self._reading = asyncio.Lock()
        self._ready: Classified | None = None
        self._changed = asyncio.Event()
        self._handles: dict[str, WorkerHandle] = {}
        self._serving: set[str] = set()
        self._unsure: set[str] = set()
        self._alone_slot: str | None = None

    async def run(self) -> RunCounts:
        """Serve until every root has ended, then stop the workers.

        No worker is started when there is nothing to run. Raises ``RunSupersededError`` when a
        later run took over, and whatever else ends a run as a whole.
        """
        self._listener.phase("reading the source")
        if not await self._read_first():
            return self._roots.counts
        self._listener.phase("starting workers")
        self._fleet.open()
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                *map(self._serve, self._config.slots),
                self._watch_term(),
                self._maintained(),
            )
        ]
        finished = asyncio.ensure_future(self._until_done())
        try:
            ended, _ = await asyncio.wait([*tasks, finished], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            serving = sorted(self._serving)
            await _cancelled(tasks)
            self._listener.phase("closing")
            await asyncio.gather(*(self._stop(slot, self._config.silence_s) for slot in serving))
        except asyncio.CancelledError:
            await self._let_steps_end(tasks)
            raise
        finally:
            await _cancelled([*tasks, finished])
            for handle in self._handles.values():
                handle.kill()
        return self._roots.counts

    async def _read_first(self) -> bool:
        """Read up to the first root that is to be run; whether there is one."""
        while True:
            read = await asyncio.to_thread(self._reader.read, 1)
            if read.assignments:
                self._ready = read
                return True
            self._roots.take_classified("", read)
            self._listener.counts(self._roots.counts)
            if read.exhausted:
                return False

    async def _until_done(self) -> None:
        while not self._roots.done:
            await self._changed.wait()

    async def _maintained(self) -> None:
        await asyncio.sleep(self._config.maintain_after_s)
        await asyncio.to_thread(self._fleet.start_maintainer)
        await asyncio.Event().wait()  # it looks after itself from now on

    async def _watch_term(self) -> None:
        while True:
            await asyncio.sleep(CHECK_TERM_S)
            await self._check_term()

    async def _check_term(self) -> None:
        try:
            await asyncio.to_thread(self._ownership.check_not_superseded)
        except StorageError as error:
            self._listener.note(f"the run terms cannot be read just now: {error}")

    async def _let_steps_end(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        """After an interrupt; the next one cancels this, too."""
        serving = sorted(self._serving)
        await _cancelled(tasks)
        if any(self._roots.hand(slot) for slot in serving) and self._config.drain_s:
            self._listener.note(
                f"interrupted: running steps get {self._config.drain_s:g} s to end; "
                "a second interrupt ends them now"
            )
            await asyncio.gather(*(self._stop(slot, CLOSING_S) for slot in serving))

    async def _stop(self, slot: str, silence_s: float) -> None:
        try:
            end_s = self._config.drain_s + silence_s
            await within(self._handles[slot].stop(self._config.drain_s), end_s)
        except asyncio.TimeoutError:
            self._listener.note(f"{slot} did not close in {end_s:g} s")
        except (WorkerLostError, DatagenError) as error:
            # All that it reported is durable; the next claim of its shard flushes the tail.
            self._listener.note(f"{slot} did not close in order: {error}")

    # The life of one slot

    async def _until_wanted(self, slot: str) -> None:
        """Return when the slots before this one are all at work and leave something to do."""
        slots = self._config.slots
        before = slots[: slots.index(slot)]
        if self._config.least is None or len(before) < self._config.least:
            return
        while self._roots.exhausted or not all(map(self._roots.hand, before)):
            await self._changed.wait()

    async def _serve(self, slot: str) -> None:
        """Keep one slot alive and fed for the whole run: it ends by being cancelled, or raises."""
        await self._until_wanted(slot)
        handle = self._handles[slot] = self._fleet.spawn(slot)
        life: _Life | None = None
        barren = 0
        while True:
            try:
                report = await self._start(slot, handle)
            except WorkerLostError as error:
                barren = await self._lived(slot, barren, 0, error.reason)
                handle.kill()
                await self._claim_for(slot)
                self._release(slot, life)
                life = None
                handle = self._handles[slot] = self._fleet.spawn(slot)
                continue
            if life is not None and life.incarnation == report.incarnation:
                # It never died, only a call was lost, so its roots are still its own.
                life.reoffer = True
            else:
                # It claimed the shard, so whatever held that before can write nothing more.
                self._release(slot, life)
                life = _Life(report.incarnation)
                self._listener.note(f"{slot} is ready as {report.writer_epoch} on {report.host}")
            self._serving.add(slot)
            ended = self._roots.counts.ended
            try:
                await self._feed(slot, handle, life)
            except WorkerLostError as error:
                reason = error.reason
            except _HaltedError as halt:
                reason = f"{halt.state.value}: {halt.reason}"
                life.unclean = False
                await self._check_term()
                handle.kill()
                handle = self._handles[slot] = self._fleet.spawn(slot)
            finally:
                self._serving.discard(slot)
            self._listener.note(f"{slot} was lost ({reason}); bringing it back")
            # A death while one root ran alone names the one to blame, who will not run again.
            came_to = self._roots.counts.ended - ended + (self._alone_slot == slot)
            barren = await self._lived(slot, barren, came_to, reason)

    async def _lived(self, slot: str, barren: int, came_to: int, reason: str) -> int:
        """One more life of a slot is over; how many in a row came to nothing."""
        await self._fleet.check()
        barren = 0 if came_to else barren + 1
        if barren > MAX_BARREN_LIVES:
            raise StorageError(
                f"{slot} died {barren} times in a row before any root ended; the last time: "
                f"{reason}; see the workers' logs, then run again to go on"
            )
        return barren

    async def _start(self, slot: str, handle: WorkerHandle) -> WorkerReport:
        """The report of a worker that claimed its shard.

        Waits for as long as it takes while no root depends on it, else for ``patience_s``.
        """
        loop = asyncio.get_running_loop()
        waited_for = bool(self._roots.hand(slot))
        until = loop.time() + self._config.patience_s if waited_for else math.inf
        while True:
            left = until - loop.time()
            try:
                return await within(handle.start(), None if left == math.inf else left)
            except asyncio.TimeoutError:
                raise WorkerLostError(
                    f"not back after {self._config.patience_s:g} s", gone=True
                ) from None
            except (StorageError, WriterFencedError, WriterPoisonedError) as error:
                # It failed to claim: its storage, or somebody else who claims the same shard.
                await self._check_term()
                raise WorkerLostError(str(error), gone=True) from error
            except WorkerLostError as error:
                if error.gone or loop.time() >= until:
                    raise
                await self._fleet.check()
                await asyncio.sleep(RETRY_START_S)

    async def _claim_for(self, slot: str) -> None:
        """Claim the shard of a worker that did not come back, if roots wait for that."""
        if self._roots.hand(slot):
            await asyncio.to_thread(self._ownership.claim_shard, slot)

    def _release(self, slot: str, life: _Life | None) -> None:
        """The shard was claimed anew: the roots of its former life may be run by anyone."""
        unclean = life is not None and life.unclean
        began = max(self._config.concurrency, 0 if life is None else life.may_have_begun)
        count = self._roots.lost(slot, unclean=unclean, began=began)
        if self._alone_slot == slot:
            self._alone_slot = None
        if count:
            self._listener.note(f"{slot}: {count} root(s) in hand are handed out again")
            self._notify()

    # Feeding

    async def _feed(self, slot: str, handle: WorkerHandle, life: _Life) -> None:
        """Offer and collect until the worker is lost or halts."""
        look_ahead = LOOK_AHEAD_LEAST
        while True:
            if life.reoffer or slot in self._unsure:
                # What it has is joined, what it has not is taken up: nothing is run twice.
                self._unsure.discard(slot)
                await self._answered(
                    handle.offer(self._roots.reoffered(slot), life.acknowledged), OFFER_FACTOR
                )
                life.reoffer = False
                self._notify()
            if life.unclean:
                await self._top_up(slot, handle, life, look_ahead)
            if life.unclean and await self._take_over_waiting_roots(slot):
                continue
            if not self._roots.hand(slot):
                if not life.unclean:
                    raise WorkerLostError("it drained and has nothing left", gone=False)
                # What another has may wait for the log just now, and can be had in a moment.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._changed.wait(), ASK_AGAIN_S)
                continue
            collected = await self._answered(handle.collect(life.acknowledged))
            life.acknowledged = collected.last
            life.begun, life.just_ended = collected.begun, len(collected.outcomes)
            for outcome in collected.outcomes:
                self._roots.settle(slot, outcome)
            if collected.outcomes:
                # Enough waits at the worker to last until the next exchange, and not much more,
                # since what waits there cannot be run by another.
                usual = min(2 * len(collected.outcomes), 4 * self._config.concurrency)
                look_ahead = max(LOOK_AHEAD_LEAST, (look_ahead + usual) // 2)
                self._listener.counts(self._roots.counts)
                self._notify()
            if collected.state is WorkerState.DRAINING:
                if life.unclean:
                    self._listener.note(f"{slot} was told to end, and lets its steps end")
                life.unclean = False
            elif collected.state is not WorkerState.READY:
                raise _HaltedError(collected.state, collected.reason)

    async def _top_up(self, slot: str, handle: WorkerHandle, life: _Life, look_ahead: int) -> None:
        hand = self._roots.hand(slot)
        if self._alone_slot == slot and not hand and not self._roots.alone_waiting:
            self._alone_slot = None
        if self._roots.alone_waiting and self._alone_slot is None:
            self._alone_slot = slot
        if self._alone_slot == slot:
            if not hand:
                alone = self._roots.take_alone(slot)
                await self._answered(handle.offer(alone, life.acknowledged), OFFER_FACTOR)
            return
        # More than run at a time have begun where roots wait for the log; see pipeline.places.
        window = max(self._config.concurrency, life.begun) + look_ahead
        room = window - len(hand)
        if hand and room <= look_ahead // 2:
            return
        chunk = self._roots.take_again(slot, room)
        while not chunk and not self._roots.exhausted:
            chunk = self._roots.take_classified(slot, await self._read(room))
            self._notify()
        if chunk:
            await self._answered(handle.offer(chunk, life.acknowledged), OFFER_FACTOR)
            # What waits there can be had by a slot without work from now on, and not before.
            self._notify()

    async def _answered(self, reply: Awaitable[T], factor: float = 1.0) -> T:
        """The reply of a worker, who may be alive and yet never answer: stopped, or cut off."""
        most_s = self._config.silence_s * factor
        try:
            return await within(reply, most_s)
        except asyncio.TimeoutError:
            raise WorkerLostError(f"no answer for {most_s:g} s", gone=False) from None

    async def _read(self, most: int) -> Classified:
        async with self._reading:
            if self._roots.exhausted:
                return Classified((), exhausted=True)
            read = await asyncio.to_thread(self._reader.read, most)
            if self._ready is not None:
                read, self._ready = self._ready.and_then(read), None
            return read

    async def _take_over_waiting_roots(self, slot: str) -> bool:
        """Let a slot with free places have what waits at the busiest one; whether it gave any."""
        free = self._config.concurrency - len(self._roots.hand(slot))
        if free < 1 or not self._roots.exhausted or self._roots.waiting:
            return False
        if slot == self._alone_slot:
            return False
        waiting = {
            other: len(self._roots.hand(other)) - self._config.concurrency
            for other in self._serving
            if other not in (slot, self._alone_slot)
        }
        busiest = max(waiting, key=lambda other: waiting[other], default=None)
        if busiest is None or waiting[busiest] < 1:
            return False
        try:
            most = min(free, math.ceil(waiting[busiest] / 2))
            given = await self._answered(self._handles[busiest].withdraw(most))
        except WorkerLostError:
            # It may have given roots back in a reply that never came, and run on without them. They
            # are in its hand here, so the task that serves it offers it all that is.
            self._unsure.add(busiest)
            return False
        self._roots.give_back(busiest, given)
        return bool(given)

    def _notify(self) -> None:
        """Wake every slot that has nothing to do, and whoever waits for the end."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _cancelled(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
