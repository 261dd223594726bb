"""Which rows each kind of step writes, exactly."""

from __future__ import annotations

from typing import Any

import pytest

import datagen_ray.pipeline.births as births_module
from datagen_ray.log.events import DatagenEventType
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
from tests.pipeline.support import rows, run


def setter(name: str, **fields: Any) -> Step:
    return step(name=name)(lambda item: fields)


def wrapped(*inner: str) -> list[str]:
    return [
        "STEP_STARTED p[0] (sequence)",
        *inner,
        "STEP_COMPLETED p[0] (sequence)",
        "TERMINAL = completed",
    ]


def test_an_item_is_born_in_one_append() -> None:
    _, log = run(Pipeline("p", [setter("a")]), {"q": 1, "r": "x"})
    assert [str(event.event_type) for event in log.batches[0]] == [
        "ITEM_CREATED",
        "FIELD_SET",
        "FIELD_SET",
        "STEP_COMPLETED",
        "STEP_STARTED",  # of the frame, which is queued and goes along
    ]
    assert rows(log, births=True)[:4] == [
        "ITEM_CREATED",
        "FIELD_SET q input[0] (root)",
        "FIELD_SET r input[0] (root)",
        "STEP_COMPLETED input[0] (root)",
    ]


def test_leaf_writes_its_fields_and_a_completion_in_one_append() -> None:
    _, log = run(Pipeline("p", [setter("a", x=1, y=Append("n")), setter("b")]))
    assert rows(log) == wrapped(
        "FIELD_SET x a[0] (leaf in p)",
        "FIELD_APPEND y a[0] (leaf in p)",
        "STEP_COMPLETED a[0] (leaf in p)",
        "STEP_COMPLETED b[1] (leaf in p)",
    )
    assert [len(batch) for batch in log.batches] == [3, 3, 3]


def test_the_end_goes_with_the_last_result_and_the_frames_that_it_closes() -> None:
    _, log = run(Pipeline("p", Sequence("outer", [Sequence("inner", [setter("a")])])))
    assert [str(event.event_type) for event in log.batches[-1]] == [
        "STEP_COMPLETED",
        "STEP_COMPLETED",
        "STEP_COMPLETED",
        "TERMINAL",
    ]


def test_a_single_step_is_a_pipeline() -> None:
    _, log = run(Pipeline("p", setter("a", x=1)))
    assert rows(log) == [
        "FIELD_SET x a[0] (leaf)",
        "STEP_COMPLETED a[0] (leaf)",
        "TERMINAL = completed",
    ]


def test_loop_index_is_the_round() -> None:
    rounds: list[int] = []

    def until(item: Any, round: int) -> bool:  # noqa: A002
        rounds.append(round)
        return len(item["n"]) == 3

    body = setter("a", n=Append(1))
    _, log = run(Pipeline("p", [Loop("l", body, until=until, max_rounds=9)]))
    assert rows(log) == wrapped(
        "STEP_STARTED l[0] (loop in p)",
        "FIELD_APPEND n a[0] (leaf in l)",
        "STEP_COMPLETED a[0] (leaf in l)",
        "FIELD_APPEND n a[1] (leaf in l)",
        "STEP_COMPLETED a[1] (leaf in l)",
        "FIELD_APPEND n a[2] (leaf in l)",
        "STEP_COMPLETED a[2] (leaf in l)",
        "STEP_COMPLETED l[0] (loop in p)",
    )
    assert rounds == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"until": lambda item: False, "max_rounds": 0},
        {"until": lambda item, nth: nth == -1, "max_rounds": 3, "check_first": True},
    ],
)
def test_a_loop_of_no_round_opens_and_closes_its_frame(options: Any) -> None:
    pipeline = Pipeline("p", [Loop("l", setter("a"), **options)])
    result, log = run(pipeline)
    assert rows(log) == wrapped("STEP_STARTED l[0] (loop in p)", "STEP_COMPLETED l[0] (loop in p)")
    assert (result.status, result.steps_executed) == ("completed", 0)


def test_loop_stops_at_max_rounds() -> None:
    never = Loop("l", setter("a"), until=lambda item, round: False, max_rounds=2)  # noqa: A006
    result, log = run(Pipeline("p", [never]))
    assert result.steps_executed == 2
    assert "STEP_COMPLETED a[1] (leaf in l)" in rows(log)


def test_counters_run_on_when_a_frame_is_entered_again() -> None:
    inner = Loop("inner", setter("a", n=Append(1)), until=lambda item: len(item["n"]) % 2 == 0,
                 max_rounds=5)  # fmt: skip
    outer = Loop(
        "outer",
        Sequence("round", [inner, setter("b")]),
        until=lambda item: len(item["n"]) >= 4,
        max_rounds=5,
    )
    _, log = run(Pipeline("p", [outer]))
    completed = [row for row in rows(log) if row.startswith("STEP_COMPLETED")]
    assert completed == [
        "STEP_COMPLETED a[0] (leaf in inner)",
        "STEP_COMPLETED a[1] (leaf in inner)",
        "STEP_COMPLETED inner[0] (loop in round)",
        "STEP_COMPLETED b[1] (leaf in round)",
        "STEP_COMPLETED round[0] (sequence in outer)",
        "STEP_COMPLETED a[2] (leaf in inner)",
        "STEP_COMPLETED a[3] (leaf in inner)",
        "STEP_COMPLETED inner[2] (loop in round)",
        "STEP_COMPLETED b[3] (leaf in round)",
        "STEP_COMPLETED round[1] (sequence in outer)",
        "STEP_COMPLETED outer[0] (loop in p)",
        "STEP_COMPLETED p[0] (sequence)",
    ]


def test_a_loop_begins_again_after_its_last_recorded_index() -> None:
    """Its last round wrote nothing, so it is not counted: a resume could not know of it."""
    calls = iter([True, False, True, False])
    body = Conditional("c", when=lambda item: next(calls), then=setter("a", n=Append(1)))
    inner = Loop("inner", body, until=lambda item: False, max_rounds=2)
    outer = Loop("outer", inner, until=lambda item: False, max_rounds=2)
    _, log = run(Pipeline("p", [outer]))
    assert [row for row in rows(log) if " a[" in row and "COMPLETED" in row] == [
        "STEP_COMPLETED a[0] (leaf in inner by c)",
        "STEP_COMPLETED a[1] (leaf in inner by c)",
    ]


def test_selectors_write_nothing_and_pass_their_index_on() -> None:
    inner = Conditional("c2", when=lambda item: True, then=setter("a"))
    pipeline = Pipeline(
        "p",
        [
            Conditional("c1", when=lambda item: True, then=inner),
            Conditional("c3", when=lambda item: False, then=setter("b")),
            Router("r", key=lambda item: item["t"], routes={"x": setter("x")}, default=setter("y")),
            Router("r2", key=lambda item: "x", routes={"x": Sequence("s", [setter("z")])}),
        ],
    )
    _, log = run(pipeline, {"t": "other"})
    assert rows(log) == wrapped(
        "STEP_COMPLETED a[0] (leaf in p by c2)",
        "STEP_COMPLETED y[2] (leaf in p by r)",
        "STEP_STARTED s[3] (sequence in p by r2)",
        "STEP_COMPLETED z[0] (leaf in s)",
        "STEP_COMPLETED s[3] (sequence in p by r2)",
    )


def test_map_reduce_writes_only_the_reduced_fields() -> None:
    pipeline = Pipeline(
        "p",
        [
            MapReduce(
                "m",
                split=lambda item: ({"h": i} for i in range(2)),
                each=step(name="e")(lambda item: {"v": item["h"] + item["q"]}),
                reduce=lambda item, results: {"sum": sum(r["v"] for r in results)},
            )
        ],
    )
    _, log = run(pipeline, {"q": 10})
    assert rows(log) == wrapped(
        "FIELD_SET sum m[0] (map_reduce in p)", "STEP_COMPLETED m[0] (map_reduce in p)"
    )
    assert rows(log, "5/m:1", births=True) == [
        "ITEM_CREATED m[0] (map_reduce in p)",
        "FIELD_SET h input[0] (root)",
        "STEP_COMPLETED input[0] (root)",
        "FIELD_SET v e[0] (leaf)",
        "STEP_COMPLETED e[0] (leaf)",
        "TERMINAL = completed",
    ]
    births = [b for b in log.batches if b[0].event_type is DatagenEventType.ITEM_CREATED]
    assert [len(batch) for batch in births] == [4, 6]
    assert log.fields()["sum"] == 21


def test_numbers_of_sub_items_go_on_in_a_loop() -> None:
    fan = MapReduce(
        "m",
        split=lambda item: [{}, {}],
        each=setter("e"),
        reduce=lambda results: {"ids": [r.item_id for r in results]},
    )
    _, log = run(Pipeline("p", [Loop("l", fan, until=lambda item: False, max_rounds=2)]))
    assert log.fields()["ids"] == ["5/m:2", "5/m:3"]
    assert rows(log, "5/m:2", births=True)[0] == "ITEM_CREATED m[1] (map_reduce in l)"


def test_branch_names_its_sub_items_and_never_merges() -> None:
    pipeline = Pipeline("p", [Branch("b", {"x": setter("x1", v=1), "y": setter("y1", v=2)})])
    _, log = run(pipeline, {"v": 0})
    assert log.fields() == {"v": 0, "x": {"v": 1}, "y": {"v": 2}}
    assert log.folded("5/b:1").query_tags == {"branch": "y"}


def test_sub_pipeline_hands_its_outputs_back() -> None:
    inner = Pipeline("polish", [setter("a", x=1, secret=2)])
    _, log = run(Pipeline("p", [SubPipeline("polish", inner, outputs=["x"])]))
    assert log.fields() == {"x": 1}
    assert "STEP_COMPLETED polish[0] (sub_pipeline in p)" in rows(log)
    assert "STEP_COMPLETED polish[0] (sequence)" in rows(log, "5/polish:0")


def test_an_empty_split_reduces_nothing() -> None:
    fan = MapReduce("m", split=lambda item: [], each=setter("e"), reduce=lambda r: {"n": len(r)})
    result, log = run(Pipeline("p", [fan]))
    assert result.status == "completed"
    assert log.fields() == {"n": 0}


@step
def reject(item: Any) -> None:
    raise Filtered("too short")


def test_a_filter_is_one_terminal_row_with_its_place_and_reason() -> None:
    result, log = run(Pipeline("p", [setter("a"), reject]))
    assert result.status == "filtered"
    assert rows(log)[-1] == "TERMINAL reject[1] (leaf in p) = filtered"
    terminal = log.batches[-1][0]
    assert (terminal.error_type, terminal.error_dump) == ("Filtered", "too short")
    assert log.folded().trajectory.open_frames


def test_a_filtered_sub_pipeline_filters_its_parent() -> None:
    result, log = run(Pipeline("p", [SubPipeline("s", reject, outputs=[])]))
    assert result.status == "filtered"
    assert rows(log)[-1] == "TERMINAL s[0] (sub_pipeline in p) = filtered"
    assert log.batches[-1][0].error_dump == "too short"


def test_a_dropped_branch_is_null() -> None:
    _, log = run(Pipeline("p", [Branch("b", {"x": reject, "y": setter("y1", v=2)})]))
    assert log.fields() == {"x": None, "y": {"v": 2}}


def test_too_many_sub_items_are_a_clear_failure(monkeypatch: Any) -> None:
    monkeypatch.setattr(births_module, "MAX_SUB_ITEMS", 3)
    fan = MapReduce("m", split=lambda item: [{}] * 4, each=setter("e"), reduce=lambda r: None)
    result, log = run(Pipeline("p", [fan]))
    assert result.status == "failed"
    assert "more than 3 sub-items" in (result.error or "")
    assert rows(log)[-1] == "FAILED m[0] (map_reduce in p)"


def test_too_large_births_are_a_clear_failure(monkeypatch: Any) -> None:
    monkeypatch.setattr(births_module, "MAX_BIRTH_BYTES", 1000)
    fan = MapReduce(
        "m", split=lambda item: [{"t": "x" * 300}] * 4, each=setter("e"), reduce=lambda r: None
    )
    result, _ = run(Pipeline("p", [fan]))
    assert "ValueTooLargeError" in (result.error or "")
