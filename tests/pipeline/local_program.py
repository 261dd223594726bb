"""A pipeline of every kind that notes its calls in a file and can kill its own process.

Run as a program: ``local_program.py ROOT CALLS KILL_AT``; KILL_AT is the number of the call that
kills the process, 0 for none.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from datagen_ray.pipeline.local import LocalRunSummary, run_local
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
from datagen_ray.pipeline.steps import step

ROWS = [{"id": f"k/{i}", "q": i} for i in range(12)]


class Calls:
    """Counts the calls of this process and notes them where they outlive it."""

    def __init__(self, path: Path, kill_at: int) -> None:
        self.path = path
        self.kill_at = kill_at
        self.count = 0
        self.lock = threading.Lock()

    def note(self, ctx: Any) -> None:
        with self.lock:
            self.count += 1
            with self.path.open("a") as file:
                file.write(f"{ctx.item_id}\t{ctx.position}\n")
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def take(self) -> list[tuple[str, str]]:
        """What was noted since the last time."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        self.path.unlink()
        return [(line.split("\t")[0], line.split("\t")[1]) for line in lines]


def make_pipeline(calls: Calls) -> Pipeline:
    def leaf(name: str, make: Any) -> Any:
        def body(item: Any, ctx: Any) -> Any:
            calls.note(ctx)
            return make(item, ctx)

        return step(name=name)(body)

    def refuse(item: Any, ctx: Any) -> Any:
        if item["q"] % 5 == 4:
            raise Filtered("every fifth")

    def fail_some(item: Any, ctx: Any) -> Any:
        if item["part"] == 1:
            raise ValueError("never works")
        return {"v": item["part"] + item["q"], "image": bytes([item["q"]] * 3)}

    return Pipeline(
        "local",
        [
            leaf("seeded", lambda item, ctx: {"seed": ctx.seed, "image": bytes([item["q"]])}),
            Loop(
                "loop",
                Sequence("round", [leaf("grow", lambda item, ctx: {"n": Append(len(item["n"]))})]),
                until=lambda item: len(item["n"]) > item["q"] % 3,
                max_rounds=4,
            ),
            MapReduce(
                "parts",
                split=lambda item: [{"part": i} for i in range(3)],
                each=leaf("part", fail_some),
                reduce=lambda item, parts: {"sum": sum(p["v"] for p in parts if p.ok)},
                on_failure="drop",
            ),
            Branch(
                "both",
                {
                    "x": leaf("bx", lambda item, ctx: {"x": item["sum"]}),
                    "y": leaf("by", lambda item, ctx: {"y": ctx.seed}),
                },
            ),
            Conditional("gate", when=lambda item: item["q"] > 2, then=leaf("refuse", refuse)),
            Router(
                "route",
                key=lambda item: item["q"] % 2,
                routes={1: leaf("odd", lambda item, ctx: {"odd": True})},
                default=leaf("even", lambda item, ctx: {"size": len(item["image"].read())}),
            ),
            SubPipeline(
                "sub", leaf("out", lambda item, ctx: {"out": item["x"]["x"]}), outputs=["out"]
            ),
        ],
        fields={"n": Append},
    )


def run(root: Path, calls: Calls) -> LocalRunSummary:
    return run_local(
        make_pipeline(calls), ROWS, key="id", root=root, experiment="e", concurrency=4, fsync=False
    )


if __name__ == "__main__":
    summary = run(Path(sys.argv[1]), Calls(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(0 if summary.ok else 1)
