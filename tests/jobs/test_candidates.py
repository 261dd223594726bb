"""Calls are literals, new, and a function of the seed."""

from __future__ import annotations

import ast
import random

import pytest

from jobs import profiles, values
from jobs.candidates import (
    MAX_ARGUMENT_CHARS,
    MAX_TRIALS,
    call_id,
    draw_many,
    known_plans,
    mutate_many,
    trial_plans,
)
from jobs.mutation import mutate
from jobs.stdlib_functions import StdlibFunction, describe, discover

SHORTEN = StdlibFunction("textwrap", "shorten")


@pytest.mark.parametrize("kind", values.KINDS)
def test_every_kind_makes_exact_literals(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(50):
        value = values.make(kind, rng)
        assert ast.literal_eval(repr(value)) == value
        changed = mutate(value, rng)
        assert ast.literal_eval(repr(changed)) == changed
        assert type(changed) is type(value)


def test_every_profile_names_kinds_that_exist() -> None:
    for key, plans in profiles._PROFILES.items():
        for part in " ".join(plans).split():
            assert part.rpartition(":")[2] in values.KINDS, key


def test_an_exact_profile_goes_before_a_pattern() -> None:
    assert profiles.profile("base64.b64decode") == ("b64", "b64_text")
    assert profiles.profile("base64.b32encode") == ("bytes",)
    assert profiles.profile("no.such") is None


def test_the_same_seed_gives_the_same_calls() -> None:
    plans = known_plans(SHORTEN)
    assert plans is not None
    first, again, other = (draw_many(SHORTEN, plans, 10, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 10


def test_calls_are_new_and_short() -> None:
    plans = known_plans(SHORTEN) or ()
    first = draw_many(SHORTEN, plans, 10, random.Random(1))
    tried = [call_id(call) for call in first]
    more = mutate_many(SHORTEN, first, 10, random.Random(2), tried=tried)
    ids = tried + [call_id(call) for call in more]
    assert len(more) == 10
    assert len(set(ids)) == len(ids)
    assert max(map(len, ids)) <= MAX_ARGUMENT_CHARS


def test_a_mutation_changes_one_argument() -> None:
    parent = {"args": ["'some words here'", "12"], "kwargs": {"placeholder": "'*'"}}
    for call in mutate_many(SHORTEN, [parent], 8, random.Random(3)):
        differing = [a for a, b in zip(call["args"], parent["args"], strict=True) if a != b]
        assert len(differing) + (call["kwargs"] != parent["kwargs"]) == 1


def test_few_possible_calls_do_not_loop_for_ever() -> None:
    function = StdlibFunction("operator", "not_")
    assert len(draw_many(function, ["bool"], 10, random.Random(1))) == 2


def test_trials_are_bounded_and_stable() -> None:
    for function in discover():
        description = describe(function)
        trials = trial_plans(function, description, random.Random(7))
        assert len(trials) <= MAX_TRIALS
        assert trials == trial_plans(function, description, random.Random(7))


def test_a_method_is_tried_on_its_own_type() -> None:
    function = StdlibFunction("builtins", "tuple.count", is_method=True)
    call = draw_many(function, ["list_dense tiny"], 1, random.Random(1))[0]
    assert isinstance(ast.literal_eval(call["args"][0]), tuple)
