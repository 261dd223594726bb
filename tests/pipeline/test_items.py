"""What user code sees: values, blobs, context, and how it is called."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import json
import threading
from collections import Counter
from typing import Any

import pytest

from datagen_ray.pipeline.codecs import Codec
from datagen_ray.pipeline.executor import Executor, RootTask
from datagen_ray.pipeline.nodes import Branch, Conditional, Loop, MapReduce, Sequence, SubPipeline
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import ListLog, ListSink, rerun, run, run_once


def look(pipeline_before: list[Any], read: Any, inputs: Any = None, **options: Any) -> Any:
    """What a step sees after others ran."""
    seen: list[Any] = []
    last = step(name="look")(lambda item: seen.append(read(item)))
    result, _ = run(Pipeline("p", [*pipeline_before, last], **options), inputs)
    assert result.status == "completed", result.error
    return seen[0]


def give(**fields: Any) -> Any:
    return step(name="give")(lambda item: fields)


def test_values_are_what_was_stored() -> None:
    original = {"t": (1, 2), "d": {"b": 1, "a": [None, True]}}
    assert look([give(**original)], dict) == {"t": [1, 2], "d": {"a": [None, True], "b": 1}}


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item["x"].append(1),
        lambda item: item["x"][0].update(a=1),
        lambda item: item["x"][0].__setitem__("a", 1),
        lambda item: item["x"].__iadd__([1]),
        lambda item: item["x"].sort(),
        lambda item: item["x"][0].pop("k"),
        lambda item: item.__setitem__("x", 1),
        lambda item: item["n"].append(3),
    ],
)
def test_values_are_deeply_read_only(change: Any) -> None:
    def read(item: Any) -> str:
        with pytest.raises((TypeError, AttributeError)):
            change(item)
        return "kept"

    assert look([give(x=[{"k": [1]}], n=Append([1]))], read) == "kept"


def test_copies_can_be_changed_and_values_are_json() -> None:
    def read(item: Any) -> Any:
        mine = copy.deepcopy(item["x"])
        mine[0]["k"].append(2)
        return mine, json.dumps(item["x"]), copy.copy(item["x"]), item["x"].copy()

    mine, text, *copies = look([give(x=[{"k": [1]}])], read)
    assert (mine, text) == ([{"k": [1, 2]}], '[{"k": [1]}]')
    assert copies == [[{"k": [1]}]] * 2


def test_a_missing_field_says_which_there_are() -> None:
    result, _ = run(Pipeline("p", step(name="a")(lambda item: item["y"])), {"x": 1, "q": 2})
    assert "the item has: q, x" in (result.error or "")


def test_append_fields_accumulate_and_read_as_empty_before() -> None:
    fields = {"n": Append, "absent": Append[int]}
    read = look(
        [give(n=Append(1)), step(name="more")(lambda item: {"n": Append({"a": 2})})],
        lambda item: (item["n"], item["absent"], "absent" in item, len(item)),
        fields=fields,
    )
    assert read == ([1, {"a": 2}], [], False, 1)


def test_inputs_may_be_append_fields() -> None:
    assert look([give(n=Append(3))], lambda i: i["n"], {"n": [1, 2]}, fields={"n": Append}) == [
        1,
        2,
        3,
    ]
    result, log = run(Pipeline("p", give(), fields={"n": Append}), {"n": 5})
    assert "declared to grow, so it is a list" in (result.error or "")
    assert not log.events


def test_declared_types_are_stored_natively() -> None:
    fields = {"i": int, "f": float, "b": bool, "s": str, "u": int | None, "nan": float}
    values = {"i": 1, "f": 2, "b": True, "s": "x", "u": None, "nan": float("inf"), "z": 0}
    pipeline = Pipeline("p", [give(**values)], fields=fields)
    _, log = run(pipeline)
    kinds = {name: kept.kind for name, kept in log.folded().fields.items()}
    assert kinds == {
        "i": "int",
        "f": "float",
        "b": "bool",
        "s": "str",
        "u": "json",
        "nan": "float",
        "z": "json",
    }
    assert log.fields()["f"] == 2.0


@pytest.mark.parametrize(("declared", "value"), [(int, True), (int, 1.0), (str, 1), (float, "1")])
def test_a_value_of_another_type_is_refused(declared: Any, value: Any) -> None:
    result, _ = run(Pipeline("p", [give(x=value)], fields={"x": declared}))
    assert (result.error or "").startswith("CodecError: field 'x'")


def test_unannotated_fields_may_change_shape() -> None:
    first, second = give(x=0, y=None), step(name="b")(lambda item: {"x": 0.5, "y": "text"})
    assert look([first, second], dict) == {"x": 0.5, "y": "text"}


def test_a_result_of_none_changes_nothing() -> None:
    assert look([step(name="a")(lambda item: None)], dict, {"q": 1}) == {"q": 1}


class Vector:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


def vector_codec(kind: Any, version: int = 1) -> Codec:
    return Codec(
        "test.vector",
        version,
        encode=lambda v: bytes(v.numbers) if kind == "blob" else v.numbers,
        decode=lambda stored, written: Vector([n * written for n in stored]),
        kind=kind,
    )


@pytest.mark.parametrize("kind", ["json", "blob"])
def test_a_codec_stores_a_type_of_the_users(kind: Any) -> None:
    broken = [True]

    def read(item: Any) -> Any:
        if broken:
            raise ValueError(broken.pop())
        item["v"].numbers.append(9)
        return {"seen": item["v"].numbers}

    pipeline = Pipeline(
        "p", [give(v=Vector([1, 2])), step(name="read")(read)], fields={"v": vector_codec(kind)}
    )
    _, log = run(pipeline)
    newer = Pipeline("p", list(pipeline.body.children), fields={"v": vector_codec(kind, 2)})
    assert rerun(newer, log).status == "completed"
    assert log.fields()["seen"] == [1, 2]
    assert log.folded().fields["v"].field_type == "test.vector"


def test_a_codec_that_raises_is_named() -> None:
    codec = Codec("bad", 1, encode=lambda v: v.nothing, decode=lambda v, n: v)
    result, _ = run(Pipeline("p", [give(v=1)], fields={"v": codec}))
    assert "codec 'bad' could not encode: AttributeError" in (result.error or "")


def test_blobs_are_lazy_and_the_same_after_a_resume() -> None:
    broken = [True]

    async def read(item: Any) -> Any:
        with pytest.raises(RuntimeError, match="await blob"):
            item["img"].read()
        if broken:
            raise ValueError(broken.pop())
        return {"n": len(await item["img"].load()), "size": item["img"].size, "copy": item["img"]}

    def in_thread(item: Any) -> Any:
        return {"again": item["copy"].read().decode()}

    gate = Conditional(
        "c", when=lambda item: item["img"].read() == b"abc", then=step(name="t")(in_thread)
    )
    pipeline = Pipeline("p", [give(img=b"abc"), step(name="read")(read), gate])
    _, log = run(pipeline)
    assert rerun(pipeline, log).status == "completed"
    fields = log.fields()
    assert (fields["n"], fields["size"], fields["again"]) == (3, 3, "abc")
    assert log.folded().fields["copy"].kind == "blob"


def test_sub_items_read_through_and_reducers_see_what_they_set() -> None:
    each = step(name="e")(lambda item: {"both": [item["q"], item["h"]], "q": 0})
    fan = MapReduce(
        "m", split=lambda item: [{"h": 7}], each=each,
        reduce=lambda item, results: {"r": [dict(r) for r in results], "kept": item["q"]},
    )  # fmt: skip
    _, log = run(Pipeline("p", [fan]), {"q": 1})
    assert log.fields() == {"q": 1, "kept": 1, "r": [{"h": 7, "both": [1, 7], "q": 0}]}


def test_sub_pipeline_outputs_that_are_missing_or_grow() -> None:
    grow = step(name="g")(lambda item: {"n": Append(2)})
    fields = {"n": Append}
    before = give(n=Append(1))
    inner = Pipeline("i", [grow], fields=fields)
    _, log = run(Pipeline("p", [before, SubPipeline("s", inner, outputs=["n"])]))
    assert log.fields()["n"] == [1, 2]
    result, _ = run(Pipeline("p", [SubPipeline("s", give(a=1), outputs=["b"])]))
    assert "ended without its output 'b' (it set: a)" in (result.error or "")


def test_context_repeats_its_seed_and_key_over_attempts() -> None:
    seen: list[Any] = []

    @step
    def ask(item: Any, ctx: Any) -> None:
        seen.append((ctx.seed, ctx.idempotency_key, ctx.item_id, ctx.root_id, str(ctx.position)))
        ctx.logger.info("hello")
        if ctx.attempt == 0:
            raise ValueError("again")

    pipeline = Pipeline("p", [ask])
    _, log = run(pipeline)
    rerun(pipeline, log)
    assert seen[0] == seen[1]
    assert seen[0][2:] == ("5", "5", "ask[0] (leaf in p)")
    run(Pipeline("p", [ask], seed=1))
    assert seen[2][0] != seen[0][0]
    assert seen[2][1] == seen[0][1]


def test_seeds_differ_by_item_and_position() -> None:
    seeds: list[int] = []

    @step
    async def ask(item: Any, ctx: Any) -> None:
        seeds.append(ctx.seed)

    loop = Loop("l", ask, until=lambda item: False, max_rounds=3)
    fan = MapReduce("m", split=lambda item: [{}] * 3, each=loop, reduce=lambda r: None)
    run(Pipeline("p", [fan]))
    assert len(set(seeds)) == 9


def test_a_class_is_set_up_once_and_closed() -> None:
    events: list[str] = []

    @step
    class Model:
        def __init__(self, name: str) -> None:
            events.append(f"load {name}")

        async def __call__(self, item: Any, ctx: Any) -> dict[str, Any]:
            return {"at": ctx.position.step_index}

        def close(self) -> None:
            events.append("close")

    pipeline = Pipeline("p", [Model("a"), Model("b").named("second")])
    _, log = run(pipeline)
    assert log.fields() == {"at": 1}
    assert events == ["load a", "load b", "close", "close"]


def many(pipeline: Pipeline, count: int) -> Counter[str]:
    async def main() -> Counter[str]:
        log = ListLog()
        executor = Executor(pipeline, ListSink(log), run_id="r", blobs=log)
        await executor.start()
        results = await asyncio.gather(
            *(executor.run(RootTask(str(i), {"i": i})) for i in range(count))
        )
        await executor.close()
        return Counter(result.status for result in results)

    return asyncio.run(main())


def test_max_in_flight_bounds_calls_and_parents_hold_no_permit() -> None:
    running = 0
    most = 0

    @step(max_in_flight=2)
    async def each(item: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    fan = MapReduce("m", split=lambda item: [{}] * 5, each=each, reduce=lambda r: None)
    assert many(Pipeline("p", [fan]), 10) == {"completed": 10}
    assert most == 2


def test_plain_functions_run_beside_each_other() -> None:
    barrier = threading.Barrier(3, timeout=30)

    @step
    def wait(item: Any) -> None:
        barrier.wait()

    assert many(Pipeline("p", [wait]), 3) == {"completed": 3}


def test_context_variables_reach_plain_functions() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def main() -> ListLog:
        variable.set("here")
        log = ListLog()
        await run_once(Pipeline("p", step(name="a")(lambda item: {"v": variable.get()})), log, {})
        return log

    assert asyncio.run(main()).fields() == {"v": "here"}


def test_batches_are_shared_and_answered_one_by_one() -> None:
    sizes: list[int] = []

    @step(batch_size=4, max_wait_ms=5)
    def batch(items: Any) -> Any:
        sizes.append(len(items))
        return [Filtered("odd") if item["i"] % 2 else {"i2": item["i"]} for item in items]

    assert many(Pipeline("p", [batch]), 10) == {"completed": 5, "filtered": 5}
    assert sum(sizes) == 10
    assert max(sizes) == 4


@pytest.mark.parametrize("result", [[], {"x": 1}, None])
def test_a_batch_of_another_length_fails(result: Any) -> None:
    batch = step(name="b", batch_size=2, max_wait_ms=1)(lambda items: result)
    assert many(Pipeline("p", [batch]), 2) == {"failed": 2}


def test_coroutines_from_plain_functions_are_refused() -> None:
    async def inner() -> None: ...

    result, _ = run(Pipeline("p", step(name="a")(lambda item: inner())))
    assert "returned a coroutine; return a dict" in (result.error or "")


def test_an_edited_source_row_is_noticed_and_the_recorded_one_used() -> None:
    broken = [True]
    seen: list[int] = []

    @step
    def read(item: Any) -> None:
        seen.append(item["q"])
        if broken:
            raise ValueError(broken.pop())

    pipeline = Pipeline("p", [read])
    _, log = run(pipeline, {"q": 1})

    async def again() -> list[str]:
        executor = Executor(pipeline, ListSink(log), run_id="r", blobs=log)
        await executor.start()
        await executor.run(RootTask("5", {"q": 2, "new": 3}, log.history()))
        notices = executor.notices
        await executor.close()
        return notices

    (notice,) = asyncio.run(again())
    assert "changed since it was recorded (new, q); the recorded inputs are used" in notice
    assert seen == [1, 1]


def test_branches_see_the_item_as_of_the_fan_out() -> None:
    a = Sequence("sa", [give(x=1), step(name="see")(lambda item: {"saw": [item["x"], item["q"]]})])
    b = step(name="b")(lambda item: {"saw": "x" in item})
    log = ListLog()
    asyncio.run(run_once(Pipeline("p", [Branch("br", {"a": a, "b": b})]), log, {"q": 5}))
    assert log.fields()["a"]["saw"] == [1, 5]
    assert log.fields()["b"]["saw"] is False
