"""Lock-step replay: what is taken from the log, and what does not fit it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import pytest

from datagen_ray.log.events import DatagenEvent, DatagenEventType, DatagenStepKind
from datagen_ray.pipeline.nodes import (
    Branch,
    Conditional,
    Loop,
    MapReduce,
    Router,
    Sequence,
    SubPipeline,
)
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.steps import Step, step
from tests.pipeline.support import ListLog, rerun, rows, run


def ok(name: str, **fields: Any) -> Step:
    return step(name=name)(lambda item: fields or None)


def bad(name: str) -> Step:
    def fail(item: Any) -> None:
        raise ValueError(name)

    return step(name=name)(fail)


def never(*_: Any) -> Any:
    raise AssertionError("user code was called while rows remained")


def recorded(*steps: Any) -> ListLog:
    """The log of an item that stopped at a failure at the end of these steps."""
    result, log = run(Pipeline("p", list(steps)))
    assert result.status == "failed"
    return log


def resume(log: ListLog, *steps: Any) -> tuple[str, str | None]:
    result = rerun(Pipeline("p", list(steps)), log)
    return result.status, result.error


def test_no_user_code_is_called_while_rows_remain() -> None:
    loop = Loop("l", ok("a", n=Append(1)), until=lambda item: len(item["n"]) == 2, max_rounds=9)
    fan = MapReduce("m", split=lambda item: [{}], each=ok("e"), reduce=lambda r: {"r": 1})
    route = Router("r", key=lambda item: "x", routes={"x": ok("x1"), "y": ok("y1")})
    cond = Conditional("c", when=lambda item: False, then=ok("t1"))
    log = recorded(loop, fan, route, cond, bad("end"))

    def silent(name: str) -> Step:
        return step(name=name)(never)

    status, error = resume(
        log,
        Loop("l", silent("a"), until=never, max_rounds=9),
        MapReduce("m", split=never, each=silent("e"), reduce=never),
        Router("r", key=never, routes={"x": silent("x1"), "y": silent("y1")}),
        Conditional("c", when=lambda item: False, then=silent("t1")),
        ok("end"),
    )
    assert (status, error) == ("completed", None)
    assert log.fields()["n"] == [1, 1]


def test_resume_writes_no_second_step_started() -> None:
    log = recorded(Loop("l", bad("a"), until=never, max_rounds=1))
    resume(log, Loop("l", ok("a"), until=never, max_rounds=1))
    assert [row for row in rows(log) if row.startswith("STEP_STARTED")] == [
        "STEP_STARTED p[0] (sequence)",
        "STEP_STARTED l[0] (loop in p)",
    ]


def test_a_resume_is_the_next_attempt_and_the_next_item_seq() -> None:
    log = recorded(bad("a"))
    before = len(log.events)
    resume(log, ok("a"))
    new = log.events[before:]
    assert {event.attempt for event in new} == {1}
    assert [event.item_seq for event in new] == list(range(before + 1, before + 1 + len(new)))


def test_births_are_read_and_never_split_again() -> None:
    log = recorded(
        MapReduce("m", split=lambda item: [{"i": 0}, {"i": 1}], each=bad("e"), reduce=never)
    )
    seen: list[int] = []
    each = step(name="e")(lambda item: seen.append(item["i"]))
    status, _ = resume(log, MapReduce("m", split=never, each=each, reduce=lambda r: {"n": len(r)}))
    assert status == "completed"
    assert (sorted(seen), log.fields()["n"]) == ([0, 1], 2)


def test_ended_sub_items_are_not_run_again() -> None:
    calls: list[int] = []
    broken = [True]

    def each(item: Any) -> Any:
        calls.append(item["i"])
        if item["i"] == 1 and broken:
            raise ValueError(broken.pop())
        if item["i"] == 2:
            raise Filtered("two")
        return {"v": item["i"]}

    def reduce(item: Any, results: Any) -> Any:
        return {"r": [[r.status, r.dropped, r.reason, dict(r)] for r in results]}

    pipeline = Pipeline(
        "p",
        [
            MapReduce(
                "m",
                split=lambda item: [{"i": i} for i in range(3)],
                each=step(name="e")(each),
                reduce=reduce,
            )
        ],
    )
    _, log = run(pipeline)
    rerun(pipeline, log)
    assert sorted(calls) == [0, 1, 1, 2]
    assert log.fields()["r"] == [
        ["completed", False, None, {"i": 0, "v": 0}],
        ["completed", False, None, {"i": 1, "v": 1}],
        ["filtered", True, "two", {"i": 2}],
    ]


def test_births_bind_the_choice_of_a_selector() -> None:
    fan = MapReduce("m", split=lambda item: [{}], each=bad("e"), reduce=never)
    log = recorded(Conditional("c", when=lambda item: True, then=fan))
    again = MapReduce("m", split=never, each=ok("e"), reduce=lambda r: {"done": 1})
    assert resume(log, Conditional("c", when=never, then=again))[0] == "completed"


def test_a_failure_binds_no_choice() -> None:
    log = recorded(Conditional("c", when=lambda item: True, then=bad("a")))
    assert resume(log, Conditional("c", when=lambda item: False, then=ok("a")))[0] == "completed"


def test_terminal_roots_are_skipped_without_running() -> None:
    result, log = run(Pipeline("p", [ok("a")]))
    assert result.status == "completed"
    result = rerun(Pipeline("p", [step(name="other")(never)]), log)
    assert (result.status, result.steps_executed) == ("completed", 0)


def each_is(node: Any, name: str = "m") -> MapReduce:
    return MapReduce(name, split=lambda i: [{}], each=node, reduce=lambda r: None)


def branches(**nodes: Any) -> Branch:
    return Branch("b", nodes)


def fails_behind(node: Any) -> list[Any]:
    return [node, bad("end")]


MISMATCHES: list[tuple[str, SequenceOf[Any], SequenceOf[Any], str]] = [
    ("renamed", [ok("a"), bad("b")], [ok("a2"), bad("b")], "STEP_COMPLETED of a[0]"),
    ("inserted", [ok("a"), bad("b")], [ok("new"), ok("a"), bad("b")], "expects STEP_COMPLETED of"),
    ("reordered", [ok("a"), ok("b"), bad("c")], [ok("b"), ok("a"), bad("c")], "of b[0]"),
    ("removed", [ok("a"), ok("b"), bad("c")], [ok("b"), bad("c")], "of a[0]"),
    ("kind", [ok("a"), bad("b")], [Sequence("a", [ok("x")]), bad("b")], "STEP_STARTED of a[0]"),
    ("end", [ok("a"), bad("b")], [], "the end of the item"),
    (
        "selector",
        [Conditional("c", when=lambda i: True, then=ok("a")), bad("b")],
        [Conditional("c2", when=lambda i: True, then=ok("a")), bad("b")],
        "by c)",
    ),
    (
        "no child of the selector",
        [Conditional("c", when=lambda i: True, then=ok("a"), otherwise=ok("x")), bad("b")],
        [Conditional("c", when=lambda i: True, then=ok("y"), otherwise=ok("x")), bad("b")],
        "the start of a child of c[0]",
    ),
    (
        "loop body",
        [Loop("l", ok("a"), until=lambda i: True, max_rounds=2), bad("b")],
        [Loop("l", ok("z"), until=lambda i: True, max_rounds=2), bad("b")],
        "round 0 of l[0]",
    ),
    ("fan-out body", [each_is(Sequence("s", [ok("e"), bad("f")]))], [each_is(ok("z"))], "of s[0]"),
    (
        "fan-out gone",
        [each_is(bad("e"))],
        [ok("m2")],
        "births of sub-items of m[0]",
    ),
    (
        "branch gone",
        [branches(x=bad("x1"))],
        [branches(y=ok("x1"))],
        "a sub-item of the branch 'x'",
    ),
    (
        "ended sub-item of another body",
        [branches(x=ok("x1"), y=bad("y1"))],
        [branches(x=ok("x2"), y=ok("y1"))],
        "STEP_COMPLETED of x1[0] (leaf), the pipeline expects the start of 'x2'",
    ),
    (
        "version",
        [ok("a"), bad("b")],
        [step(name="a", version=2)(lambda i: None), bad("b")],
        "a@2[0]",
    ),
]


@pytest.mark.parametrize(
    ("before", "after", "named"), [case[1:] for case in MISMATCHES], ids=[c[0] for c in MISMATCHES]
)
def test_a_changed_pipeline_is_a_mismatch(
    before: SequenceOf[Any], after: SequenceOf[Any], named: str
) -> None:
    log = recorded(*before)
    count = len(log.events)
    if after:
        status, error = resume(log, *after)
    else:
        result = rerun(Pipeline("p", ok("a")), log)
        status, error = result.status, result.error
        named = "STEP_STARTED of p[0]"
    assert status == "failed"
    assert error is not None
    assert error.startswith("PipelineMismatchError: item '5")
    assert ": the log has " in error
    assert named in error
    assert "\n" not in error
    assert len(log.events) == count


def test_rows_left_over_are_a_mismatch() -> None:
    log = recorded(ok("a"), bad("b"))
    end = log.events[-2]
    extra = replace(
        end, event_id="x", item_seq=99, event_type=DatagenEventType.STEP_COMPLETED,
        step_name="ghost", step_kind=DatagenStepKind.LEAF, step_index=7, field_name=None,
        field_type=None, codec_version=None, value=None,
    )  # fmt: skip
    log.batches.append([extra])
    assert "ghost[7]" in (resume(log, ok("a"), ok("b"))[1] or "")


def test_an_orphan_sub_item_is_a_mismatch() -> None:
    log = recorded(each_is(bad("e")))
    log.batches = [[e for e in batch if e.item_id != "5"] for batch in log.batches]
    error = resume(log, each_is(ok("e")))[1]
    assert "nothing of itself" in (error or "")


def test_two_writers_of_one_item_are_a_violation_of_that_item() -> None:
    log = recorded(ok("a"), bad("b"))
    other: DatagenEvent = replace(log.events[-1], event_id="other")
    log.batches.append([other])
    assert (resume(log, ok("a"), ok("b"))[1] or "").startswith("ItemViolationError")


def test_safe_changes_are_safe() -> None:
    log = recorded(
        Loop("l", ok("a", n=Append(1)), until=lambda i: len(i["n"]) == 3, max_rounds=3),
        Router("r", key=lambda i: 1, routes={1: ok("one")}),
        bad("end"),
    )
    status, error = resume(
        log,
        Loop("l", ok("a", other=2), until=lambda i: True, max_rounds=1),
        Router("r", key=lambda i: 2, routes={1: ok("one"), 2: ok("two")}, default=ok("else")),
        ok("end"),
        ok("appended", late=1),
    )
    assert (status, error) == ("completed", None)
    assert log.fields() == {"n": [1, 1, 1], "late": 1}


def test_a_step_appended_to_a_closed_frame_is_skipped_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = recorded(Sequence("s", [ok("a")]), bad("end"))
    status, _ = resume(log, Sequence("s", [ok("a"), ok("b", late=1)]), ok("end"))
    assert status == "completed"
    assert "late" not in log.fields()
    assert "step 'b' was added to 's' after items had completed it" in caplog.text


@pytest.mark.parametrize("silent", [False, True])
def test_a_step_appended_to_a_loop_runs_from_the_next_round_on(silent: bool) -> None:
    def third(item: Any) -> Any:
        if len(item["n"]) == 2:
            raise ValueError("third")
        return {"n": Append(1)}

    fields = {"n": Append}
    loop = Loop("l", Sequence("s", [step(name="a")(third)]), until=lambda i: False, max_rounds=4)
    result, log = run(Pipeline("p", [loop], fields=fields))
    assert result.status == "failed"
    new: Any = ok("b", late=Append(1))
    if silent:
        new = Conditional("c", when=lambda item: len(item["n"]) == 4, then=new)
    again = Loop(
        "l", Sequence("s", [ok("a", n=Append(1)), new]), until=lambda i: False, max_rounds=4
    )
    result = rerun(Pipeline("p", [again], fields=fields), log)
    assert (result.status, result.error) == ("completed", None)
    assert log.fields() == {"n": [1, 1, 1, 1], "late": [1] if silent else [1, 1]}


def test_a_new_branch_does_not_disturb_an_open_fan_out() -> None:
    log = recorded(branches(x=bad("x1")))
    assert resume(log, branches(x=ok("x1", v=1), z=ok("z1")))[0] == "completed"
    assert log.fields() == {"x": {"v": 1}}


def test_frames_in_sub_items_are_entered_again() -> None:
    inner = Sequence("in", [ok("a", x=1), bad("b")])
    log = recorded(SubPipeline("s", inner, outputs=["x"]))
    again = Sequence("in", [step(name="a")(never), ok("b")])
    assert resume(log, SubPipeline("s", again, outputs=["x"]))[0] == "completed"
    assert rows(log, "5/s:0") == [
        "STEP_STARTED in[0] (sequence)",
        "FIELD_SET x a[0] (leaf in in)",
        "STEP_COMPLETED a[0] (leaf in in)",
        "FAILED b[1] (leaf in in)",
        "STEP_COMPLETED b[1] (leaf in in)",
        "STEP_COMPLETED in[0] (sequence)",
        "TERMINAL = completed",
    ]


def test_replay_decodes_nothing() -> None:
    from datagen_ray.pipeline.codecs import Codec

    written = Codec("old", 1, encode=lambda v: v, decode=lambda v, n: v)
    log = ListLog()
    result, log = run(Pipeline("p", [ok("a", v=1), bad("b")], fields={"v": written}))
    assert result.status == "failed"
    assert resume(log, ok("a"), ok("b"))[0] == "completed"
    result, log = run(Pipeline("p", [ok("a", v=1), bad("b")], fields={"v": written}))
    status, error = resume(log, ok("a"), step(name="b")(lambda item: {"w": item["v"]}))
    assert status == "failed"
    assert "'old', which is not registered" in (error or "")
