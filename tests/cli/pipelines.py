"""Pipelines for the tests of the command line."""

from __future__ import annotations

from typing import Any

from datagen_ray.pipeline.nodes import MapReduce, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.steps import step


@step
def look(item: Any) -> dict[str, Any]:
    if item["n"] == 3:
        raise Filtered("three")
    return {"text": f"é {item['n']}", "log": Append("looked"), "half": item["n"] / 2}


@step
def check(item: Any) -> dict[str, Any]:
    if item["n"] == 4:
        raise ValueError("four is wrong")
    return {"mixed": item["n"] if item["n"] % 2 else str(item["n"]), "raw": b"\x00\x01"}


@step
def square(item: Any) -> dict[str, Any]:
    return {"y": item["x"] ** 2}


pipeline = Pipeline(
    "demo",
    Sequence(
        "main",
        [
            look,
            check,
            MapReduce(
                "each",
                split=lambda item: [{"x": 1}, {"x": 2}],
                each=square,
                reduce=lambda item, results: {"sum": sum(r["y"] for r in results)},
            ),
        ],
    ),
    fields={"raw": bytes},
)
