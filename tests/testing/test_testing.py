"""The tools that users get for tests of their own pipelines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from datagen_ray import testing
from datagen_ray.errors import ConfigError
from datagen_ray.pipeline.nodes import Loop, MapReduce, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.steps import step

ROWS = [{"id": n, "q": n} for n in range(2)]


@step
async def draft(item: Any) -> dict[str, Any]:
    return {"draft": "x" * item["q"], "n": Append(item["q"])}


@step
async def check(item: Any) -> None:
    if item["q"] == 1:
        raise Filtered("one is not wanted")


@step
async def solve(item: Any, ctx: Any) -> dict[str, Any]:
    return {"answer": [item["part"], ctx.seed]}


def every_kind() -> Pipeline:
    return Pipeline(
        "p",
        [
            Loop("l", Sequence("r", [draft]), until=lambda item: len(item["n"]) == 2, max_rounds=3),
            MapReduce(
                "m",
                split=lambda item: [{"part": n} for n in range(2)],
                each=solve,
                reduce=lambda results: {"answers": [each["answer"] for each in results]},
            ),
            check,
        ],
        fields={"n": Append},
    )


def test_a_context_made_by_hand_has_the_seed_and_the_key_of_a_run() -> None:
    seen: list[Any] = []

    @step
    async def first(item: Any) -> None: ...

    @step
    def second(item: Any, ctx: Any) -> dict[str, Any]:
        seen.append(ctx)
        return {"seed": ctx.seed}

    with testing.TrialLog() as log:
        log.run(Pipeline("p", [first, second], seed=7), ROWS[:1], key="id")
    ctx = testing.step_context(
        "second", item_id="0", index=1, enclosing="p", pipeline="p", seed=7, retry=2
    )
    assert second({}, ctx) == {"seed": seen[0].seed}
    assert ctx.idempotency_key == seen[0].idempotency_key
    assert (ctx.root_id, ctx.retry) == ("0", 2)
    assert testing.step_context(item_id="5/m:1").root_id == "5"


def test_a_trial_is_a_run_on_a_real_log() -> None:
    with testing.TrialLog() as log:
        trial = log.run(every_kind(), ROWS, key="id")
        assert not trial.crashed
        assert trial.summary is not None
        assert (trial.summary.completed, trial.summary.filtered) == (1, 1)
        assert log.fields("0")["n"] == [0, 0]
        assert str(log.item("1").status) == "filtered"
        assert trial.called("solve") == ["0/m:0", "0/m:1", "1/m:0", "1/m:1"]
        assert {call.kind for call in trial.calls} == {"step", "choice", "split", "reduce"}
        with pytest.raises(KeyError, match="'7' is not in the log"):
            log.item("7")
        again = log.run(every_kind(), ROWS, key="id")
        assert (again.calls, again.writes) == ((), 0)
    assert not log.folder.exists()


def test_a_folder_of_ones_own_is_kept(tmp_path: Path) -> None:
    with testing.TrialLog(tmp_path) as log:
        log.run(every_kind(), ROWS, key="id")
    assert (tmp_path / "log.lance").exists()


@pytest.mark.parametrize("last_is_durable", [False, True])
def test_a_crash_keeps_what_was_written_before_it(last_is_durable: bool) -> None:
    with testing.TrialLog() as log:
        # Writes: the birth with three STEP_STARTED, the first draft, ...
        trial = log.run(
            every_kind(), ROWS[:1], key="id", crash_at=2, last_is_durable=last_is_durable
        )
        assert (trial.crashed, trial.writes, trial.called("draft")) == (True, 2, ["0"])
        assert ("draft" in log.fields("0")) is last_is_durable
        resumed = log.run(every_kind(), ROWS[:1], key="id")
        assert len(resumed.called("draft")) == 2 - last_is_durable
        assert log.fields("0")["n"] == [0, 0]


def test_every_crash_of_a_sound_pipeline_changes_nothing() -> None:
    assert testing.check_every_crash(every_kind, ROWS, key="id", most=12) == 12


def test_steps_that_are_not_deterministic_are_found() -> None:
    calls: list[int] = []

    @step
    def unsound(item: Any) -> dict[str, Any]:
        calls.append(1)
        return {"calls": len(calls)}

    with pytest.raises(AssertionError, match=r"fields of item 0 are .* not deterministic\?"):
        testing.check_every_crash(Pipeline("p", [unsound]), ROWS, key="id")


def test_a_step_that_ran_again_is_found() -> None:
    with testing.TrialLog() as log:
        trial = log.run(every_kind(), ROWS, key="id")
        with pytest.raises(AssertionError, match=r"step draft.* of 0 ran again"):
            testing.assert_not_run_again(trial.calls, log.durable_calls())


def test_a_difference_of_states_is_named() -> None:
    with testing.TrialLog() as log:
        log.run(every_kind(), ROWS, key="id")
        state = log.state()
    less = {item: one for item, one in state.items() if item != "0/m:1"}
    testing.assert_same_state(state, state)
    with pytest.raises(AssertionError, match="item 0/m:1 is missing"):
        testing.assert_same_state(less, state)
    with pytest.raises(AssertionError, match="item 0/m:1 is one too many"):
        testing.assert_same_state(state, less)


def test_waits_jump_on_a_fake_clock() -> None:
    clock = testing.FakeClock()
    tries: list[int] = []

    @step(retry=Retry(attempts=3, wait_s=600, jitter=0, max_wait_s=3600))
    def flaky(item: Any) -> dict[str, Any]:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("down")
        return {"ok": True}

    with testing.TrialLog() as log:
        trial = log.run(Pipeline("p", [flaky]), [{"q": 1}], clock=clock)
        assert trial.summary is not None
        assert trial.summary.completed == 1
        assert clock.elapsed_s == 600 + 1200
        assert trial.called("flaky") == ["0"]
        times = {event.event_ts for event in log.events()}
        assert (max(times) - min(times)).total_seconds() == 1800


def test_an_async_sleep_on_the_clock_lets_others_run() -> None:
    async def play() -> list[str]:
        clock, seen = testing.FakeClock(), []
        asyncio.get_running_loop().call_soon(seen.append, "other")
        await clock.sleep(5)
        return [*seen, str(clock.elapsed_s)]

    assert asyncio.run(play()) == ["other", "5.0"]


def test_writes_are_counted_from_one() -> None:
    with testing.TrialLog() as log, pytest.raises(ConfigError, match="counted from 1"):
        log.run(every_kind(), ROWS, crash_at=0)
