"""Fields of classes and arrays: declared by their types, named in the log by stable ids."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np
import pydantic
import pytest

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.codec import Codec
from datagen_ray.pipeline.nodes import SubPipeline
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.ready_codecs import codec_for, numpy_codec, stored
from datagen_ray.pipeline.results import Append
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import ListLog, rerun, run


class Mood(enum.Enum):
    CALM = "calm"


@stored("point")
@dataclass
class Point:
    x: int
    y: float | None = None


@stored("shape")
@dataclass(frozen=True)
class Shape:
    name: str
    points: list[Point]
    by_name: dict[str, Point] = field(default_factory=dict)
    pair: tuple[int, Point] | None = None
    mood: Mood = Mood.CALM


@stored("person")
class Person(pydantic.BaseModel):
    name: str
    home: str | None = None


SHAPE = Shape("s", [Point(1), Point(2, 0.5)], {"a": Point(3)}, (4, Point(5)))


class Made(TypedDict, total=False):
    shape: Shape
    person: Person
    array: np.ndarray
    grown: Append[Point]  # type: ignore[type-arg,valid-type]


@step
def make(item: Any) -> Made:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    return {"shape": SHAPE, "person": Person(name="Ada"), "array": array, "grown": Append(Point(9))}


def seen(log: ListLog | None = None) -> tuple[dict[str, Any], ListLog]:
    """What a later step sees, fresh or after a resume."""
    found: dict[str, Any] = {}

    @step
    def look(item: Any) -> None:
        found.update(item)
        if log is None:
            raise ValueError("later")

    pipeline = Pipeline("p", [make, look])
    if log is None:
        _, log = run(pipeline)
    else:
        assert rerun(pipeline, log).status == "completed"
    return found, log


def test_classes_and_arrays_are_read_as_they_were_set_also_after_a_resume() -> None:
    fresh, log = seen()
    resumed, _ = seen(log)
    for found in (fresh, resumed):
        assert found["shape"] == SHAPE
        assert found["person"] == Person(name="Ada")
        assert found["grown"] == [Point(9)]
        assert found["array"].dtype == np.int16
        assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_log_holds_ids_and_plain_values() -> None:
    _, log = seen()
    fields = {e.field_name: e for e in log.events if e.field_name}
    assert {name: e.field_type for name, e in fields.items()} == {
        "shape": "shape",
        "person": "person",
        "array": "numpy.ndarray",
        "grown": "point",
    }
    assert log.fields()["person"] == {"name": "Ada", "home": None}
    assert log.fields()["shape"]["points"] == [{"x": 1, "y": None}, {"x": 2, "y": 0.5}]


def test_older_versions_are_migrated_or_named() -> None:
    old = Pipeline("p", [make, step(name="end")(lambda item: 1 / 0)])
    _, log = run(old)

    @dataclass
    class Renamed:
        full_name: str

    def migrate(value: Any, version: int) -> Any:
        assert version == 1
        return {"full_name": value["name"]}

    found: list[Any] = []
    end = step(name="end")(lambda item: found.append(item["person"]))
    plain = step(name="make")(lambda item: None)
    with_hook = codec_for(Renamed, id="person", version=2, migrate=migrate)
    assert rerun(Pipeline("p", [plain, end], codecs=[with_hook]), log).error is None
    assert found == [Renamed("Ada")]


@pytest.mark.parametrize(
    ("codecs", "said"),
    [
        ([], "version 1 of the codec 'person', which is not registered"),
        ([codec_for(Person, id="person", version=2)], "give stored.* a migrate function"),
    ],
)
def test_a_codec_that_cannot_read_is_named(codecs: list[Codec], said: str) -> None:
    import re

    _, log = run(Pipeline("p", [make, step(name="end")(lambda item: 1 / 0)]))
    plain = step(name="make")(lambda item: None)
    end = step(name="end")(lambda item: {"x": str(item["person"])})
    error = rerun(Pipeline("p", [plain, end], codecs=codecs), log).error or ""
    assert re.search(said, error), error


@pytest.mark.parametrize(
    ("declared", "value", "said"),
    [
        (Point, {"x": 1}, "a Point is declared, not a dict"),
        (Person, Point(1), "a Person is declared, not a Point"),
        (np.ndarray, [1], "a numpy array is declared, not a list"),
        (np.ndarray, np.array([{}], dtype=object), "Object arrays cannot be saved"),
    ],
)
def test_a_value_of_another_type_is_refused_before_anything_is_written(
    declared: Any, value: Any, said: str
) -> None:
    bad = step(name="bad", fields={"f": declared})(lambda item: {"f": value})
    result, log = run(Pipeline("p", [bad]))
    assert said in (result.error or "")
    assert not [event for event in log.events if event.field_name == "f"]


def test_a_class_without_an_id_is_refused_with_the_cure() -> None:
    @dataclass
    class Bare:
        x: int

    class Sub(Person):
        extra: int = 0

    for cls, name in ((Bare, "bare"), (Sub, "sub")):
        with pytest.raises(PipelineError, match=f'put @stored."{name}". above the class'):
            Pipeline("p", [step(fields={"f": cls})(lambda item: None)])
    with pytest.raises(PipelineError, match="neither a dataclass nor a pydantic model"):
        stored("x")(int)


def test_annotations_that_declare_nothing_are_left_alone() -> None:
    def odd(item: Any) -> NoSuchName:  # type: ignore[name-defined]  # noqa: F821
        return {"x": 1}

    assert step(odd).options.fields == {}


class Inner(TypedDict):
    deep: int


class Plain(TypedDict):
    mood: Literal["good", "bad"]
    inner: Inner
    maybe: int | None


def test_annotations_of_plain_values_are_json() -> None:
    @step
    def plain(item: Any) -> list[Plain] | None:
        return None

    labels = {name: declared.label for name, declared in plain.options.fields.items()}
    assert labels == {}

    @step
    def one(item: Any) -> Plain | None:
        return {"mood": "good", "inner": {"deep": 1}, "maybe": None}

    assert {declared.label for declared in one.options.fields.values()} == {"json"}
    assert run(Pipeline("p", [one]))[0].error is None


def test_arrays_pass_a_sub_pipeline() -> None:
    inner = SubPipeline("sub", Pipeline("inner", [make]), outputs=["array"])
    got: list[Any] = []
    end = step(name="end")(lambda item: got.append(item["array"].sum()))
    assert run(Pipeline("p", [inner, end]))[0].error is None
    assert got == [15]
    assert numpy_codec().id == "numpy.ndarray"
