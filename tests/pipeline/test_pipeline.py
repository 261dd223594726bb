"""What is checked when a pipeline is built, and what it tells of itself."""

from __future__ import annotations

import json
import pickle
from typing import Any, TypedDict

import pytest
from ray import cloudpickle

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.codecs import Codec
from datagen_ray.pipeline.limits import RateLimit
from datagen_ray.pipeline.nodes import (
    Branch,
    Conditional,
    Loop,
    MapReduce,
    Router,
    Sequence,
    SubPipeline,
)
from datagen_ray.pipeline.pipeline import Pipeline, tree_changes
from datagen_ray.pipeline.results import Append
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.steps import Step, StepClass, step
from tests.pipeline.support import run


@step(retry=Retry(attempts=2, on=(TimeoutError,)), timeout_s=5, max_in_flight=3)
async def draft(item: Any, ctx: Any) -> dict[str, Any]:
    return {"draft": item["q"]}


@step
def check(item: Any) -> None: ...


@step
class Embed:
    def __init__(self, model: str = "m") -> None:
        self.model = model

    def __call__(self, item: Any) -> dict[str, Any]:
        return {"vec": self.model}


def named_only(item: Any, *, k: int) -> None: ...


class NoItem:
    def __call__(self) -> None: ...


def plain(item: Any) -> dict[str, Any]:
    return {"plain": 1}


def everything() -> Pipeline:
    return Pipeline(
        "qa",
        [
            draft,
            Loop("revise", Sequence("round", [check]), until=lambda item: True, max_rounds=3),
            MapReduce(
                "solve", split=lambda item: [{}], each=plain, reduce=lambda item, rs: {"n": len(rs)}
            ),
            Branch("render", {"chat": check.named("chat"), "text": check.named("text")}),
            Conditional(
                "long", when=lambda item: True, then=Embed("e5"), otherwise=draft.named("d2")
            ),
            Router("by", key=lambda item: 1, routes={1: Embed("x").named("E2")}),
            SubPipeline("polish", Pipeline("polish", [draft.named("d3")]), outputs=["draft"]),
        ],
        fields={"notes": Append},
    )


def test_tree_is_json_and_the_fingerprint_follows_it() -> None:
    tree = everything().tree()
    assert json.loads(json.dumps(tree)) == tree
    assert everything().fingerprint() == everything().fingerprint()
    assert len(everything().fingerprint()) == 64
    assert Pipeline("qa", [draft]).fingerprint() != Pipeline("qa", [check]).fingerprint()


def test_describe_shows_every_node() -> None:
    pipeline = everything()
    text = pipeline.describe()
    for node in pipeline.nodes():
        assert f"{node.name}: {node.kind.value}" in text
    assert "[then] Embed: leaf" in text
    assert "revise: loop (max_rounds=3)" in text


def test_a_pipeline_travels_by_cloudpickle() -> None:
    copy = pickle.loads(cloudpickle.dumps(everything()))
    assert copy.tree() == everything().tree()
    result, log = run(copy, {"q": "hi"})
    assert result.status == "completed"
    assert log.fields()["vec"] == "x"


def test_tree_changes_name_what_changed() -> None:
    old = Pipeline("p", [draft, Loop("l", check, until=lambda i: True, max_rounds=2)]).tree()
    new = Pipeline("p", [Loop("l", check, until=lambda i: True, max_rounds=3), Embed()]).tree()
    assert tree_changes(old, old) == []
    assert tree_changes(old, new) == [
        "removed: draft (leaf)",
        "added: Embed (leaf)",
        "changed: l: place p[1] -> p[0]",
        'changed: l: options {"max_rounds":2} -> {"max_rounds":3}',
    ]


def test_a_version_is_part_of_the_name() -> None:
    assert step(version=2)(plain).name == "plain@2"
    assert step(version="b")(plain).named("x").name == "x@b"


def test_a_step_can_be_called_as_the_function_it_is() -> None:
    assert isinstance(check, Step)
    assert isinstance(Embed, StepClass)
    assert step(plain)({"q": 1}) == {"plain": 1}


def bad_pipelines() -> list[tuple[str, Any]]:
    def loop(**options: Any) -> Any:
        return lambda: Loop("l", check, **{"until": lambda i: True, "max_rounds": 1, **options})

    def fan(**options: Any) -> Any:
        given = {"split": lambda i: [], "each": check, "reduce": lambda r: None, **options}
        return lambda: MapReduce("m", **given)

    return [
        ("two steps named 'check'", lambda: Pipeline("p", [check, step(name="check")(plain)])),
        ("same leaf 'check' twice", lambda: Pipeline("p", [check, Sequence("s", [check])])),
        ("two steps named 'p'", lambda: Pipeline("p", [check.named("p")])),
        ("'input' is reserved", lambda: check.named("input")),
        ("'input' is reserved", lambda: step(name="input")(plain)),
        ("name ''", lambda: check.named("")),
        ("name '  '", lambda: Sequence("  ", [check])),
        ("name 5", lambda: Pipeline(5, [check])),  # type: ignore[arg-type]
        ("lone surrogate", lambda: check.named("a\ud800")),
        ("is not a text", lambda: Branch("b", {"\ud800": check})),
        ("'@'", lambda: check.named("a@b")),
        ("'s' is empty", lambda: Sequence("s", [])),
        ("'p' is empty", lambda: Pipeline("p", [])),
        ("as a list", lambda: Sequence("s", "abc")),
        ("bare list", lambda: Pipeline("p", [[check]])),
        ("wrap it in SubPipeline", lambda: Pipeline("p", [Pipeline("q", [check])])),
        ("is no step", lambda: Pipeline("p", [3])),
        ("is no step", lambda: Pipeline("p", [int])),
        ("cannot be called", loop(until=3)),
        ("not a step", loop(until=check)),
        ("max_rounds", loop(max_rounds=-1)),
        ("check_first", loop(check_first=1)),
        ("max_rounds", loop(max_rounds=True)),
        ("on_failure='ignore'", fan(on_failure="ignore")),
        ("split=None", fan(split=None)),
        ("at least one branch", lambda: Branch("b", {})),
        ("branch name 3", lambda: Branch("b", {3: check})),  # type: ignore[dict-item]
        ("one route at least", lambda: Router("r", key=len, routes={})),
        ("outputs must be", lambda: SubPipeline("s", check, outputs="abc")),
        ("retry=3", lambda: step(retry=3)(plain)),  # type: ignore[call-overload]
        ("timeout_s must", lambda: step(timeout_s=0)(plain)),
        ("max_in_flight must", lambda: step(max_in_flight=0)(plain)),
        ("batch_size must", lambda: step(batch_size=1.5)(plain)),  # type: ignore[call-overload]
        ("max_wait_ms must", lambda: step(max_wait_ms=-1)(plain)),
        ("version must", lambda: step(version=1.5)(plain)),  # type: ignore[call-overload]
        ("num_gpus must", lambda: step(num_gpus=-1)(plain)),
        ("num_cpus must", lambda: step(num_cpus=True)(plain)),
        ("num_actors must", lambda: step(num_actors=0)(plain)),
        ("resources must", lambda: step(resources={"tpu": "1"})(plain)),  # type: ignore[call-overload]
        ("give CPUs and GPUs as", lambda: step(resources={"GPU": 1})(plain)),
        ("max_in_flight_run must", lambda: step(max_in_flight_run=0)(plain)),
        ("rate_limit=0", lambda: step(rate_limit=0)(plain)),
        ("calls=-1", lambda: RateLimit(-1)),
        ("burst=0", lambda: RateLimit(1, burst=0)),
        (
            "give both the same RateLimit",
            lambda: Pipeline(
                "p",
                [
                    step(name="a", rate_limit=RateLimit(1, name="service"))(plain),
                    step(name="b", rate_limit=RateLimit(2, name="service"))(plain),
                ],
            ),
        ),
        ("redact=", lambda: Pipeline("p", [plain], redact=1)),  # type: ignore[arg-type]
        ("generator", lambda: step(lambda item: (yield 1))),
        ("needs a __call__", lambda: step(type("NoCall", (), {}))),
        ("takes 0 arguments beside ctx; it is called with (item)", lambda: step(lambda: None)),
        ("step 'two' takes 2 arguments", lambda: step(name="two")(lambda item, other: None)),
        ("keyword argument 'k'", lambda: step(named_only)),
        ("step 'NoItem' takes 0", lambda: step(NoItem)),
        ("until takes 3", loop(until=lambda a, b, c: True)),
        ("called with (item) or (item, round)", loop(until=lambda: True)),
        ("reduce takes 0", fan(reduce=lambda ctx: None)),
        ("split takes 2", fan(split=lambda item, other: [])),
        ("at least one call", lambda: Retry(attempts=0)),
        ("exception classes", lambda: Retry(on=(3,))),  # type: ignore[arg-type]
        ("cannot be negative", lambda: Retry(wait_s=-1)),
        ("declared as", lambda: Pipeline("p", check, fields={"x": complex})),
        ("not a text", lambda: Pipeline("p", check, fields={3: int})),
        ("is a built-in", lambda: Codec("json", 1, str, lambda v, n: v)),
        ("seed must", lambda: Pipeline("p", check, seed=1.5)),  # type: ignore[arg-type]
        (
            "is int in pipeline 'p' and float in step 'a'",
            lambda: Pipeline("p", step(name="a", fields={"x": float})(plain), fields={"x": int}),
        ),
    ]


@pytest.mark.parametrize(("message", "build"), bad_pipelines())
def test_mistakes_are_found_when_building(message: str, build: Any) -> None:
    with pytest.raises(PipelineError) as raised:
        build()
    text = str(raised.value).replace("is empty or a built-in", "is a built-in")
    assert message in text
    assert "\n" not in text


def test_fields_may_come_from_a_typed_dict() -> None:
    class Draft(TypedDict):
        score: float
        tags: list[str]

    _, log = run(Pipeline("p", step(name="a", fields=Draft)(lambda i: {"score": 1, "tags": ["x"]})))
    kept = log.folded().fields
    assert (kept["score"].kind, kept["tags"].kind) == ("float", "json")


def test_defaults_and_rest_arguments_are_left_alone() -> None:
    steps = [
        step(name="a")(lambda item, bound=1: {"a": bound}),
        step(name="b")(lambda *items: {"b": len(items)}),
        Loop("l", step(name="c")(lambda item, **more: None), until=lambda *a: len(a) == 2,
             max_rounds=1),
    ]  # fmt: skip
    _, log = run(Pipeline("p", steps))
    assert log.fields() == {"a": 1, "b": 1}


def test_codecs_of_a_sub_pipeline_are_known_outside() -> None:
    codec = Codec("v", 1, encode=lambda v: v, decode=lambda v, n: v)
    inner = Pipeline("i", [plain], codecs=[codec])
    outer = Pipeline("p", [SubPipeline("s", inner, outputs=[])], codecs=[codec])
    assert outer.types.codecs == {"v": codec}
    other = Codec("v", 2, encode=lambda v: v, decode=lambda v, n: v)
    with pytest.raises(PipelineError, match="two codecs with the id 'v'"):
        Pipeline("p", [SubPipeline("s", inner, outputs=[])], codecs=[other])
