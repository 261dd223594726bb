"""Threads switch sooner and cycles are looked for less while executors live, and then as before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from datagen_ray.pipeline.interpreter import COLLECT_AFTER, SWITCH_S, Interpreter
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import run


def settings() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


@pytest.fixture(autouse=True)
def settings_of_others() -> Iterator[None]:
    switch_s, thresholds = settings()
    yield
    sys.setswitchinterval(switch_s)
    gc.set_threshold(*thresholds)


def test_the_settings_hold_while_anybody_asks() -> None:
    before = settings()
    interpreter = Interpreter()
    interpreter.begin()
    interpreter.begin()
    interpreter.end()
    assert abs(sys.getswitchinterval() - min(before[0], SWITCH_S)) < 1e-9
    assert gc.get_threshold() == (max(before[1][0], COLLECT_AFTER), *before[1][1:])
    interpreter.end()
    assert settings() == before


def test_what_the_process_had_chosen_itself_is_left_alone() -> None:
    for chosen in ((0, 5, 5), (COLLECT_AFTER * 2, 20, 20)):
        sys.setswitchinterval(SWITCH_S / 10)
        gc.set_threshold(*chosen)
        before = settings()
        interpreter = Interpreter()
        interpreter.begin()
        assert settings() == before
        interpreter.end()
        assert settings() == before


def test_a_run_leaves_the_settings_as_they_were() -> None:
    before = settings()
    seen: list[tuple[float, tuple[int, int, int]]] = []
    run(Pipeline("p", [step(name="look")(lambda item: seen.append(settings()))]))
    assert seen[0][0] <= SWITCH_S + 1e-9
    assert seen[0][1][0] >= COLLECT_AFTER
    assert settings() == before
