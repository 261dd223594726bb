"""A worker on a real log, without Ray."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from datagen_ray.cluster import worker as worker_module
from datagen_ray.cluster.messages import (
    Assignment,
    Collected,
    Mode,
    Outcome,
    OutcomeStatus,
    WorkerConfig,
    WorkerState,
)
from datagen_ray.cluster.worker import NotStartedError, Worker
from datagen_ray.errors import RunSupersededError
from datagen_ray.pipeline import places as places_module
from datagen_ray.pipeline.nodes import MapReduce, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step
from datagen_ray.store.runs import RunTerm, begin_run
from datagen_ray.store.store import DatagenStore

T = TypeVar("T")


class Work:
    """A log, and workers of it whose one step waits until it is let go."""

    def __init__(self, folder: Path) -> None:
        self.log_uri = str(folder / "log.lance")
        self.ran: list[str] = []
        self.gate = asyncio.Event()
        DatagenStore.open(self.log_uri).close()
        self.term = self.next_term("run-1")

        @step
        async def held(item: Any, ctx: Any) -> dict[str, Any]:
            self.ran.append(ctx.item_id)
            await self.gate.wait()
            return {"b": item["n"] * 2}

        self.steps = [held]

    def next_term(self, run_id: str) -> RunTerm:
        return begin_run(self.log_uri, run_id, pipeline_tree={}, fingerprint="f", origin="test")

    def worker(
        self, incarnation: str = "first", concurrency: int = 2, slot: str = "worker-0"
    ) -> Worker:
        config = WorkerConfig(
            log_uri=self.log_uri,
            slot=slot,
            term=self.term,
            pipeline=b"",
            concurrency=concurrency,
            fsync=False,
        )
        return Worker(
            config,
            load_pipeline=lambda _: Pipeline("work", list(self.steps)),
            incarnation=incarnation,
        )


def fresh(*root_ids: str) -> list[Assignment]:
    return [Assignment(each, Mode.FRESH, {"n": 1}) for each in root_ids]


async def collected(worker: Worker, count: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    last = 0
    while len(outcomes) < count:
        found: Collected = await worker.collect(last)
        outcomes += found.outcomes
        last = found.last
    return outcomes


def to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_a_worker_that_has_not_claimed_its_shard_takes_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        worker = Work(tmp_path).worker()
        with pytest.raises(NotStartedError):
            await worker.offer(fresh("a"), 0)
        with pytest.raises(NotStartedError):
            await worker.collect(0)

    to_end(scene())


def test_starting_twice_claims_once(tmp_path: Path) -> None:
    async def scene() -> None:
        worker = Work(tmp_path).worker()
        reports = await asyncio.gather(worker.start(), worker.start())
        assert reports[0] == reports[1]
        assert reports[0].writer_epoch == "worker-0:1"
        await worker.drain(1)

    to_end(scene())


def test_a_root_that_is_offered_twice_runs_once(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker()
        await worker.start()
        await worker.offer(fresh("a", "b", "c"), 0)
        await worker.offer(fresh("a", "c"), 0)
        work.gate.set()
        outcomes = await collected(worker, 3)
        assert sorted(each.root_id for each in outcomes) == ["a", "b", "c"]
        assert sorted(work.ran) == ["a", "b", "c"]
        # Until its outcome was acknowledged a root is in hand, however late the offer comes.
        await worker.offer([Assignment("a", Mode.RESUME, {"n": 1})], 0)
        await worker.drain(1)
        assert sorted(work.ran) == ["a", "b", "c"]

    to_end(scene())


def test_outcomes_come_again_until_they_are_acknowledged(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        work.gate.set()
        worker = work.worker()
        await worker.start()
        await worker.offer(fresh("a"), 0)
        while not (first := await worker.collect(0)).outcomes:
            pass
        again = await worker.collect(0)
        assert again.outcomes == first.outcomes
        assert again.last == first.last == 1
        assert (await worker.collect(1)).outcomes == ()
        await worker.offer([Assignment("a", Mode.RESUME, {"n": 1})], 1)
        while not (repeated := await worker.collect(1)).outcomes:
            pass
        assert repeated.last == 2
        assert repeated.outcomes[0].status is OutcomeStatus.COMPLETED
        assert repeated.outcomes[0].steps_executed == 0, "it had ended, so nothing ran"
        await worker.drain(1)

    to_end(scene())


def test_what_has_not_begun_can_be_withdrawn(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker(concurrency=1)
        await worker.start()
        await worker.offer(fresh("a", "b", "c"), 0)
        assert await worker.withdraw(1) == ("c",)
        assert await worker.withdraw(9) == ("b",)
        work.gate.set()
        assert [each.root_id for each in await collected(worker, 1)] == ["a"]
        await worker.drain(1)
        assert work.ran == ["a"]

    to_end(scene())


def test_a_root_that_waits_for_a_place_can_be_withdrawn_and_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any wait for the log is long enough to begin another root.
    monkeypatch.setattr(places_module, "WORTH_MORE", -1.0)

    async def scene() -> None:
        work = Work(tmp_path)
        begun: list[str] = []

        @step
        async def before(item: Any, ctx: Any) -> dict[str, Any]:
            begun.append(ctx.item_id)
            return {"a": 1}

        work.steps.insert(0, before)
        worker = work.worker(concurrency=2)
        await worker.start()
        await worker.offer(fresh("a", "b", "c"), 0)
        while len(work.ran) < 2 or len(begun) < 3:
            await asyncio.sleep(0)
        (waits,) = {"a", "b", "c"} - set(work.ran)
        while not (given := await worker.withdraw(5)):
            await asyncio.sleep(0)
        assert given == (waits,)
        other = work.worker("other", slot="worker-1")
        await other.start()
        await other.offer([Assignment(waits, Mode.RESUME)], 0)
        while waits not in work.ran:
            await asyncio.sleep(0)
        work.gate.set()
        assert [each.root_id for each in await collected(other, 1)] == [waits]
        assert len(await collected(worker, 2)) == 2
        assert sorted(begun) == ["a", "b", "c"], "what was durable did not run again"
        await worker.drain(1)
        await other.drain(1)

    to_end(scene())


@pytest.mark.parametrize("seed", range(2))
def test_roots_that_go_from_worker_to_worker_leave_a_sound_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(places_module, "WORTH_MORE", -1.0)
    rng = random.Random(seed)
    calls: Counter[tuple[str, str]] = Counter()

    async def scene() -> None:
        work = Work(tmp_path)

        async def call(_: Any, ctx: Any) -> dict[str, Any]:
            calls[ctx.item_id, str(ctx.position)] += 1
            if ctx.position.step_name != "a":
                await asyncio.sleep(rng.choice((0.001, 0.03)))
            return {"v": 1}

        def reduce(results: Any) -> dict[str, Any]:
            return {"count": len(results)}

        each = Sequence("pair", [step(name="c")(call), step(name="d")(call)])
        work.steps[:] = [
            step(name="a")(call),
            MapReduce("m", split=lambda _: [{}] * 2, each=each, reduce=reduce),
            step(name="b")(call),
        ]
        workers = [work.worker(f"w{n}", concurrency=4, slot=f"worker-{n}") for n in range(2)]
        for worker in workers:
            await worker.start()
        ids = [f"r{n}" for n in range(120)]
        for worker, given in zip(workers, (ids[::2], ids[1::2]), strict=True):
            await worker.offer(fresh(*given), 0)
        ended: list[str] = []

        async def gathered(worker: Worker) -> None:
            last = 0
            while len(ended) < len(ids):
                found = await worker.collect(last)
                last = found.last
                assert all(each.status is OutcomeStatus.COMPLETED for each in found.outcomes)
                ended.extend(each.root_id for each in found.outcomes)

        gathering = asyncio.gather(*map(gathered, workers))
        went_on = 0
        while not gathering.done():
            here = rng.randrange(2)
            moved = await workers[here].withdraw(30)
            begun = {item_id.partition("/")[0] for item_id, _ in calls}
            went_on += len(begun.intersection(moved))
            again = [Assignment(each, Mode.RESUME, {"n": 1}) for each in moved]
            await workers[1 - here].offer(again, 0)
            await asyncio.sleep(0)
        await gathering
        for worker in workers:
            await worker.drain(5)
        assert sorted(ended) == sorted(ids)
        assert went_on, "roots that had begun did go from one to the other"

    asyncio.run(asyncio.wait_for(scene(), 120))
    with DatagenStore.open(str(tmp_path / "log.lance"), read_only=True) as store:
        assert store.verify().violations == ()
        assert set(calls.values()) == {1}, "no step ran again"


def test_a_worker_whose_shard_was_claimed_says_so_and_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        zombie = work.worker("zombie")
        await zombie.start()
        await zombie.offer(fresh("a"), 0)
        while not work.ran:
            await asyncio.sleep(0)
        successor = work.worker("successor")
        report = await successor.start()
        assert report.writer_epoch == "worker-0:2"
        work.gate.set()
        found = await zombie.collect(0)
        while found.state is WorkerState.READY:
            found = await zombie.collect(0)
        assert found.state is WorkerState.FENCED
        assert found.outcomes == ()
        await zombie.drain(1)
        await successor.offer([Assignment("a", Mode.RESUME, {"n": 1})], 0)
        (outcome,) = await collected(successor, 1)
        assert outcome.status is OutcomeStatus.COMPLETED
        await successor.drain(1)
        with DatagenStore.open(work.log_uri, read_only=True) as store:
            assert not store.overview().violations
            assert store.overview().completed == 1

    to_end(scene())


def test_a_fenced_worker_that_nobody_asks_is_abandoned_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "ABANDONED_S", 0)

    async def scene() -> None:
        work = Work(tmp_path)
        zombie = work.worker("zombie")
        await zombie.start()
        abandoned = asyncio.ensure_future(zombie.abandoned())
        await zombie.offer(fresh("a"), 0)
        while not work.ran:
            await asyncio.sleep(0)
        successor = work.worker("successor")
        await successor.start()
        assert not abandoned.done(), "nothing was refused yet, so it may be the owner still"
        work.gate.set()
        reason = await abandoned
        assert reason.startswith("WriterFencedError: another writer")
        assert f"worker-0 stops, fenced: {reason}" in caplog.text
        await zombie.drain(1)
        await successor.drain(1)

    to_end(scene())


def test_a_halted_worker_that_is_asked_is_not_abandoned_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "ABANDONED_S", math.inf)

    async def scene() -> None:
        work = Work(tmp_path)
        work.gate.set()
        zombie = work.worker("zombie")
        await zombie.start()
        abandoned = asyncio.ensure_future(zombie.abandoned())
        successor = work.worker("successor")
        await successor.start()
        await zombie.offer(fresh("a"), 0)
        while (await zombie.collect(0)).state is not WorkerState.FENCED:
            pass
        assert not abandoned.done()
        abandoned.cancel()
        await zombie.drain(1)
        await successor.drain(1)

    to_end(scene())


def test_a_worker_of_a_superseded_run_ends_after_its_claim(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker()
        work.next_term("run-2")
        with pytest.raises(RunSupersededError, match="run-2"):
            await worker.start()
        with pytest.raises(NotStartedError):
            await worker.offer(fresh("a"), 0)

    to_end(scene())


def test_draining_lets_running_roots_end_and_gives_up_those_that_do_not(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker()
        await worker.start()
        await worker.offer(fresh("a"), 0)
        while not work.ran:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(worker.drain(30))
        await asyncio.sleep(0)
        await worker.offer(fresh("b"), 0)
        work.gate.set()
        await draining
        found = await worker.collect(0)
        assert found.state is WorkerState.DRAINING
        assert [each.root_id for each in found.outcomes] == ["a"]
        assert work.ran == ["a"]

        work.gate.clear()
        late = work.worker("late")
        await late.start()
        await late.offer(fresh("c"), 0)
        while "c" not in work.ran:
            await asyncio.sleep(0)
        await late.drain(0)
        assert (await late.collect(0)).outcomes == ()
        with DatagenStore.open(work.log_uri, read_only=True) as store:
            assert store.item_failures("c") == [], "a drain is nobody's failure"
            folded = store.fold_item("c").folded()
            assert folded is not None
            assert not folded.is_terminated

    to_end(scene())


def test_a_drain_lets_steps_end_and_begins_none(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        begun: list[str] = []

        @step
        async def afterwards(item: Any, ctx: Any) -> None:
            begun.append(ctx.item_id)

        work.steps.append(afterwards)
        worker = work.worker(concurrency=1)
        await worker.start()
        await worker.offer(fresh("a", "b"), 0)
        while not work.ran:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(worker.drain(math.inf))
        await asyncio.sleep(0)
        work.gate.set()
        await draining
        assert (await worker.collect(0)).outcomes == ()
        assert (work.ran, begun) == (["a"], [])
        with DatagenStore.open(work.log_uri, read_only=True) as store:
            folded = store.fold_item("a").folded()
            assert folded is not None
            assert "b" in folded.fields, "what the step returned is durable"
            assert not folded.is_terminated

        after = work.worker("after")
        await after.start()
        await after.offer([Assignment("a", Mode.RESUME)], 0)
        assert [each.status.value for each in await collected(after, 1)] == ["completed"]
        assert (work.ran, begun) == (["a"], ["a"])
        await after.drain(1)

    to_end(scene())


def test_a_step_that_cancels_its_own_task_fails_its_root(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)

        @step
        async def rash(item: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        work.steps[:] = [rash]
        worker = work.worker()
        await worker.start()
        await worker.offer(fresh("a"), 0)
        (outcome,) = await collected(worker, 1)
        assert (outcome.status, outcome.can_retry) == (OutcomeStatus.FAILED, False)
        assert "cancelled" in (outcome.error or "")
        await worker.drain(1)

    to_end(scene())


def test_a_worker_says_at_once_how_many_roots_it_has_begun(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker()
        await worker.start()
        asked = asyncio.ensure_future(worker.collect(0))
        await asyncio.sleep(0)
        await worker.offer(fresh("a", "b", "c"), 0)
        found = await asked
        assert (found.begun, found.outcomes) == (2, ())
        work.gate.set()
        await collected(worker, 3)
        await worker.drain(1)

    to_end(scene())


def test_a_buried_root_has_its_failure_in_the_log(tmp_path: Path) -> None:
    async def scene() -> None:
        work = Work(tmp_path)
        worker = work.worker()
        await worker.start()
        await worker.offer([Assignment("a", Mode.BURY, {"n": 1})], 0)
        (outcome,) = await collected(worker, 1)
        assert outcome.status is OutcomeStatus.FAILED
        assert not outcome.can_retry
        await worker.drain(1)
        assert work.ran == []
        with DatagenStore.open(work.log_uri, read_only=True) as store:
            assert [each.error.error_type for each in store.item_failures("a")] == ["WorkerDied"]

    to_end(scene())
