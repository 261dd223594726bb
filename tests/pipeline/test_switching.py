"""The switch interval is short while executors live, and then what it was."""

from __future__ import annotations

import sys

from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step
from datagen_ray.pipeline.switching import SWITCH_S, QuickTurns
from tests.pipeline.support import run


def test_the_interval_is_short_while_anybody_asks() -> None:
    before = sys.getswitchinterval()
    turns = QuickTurns()
    turns.begin()
    turns.begin()
    turns.end()
    assert abs(sys.getswitchinterval() - min(before, SWITCH_S)) < 1e-9
    turns.end()
    assert sys.getswitchinterval() == before


def test_a_run_leaves_the_interval_as_it_was() -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []
    run(Pipeline("p", [step(name="look")(lambda item: seen.append(sys.getswitchinterval()))]))
    assert seen[0] <= SWITCH_S + 1e-9
    assert sys.getswitchinterval() == before
