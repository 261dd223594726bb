"""The driver against workers that do as the test says; no Ray, no log."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from datagen_ray.cluster.driver import (
    Driver,
    DriverConfig,
    WorkerLostError,
)
from datagen_ray.cluster.messages import (
    Assignment,
    Collected,
    Mode,
    Outcome,
    OutcomeStatus,
    RunCounts,
    WorkerReport,
    WorkerState,
)
from datagen_ray.errors import ClusterLostError, RunSupersededError, StorageError
from datagen_ray.sources import SourceRow


class NewLog:
    def is_terminated(self, root_id: str) -> bool:
        return False

    def known(self, root_id: str) -> bool:
        return False

    def running(self) -> Iterator[str]:
        return iter(())


class ScriptedWorker:
    """Ends every root at once, unless ``script`` says otherwise for it.

    ``script(worker, assignment)`` returns an outcome, None to keep the root for ever, or raises to
    die.
    """

    def __init__(self, slot: str, fleet: ScriptedFleet) -> None:
        self.slot = slot
        self.fleet = fleet
        self.lives = 0
        self.alive = False
        self.gone = False
        self.state = WorkerState.READY
        self.taken: list[Assignment] = []
        self.queue: deque[Assignment] = deque()
        self.outcomes: list[Outcome] = []
        self.first = 1

    async def start(self) -> WorkerReport:
        if self.gone:
            raise WorkerLostError("it is gone", gone=True)
        if not self.alive:
            self.lives += 1
            self.alive, self.state = True, WorkerState.READY
            self.queue, self.outcomes, self.first = deque(), [], 1
            self.fleet.acts.append(f"{self.slot} claims")
        return WorkerReport(self.slot, f"{id(self)}-{self.lives}", f"{self.slot}:1", "here", 1)

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        self._check()
        self._forget(acknowledged)
        self.taken += chunk
        self.queue += chunk
        self.fleet.acts += [f"{self.slot} takes {a.root_id} {a.mode.value}" for a in chunk]

    async def collect(self, acknowledged: int) -> Collected:
        self._check()
        self._forget(acknowledged)
        await asyncio.sleep(0)
        for _ in range(len(self.queue)):
            assignment = self.queue.popleft()
            try:
                outcome = self.fleet.script(self, assignment)
            except WorkerLostError as error:
                self.alive, self.gone = False, error.gone
                raise
            if outcome is None:
                self.queue.append(assignment)
            else:
                self.outcomes.append(outcome)
        last = self.first + len(self.outcomes) - 1
        return Collected(last, tuple(self.outcomes), self.state, "said so")

    async def withdraw(self, most: int) -> tuple[str, ...]:
        self._check()
        given = []
        while self.queue and len(given) < most:
            given.append(self.queue.pop().root_id)
        return tuple(given)

    async def stop(self, grace_s: float) -> None:
        self._check()
        self.fleet.acts.append(f"{self.slot} closes")

    def kill(self) -> None:
        self.alive, self.gone = False, True

    def _check(self) -> None:
        if not self.alive:
            raise WorkerLostError("it does not answer", gone=self.gone)

    def _forget(self, acknowledged: int) -> None:
        while self.outcomes and self.first <= acknowledged:
            self.outcomes.pop(0)
            self.first += 1


def _complete(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
    return Outcome(assignment.root_id, OutcomeStatus.COMPLETED, 1, 1)


class ScriptedFleet:
    def __init__(
        self,
        script: Callable[[ScriptedWorker, Assignment], Outcome | None] = _complete,
        kind: type[ScriptedWorker] = ScriptedWorker,
    ) -> None:
        self.script = script
        self.kind = kind
        self.workers: list[ScriptedWorker] = []
        self.acts: list[str] = []
        self.opened = 0
        self.lost = False
        self.superseded = False

    def open(self) -> None:
        self.opened += 1

    def spawn(self, slot: str) -> ScriptedWorker:
        self.workers.append(self.kind(slot, self))
        return self.workers[-1]

    def start_maintainer(self) -> None:
        self.acts.append("a maintainer starts")

    async def check(self) -> None:
        if self.lost:
            raise ClusterLostError("no node is left")

    def claim_shard(self, slot: str) -> None:
        self.acts.append(f"driver claims {slot}")

    def check_not_superseded(self) -> None:
        if self.superseded:
            raise RunSupersededError("run 'later' took over")


def _drive(fleet: ScriptedFleet, count: int, **options: Any) -> RunCounts:
    return asyncio.run(asyncio.wait_for(_driver(fleet, count, **options).run(), 20))


def _driver(
    fleet: ScriptedFleet,
    count: int,
    *,
    slots: int = 1,
    concurrency: int = 2,
    patience_s: float = 30.0,
    max_root_retries: int = 0,
    silence_s: float = 30.0,
    least: int | None = None,
) -> Driver:
    return Driver(
        DriverConfig(
            slots=tuple(f"worker-{number}" for number in range(slots)),
            least=least,
            concurrency=concurrency,
            patience_s=patience_s,
            max_root_retries=max_root_retries,
            silence_s=silence_s,
        ),
        fleet=fleet,
        ownership=fleet,
        rows=(SourceRow(f"r{number}", {"n": number}) for number in range(count)),
        statuses=NewLog(),
    )


def test_every_root_is_run_once_with_no_more_in_hand_than_the_window() -> None:
    most = 0

    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        nonlocal most
        most = max(most, len(worker.queue) + 1)
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    counts = _drive(fleet, 500, slots=3, concurrency=4)
    taken = [each.root_id for worker in fleet.workers for each in worker.taken]
    assert set(taken) == {f"r{number}" for number in range(500)}
    assert counts.completed == counts.fresh == 500
    assert counts.steps_executed == 500
    assert most <= 4 + 4 * 4
    assert sum(act.endswith("closes") for act in fleet.acts) == 3


def test_with_nothing_to_run_no_worker_is_started() -> None:
    fleet = ScriptedFleet()
    assert _drive(fleet, 0).roots_total == 0
    assert fleet.opened == 0
    assert fleet.workers == []


def test_roots_of_a_lost_worker_go_out_as_resume_after_it_claimed_its_shard_anew() -> None:
    died = False

    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        nonlocal died
        if assignment.root_id == "r1" and not died:
            died = True
            raise WorkerLostError("killed", gone=False)
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    counts = _drive(fleet, 3)
    assert counts.completed == 3
    assert fleet.acts[:5] == [
        "worker-0 claims",
        "worker-0 takes r0 fresh",
        "worker-0 takes r1 fresh",
        "worker-0 takes r2 fresh",
        "worker-0 claims",
    ]
    assert set(fleet.acts[5:8]) == {f"worker-0 takes r{number} resume" for number in range(3)}


def test_a_worker_that_stays_away_is_replaced_once_the_driver_claimed_its_shard() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if worker is fleet.workers[0]:
            raise WorkerLostError("its node is gone", gone=True)
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    assert _drive(fleet, 2).completed == 2
    assert len(fleet.workers) == 2
    claimed = fleet.acts.index("driver claims worker-0")
    resumed = [place for place, act in enumerate(fleet.acts) if act.endswith("resume")]
    assert len(resumed) == 2
    assert all(place > claimed for place in resumed)


def test_a_lost_call_to_a_worker_that_lives_hands_its_roots_to_nobody_else() -> None:
    lost = 0

    class Flaky(ScriptedWorker):
        async def collect(self, acknowledged: int) -> Collected:
            nonlocal lost
            reply = await super().collect(acknowledged)
            if lost < 3:
                lost += 1
                raise WorkerLostError("the reply was lost", gone=False)
            return reply

    fleet = ScriptedFleet(kind=Flaky)
    counts = _drive(fleet, 5)
    assert counts.completed == 5
    assert fleet.acts.count("worker-0 claims") == 1
    assert not any(act.startswith("driver claims") for act in fleet.acts)


def test_a_fenced_worker_is_replaced_only_while_the_run_is_the_latest() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if worker is fleet.workers[0]:
            worker.state = WorkerState.FENCED
            return None
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    assert _drive(fleet, 2).completed == 2
    assert len(fleet.workers) == 2

    fleet = ScriptedFleet(script)
    fleet.superseded = True
    with pytest.raises(RunSupersededError, match="run 'later' took over"):
        _drive(fleet, 2)
    assert len(fleet.workers) == 1


def test_an_idle_worker_takes_over_what_waits_at_a_slow_one() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if worker.slot == "worker-0" and len(worker.queue) >= 1:
            return None
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    counts = _drive(fleet, 6, slots=2, concurrency=1)
    assert counts.completed == 6
    moved = [a for a in fleet.workers[1].taken if a.mode is Mode.RESUME]
    assert moved, "the fast worker was handed roots that the slow one had not begun"


def test_an_idle_worker_that_asked_too_early_takes_over_what_was_still_on_its_way() -> None:
    asked = asyncio.Event()

    class Slow(ScriptedWorker):
        async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
            if self.slot == "worker-0" and not asked.is_set():
                await asked.wait()
            await super().offer(chunk, acknowledged)

        async def withdraw(self, most: int) -> tuple[str, ...]:
            asked.set()
            return await super().withdraw(most)

    def none_ends_until_both_work(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        both = all(each.taken for each in worker.fleet.workers)
        return _complete(worker, assignment) if both else None

    assert _drive(ScriptedFleet(none_ends_until_both_work, Slow), 6, slots=2).completed == 6


def test_roots_given_back_in_a_reply_that_never_came_are_offered_to_their_worker_again() -> None:
    lost: list[tuple[str, ...]] = []

    class Forgetful(ScriptedWorker):
        async def withdraw(self, most: int) -> tuple[str, ...]:
            given = await super().withdraw(most)
            if given and not lost:
                lost.append(given)
                raise WorkerLostError("the reply was lost", gone=False)
            return given

    visits: Counter[str] = Counter()

    def slow_first(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        visits[assignment.root_id] += 1
        if worker.slot == "worker-0" and visits[assignment.root_id] < 300:
            return None
        return _complete(worker, assignment)

    counts = _drive(ScriptedFleet(slow_first, Forgetful), 12, slots=2)
    assert lost
    assert counts.completed == 12


def test_a_failed_root_does_not_stop_the_others() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if assignment.root_id == "r3":
            return Outcome("r3", OutcomeStatus.FAILED, error="ValueError: r3")
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    counts = _drive(fleet, 10, max_root_retries=2)
    assert (counts.completed, counts.failed) == (9, 1)
    tries = [a.mode for a in fleet.workers[0].taken if a.root_id == "r3"]
    assert tries == [Mode.FRESH, Mode.RESUME, Mode.RESUME]


def test_a_root_that_kills_its_worker_every_time_is_buried_and_the_rest_ends() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if assignment.mode is Mode.BURY:
            return Outcome(assignment.root_id, OutcomeStatus.FAILED, error="x", can_retry=False)
        if assignment.root_id == "r2":
            raise WorkerLostError("killed", gone=False)
        return _complete(worker, assignment)

    fleet = ScriptedFleet(script)
    counts = _drive(fleet, 20, slots=2)
    assert (counts.completed, counts.failed) == (19, 1)


def test_many_roots_that_kill_their_worker_are_buried_and_the_healthy_ones_end() -> None:
    poison = {f"r{number}" for number in range(8)}

    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        if assignment.mode is Mode.BURY:
            return Outcome(assignment.root_id, OutcomeStatus.FAILED, error="WorkerDied")
        if assignment.root_id in poison:
            raise WorkerLostError("killed", gone=False)
        return _complete(worker, assignment)

    counts = _drive(ScriptedFleet(script), 30, slots=1, concurrency=64)
    assert (counts.completed, counts.failed) == (22, 8)


def test_a_root_that_kills_its_worker_is_found_among_all_that_it_had_begun() -> None:
    class Hasty(ScriptedWorker):
        """Says that it has begun four roots; dies at its next word if r3 is one of them."""

        asked = 0

        async def start(self) -> WorkerReport:
            self.asked = 0
            return await super().start()

        async def collect(self, acknowledged: int) -> Collected:
            self.asked += 1
            if all(each.root_id != "r3" or each.mode is Mode.BURY for each in self.queue):
                return await super().collect(acknowledged)
            if self.asked > 1:
                self.alive = False
                raise WorkerLostError("killed", gone=False)
            return Collected(0, begun=4)

    fleet = ScriptedFleet(kind=Hasty)
    counts = _drive(fleet, 5, slots=1, concurrency=1)
    assert counts.completed + counts.failed == 5
    assert fleet.workers[0].lives == 4, "two deaths beside others, one alone"


def test_a_worker_that_has_begun_more_than_run_at_a_time_still_has_roots_waiting() -> None:
    class Lender(ScriptedWorker):
        async def collect(self, acknowledged: int) -> Collected:
            collected = await super().collect(acknowledged)
            return replace(collected, begun=min(15, len(self.queue)))

    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        enough = len(worker.taken) > 15
        return _complete(worker, assignment) if enough else None

    counts = _drive(ScriptedFleet(script, kind=Lender), 20, slots=1, concurrency=8)
    assert counts.completed == 20


def test_an_interrupted_run_lets_the_steps_of_its_workers_end() -> None:
    fleet = ScriptedFleet(lambda worker, assignment: None)

    async def interrupted() -> None:
        run = asyncio.ensure_future(_driver(fleet, 20, slots=2).run())
        while not all(worker.queue for worker in fleet.workers) or len(fleet.workers) < 2:
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(asyncio.wait_for(interrupted(), 20))
    assert {"worker-0 closes", "worker-1 closes"} <= set(fleet.acts)
    assert all(worker.gone for worker in fleet.workers)


def test_a_second_interrupt_ends_a_run_whose_steps_are_still_running() -> None:
    class Busy(ScriptedWorker):
        async def stop(self, grace_s: float) -> None:
            stopping.set()
            await asyncio.Event().wait()

    stopping = asyncio.Event()
    fleet = ScriptedFleet(lambda worker, assignment: None, kind=Busy)

    async def interrupted() -> None:
        run = asyncio.ensure_future(_driver(fleet, 5).run())
        while not fleet.workers or not fleet.workers[0].queue:
            await asyncio.sleep(0)
        run.cancel()
        await stopping.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(asyncio.wait_for(interrupted(), 20))
    assert fleet.workers[0].gone


def test_a_lost_cluster_ends_the_run() -> None:
    def script(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        fleet.lost = True
        raise WorkerLostError("its node is gone", gone=True)

    fleet = ScriptedFleet(script)
    with pytest.raises(ClusterLostError):
        _drive(fleet, 2)


def test_a_slot_that_dies_before_it_ends_anything_ends_the_run_in_the_end() -> None:
    class Stillborn(ScriptedWorker):
        async def start(self) -> WorkerReport:
            raise WorkerLostError("no such module", gone=True)

    with pytest.raises(StorageError, match="worker-0 died 7 times in a row"):
        _drive(ScriptedFleet(kind=Stillborn), 2)


def test_a_worker_that_lives_and_never_answers_loses_its_shard_and_its_roots_go_on() -> None:
    class Stopped(ScriptedWorker):
        async def start(self) -> WorkerReport:
            if self.alive:
                await asyncio.Event().wait()
            return await super().start()

        async def collect(self, acknowledged: int) -> Collected:
            await asyncio.Event().wait()
            raise AssertionError("it never answers")

    class StoppedFleet(ScriptedFleet):
        def spawn(self, slot: str) -> ScriptedWorker:
            made = ScriptedWorker if self.workers else Stopped
            self.workers.append(made(slot, self))
            return self.workers[-1]

    fleet = StoppedFleet()
    counts = _drive(fleet, 3, silence_s=0.01, patience_s=0.01)
    assert counts.completed == 3
    assert fleet.workers[0].gone, "it was killed"
    claimed = fleet.acts.index("driver claims worker-0")
    assert all(place > claimed for place, act in enumerate(fleet.acts) if act.endswith("resume"))


def test_workers_above_the_least_are_asked_for_while_there_is_more_to_do() -> None:
    def once_all_have_some(worker: ScriptedWorker, assignment: Assignment) -> Outcome | None:
        busy = sum(bool(each.taken) for each in fleet.workers)
        return _complete(worker, assignment) if busy == 3 else None

    fleet = ScriptedFleet(once_all_have_some)
    assert _drive(fleet, 500, slots=3, least=1).completed == 500
    assert [worker.slot for worker in fleet.workers] == ["worker-0", "worker-1", "worker-2"]

    fleet = ScriptedFleet()
    assert _drive(fleet, 3, slots=3, least=1).completed == 3
    assert [worker.slot for worker in fleet.workers] == ["worker-0"]
