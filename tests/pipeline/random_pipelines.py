"""Random pipelines of all kinds, whose steps are functions of what they see.

A *world* stands for all that is outside the log: it counts the calls of user code, fails the first
calls of some steps, and, where asked to, answers predicates at random.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

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
from datagen_ray.pipeline.results import Append, Filtered, Permanent
from datagen_ray.pipeline.steps import Node, step

SET_FIELDS = ("s0", "s1", "s2", "s3")
APPEND_FIELDS = ("a0", "a1")


class World:
    def __init__(self, seed: int, randomness: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.randomness = randomness
        self.calls: list[tuple[str, str, str]] = []
        self.failed: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, ctx: Any) -> None:
        self.calls.append((kind, ctx.item_id, str(ctx.position)))

    def number(self, item: Mapping[str, Any], ctx: Any, salt: str) -> int:
        """A number that depends on all of the item, or on nothing at all."""
        if self.randomness and self.rng.random() < self.randomness:
            return self.rng.getrandbits(30)
        return _hash(item, ctx, salt)


def _hash(item: Mapping[str, Any], ctx: Any, salt: str) -> int:
    text = repr(sorted((name, item[name]) for name in item)) + f"{ctx.seed} {ctx.item_id} {salt}"
    return zlib.crc32(text.encode())


class Maker:
    """Makes one pipeline from one seed."""

    def __init__(self, seed: int, world: Callable[[], World]) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.count = 0

    def pipeline(self) -> Pipeline:
        depth = self.rng.choice((3, 3, 4))
        body = (
            self.sequence(depth, sub=False) if self.rng.random() < 0.8 else self.node(depth, False)
        )
        return Pipeline("top", body, fields=dict.fromkeys(APPEND_FIELDS, Append), seed=7)

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def sequence(self, depth: int, sub: bool) -> Node:
        name = self.name("seq")
        return Sequence(name, [self.node(depth - 1, sub) for _ in range(self.rng.randint(1, 4))])

    def node(self, depth: int, sub: bool) -> Node:
        if depth <= 0 or self.rng.random() < 0.12:
            return self.leaf(sub)
        make = self.rng.choice(
            (
                self.sequence,
                self.loop,
                self.loop,
                self.map_reduce,
                self.branch,
                self.conditional,
                self.conditional,
                self.router,
                self.sub_pipeline,
            )
        )
        return make(depth, sub)

    def trouble(self, name: str, sub: bool, ctx: Any, number: int) -> None:
        """Now and then what user code does instead of returning."""
        world = self.world()
        if number % 47 == 0:
            raise Filtered(f"{name} does not want it")
        # Failures that pass would make "dropped" depend on how often a step was called.
        if number % 17 == 1 and not sub:
            key = (ctx.item_id, str(ctx.position))
            if world.failed[key] < 1 + number % 2:
                world.failed[key] += 1
                raise ValueError(f"{name} fails for now")
        if number % 31 == 2 and (sub or number % 5 == 0):
            raise Permanent(f"{name} fails for good")

    def leaf(self, sub: bool) -> Node:
        name = self.name("leaf")
        grows = self.rng.random() < 0.3
        fields = self.rng.sample(APPEND_FIELDS if grows else SET_FIELDS, self.rng.randint(0, 2))

        def body(item: Any, ctx: Any) -> Any:
            self.world().note("leaf", ctx)
            number = _hash(item, ctx, name)
            self.trouble(name, sub, ctx, number)
            values = {field: (number >> i) % 50 for i, field in enumerate(fields)}
            if not values:
                return None
            return {f: Append([v]) if grows else {"v": v} for f, v in values.items()}

        async def async_body(item: Any, ctx: Any) -> Any:
            return body(item, ctx)

        return step(name=name)(body if self.rng.random() < 0.15 else async_body)

    def decide(self, name: str, sub: bool) -> Callable[[Any, Any], int]:
        def number(item: Any, ctx: Any) -> int:
            self.world().note("choice", ctx)
            self.trouble(name, sub, ctx, _hash(item, ctx, name + "!"))
            return self.world().number(item, ctx, name)

        return number

    def loop(self, depth: int, sub: bool) -> Node:
        name = self.name("loop")
        decide = self.decide(name, sub)

        def until(item: Any, round: int, ctx: Any) -> bool:  # noqa: A002
            return decide(item, ctx) % 4 == 0

        # Frames that are entered again are where positions go wrong most easily.
        make = self.rng.choice((self.node, self.sequence, self.loop, self.conditional))
        body = make(depth - 1, sub) if depth > 1 else self.node(depth - 1, sub)
        max_rounds = 0 if self.rng.random() < 0.05 else self.rng.randint(1, 4)
        check_first = self.rng.random() < 0.2
        return Loop(name, body, until=until, max_rounds=max_rounds, check_first=check_first)

    def map_reduce(self, depth: int, sub: bool) -> Node:
        name = self.name("map")
        decide = self.decide(name, sub)
        policy = self.rng.choice(("fail", "drop", "drop", "keep"))

        def split(item: Any, ctx: Any) -> Any:
            self.world().note("split", ctx)
            number = decide(item, ctx)
            return [{"part": [number % 7, i]} for i in range(number % 4)]

        async def async_split(item: Any, ctx: Any) -> Any:
            return split(item, ctx)

        return MapReduce(
            name,
            split=split if self.rng.random() < 0.15 else async_split,
            each=self.node(depth - 1, sub or policy != "fail"),
            reduce=self.reducer(name, sub),
            on_failure=policy,
        )

    def reducer(self, name: str, sub: bool) -> Callable[..., Any]:
        async def reduce(item: Any, results: Any, ctx: Any) -> Any:
            self.world().note("reduce", ctx)
            seen = [
                [r.item_id, r.branch, r.status, r.dropped, r.reason, sorted(r.items())]
                for r in results
            ]
            number = zlib.crc32(repr(seen).encode())
            self.trouble(name, sub, ctx, _hash(item, ctx, f"{name} {number}"))
            return {f"r_{name}": seen}

        return reduce

    def branch(self, depth: int, sub: bool) -> Node:
        name = self.name("branch")
        policy = self.rng.choice(("fail", "drop", "keep"))
        branches = {
            f"{name}_{i}": self.node(depth - 1, sub or policy != "fail")
            for i in range(self.rng.randint(1, 3))
        }
        reduce = self.reducer(name, sub) if self.rng.random() < 0.5 else None
        return Branch(name, branches, reduce=reduce, on_failure=policy)

    def conditional(self, depth: int, sub: bool) -> Node:
        name = self.name("cond")
        decide = self.decide(name, sub)

        async def when(item: Any, ctx: Any) -> bool:
            return decide(item, ctx) % 2 == 0

        otherwise = self.node(depth - 1, sub) if self.rng.random() < 0.4 else None
        return Conditional(name, when=when, then=self.node(depth - 1, sub), otherwise=otherwise)

    def router(self, depth: int, sub: bool) -> Node:
        name = self.name("router")
        decide = self.decide(name, sub)

        def key(item: Any, ctx: Any) -> int:
            return decide(item, ctx) % 3

        routes = {i: self.node(depth - 1, sub) for i in range(self.rng.randint(1, 3))}
        default = self.node(depth - 1, sub) if len(routes) < 3 else None
        return Router(name, key=key, routes=routes, default=default)

    def sub_pipeline(self, depth: int, sub: bool) -> Node:
        name = self.name("sub")
        body = self.node(depth - 1, sub)
        set_output = step(name=self.name("leaf"))(lambda item: {"out": [name]})
        inner = Pipeline(name, [body, set_output], fields=dict.fromkeys(APPEND_FIELDS, Append))
        return SubPipeline(name, inner, outputs=["out", "a0"])
