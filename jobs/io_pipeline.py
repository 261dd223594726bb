"""The pipeline of the output-prediction job: from a function of the library to examples.

    describe_function     signature, parameters, what it says of itself
    make_candidates       which kinds of arguments it accepts; the first calls
    harden                up to three rounds, until there are enough different outputs:
      execute_calls         one sub-item a call, run twice in the sandbox; bad ones are filtered
      mutate_inputs         the next round's calls: small changes of those with rare outputs
    quality_gate          too few examples: the function is filtered; else a balanced choice
    by_output_type        how to ask for a number, a text, a truth value, a structure
    card                  a sub-item that grades the function and writes its metadata
    render                a sub-item for each prompt style

The steps do nothing but compute, so running one again does no harm, and all chance comes from
``ctx.seed``: the same seed and the same Python give the same rows, however often a run was killed.
"""

from __future__ import annotations

import platform
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import datagen_ray as dg
from jobs import rendering
from jobs.candidates import call_id, draw, draw_many, known_plans, mutate_many, trial_plans
from jobs.counting import count
from jobs.sandbox import Call, SandboxError, shared_sandbox
from jobs.stdlib_functions import Description, Parameter, StdlibFunction, describe

PIPELINE_NAME = "io_prediction"
FIRST_CALLS = 16
MORE_CALLS = 12
MAX_ROUNDS = 3
TARGET_DISTINCT = 8
MIN_EXAMPLES = 6
MIN_DISTINCT = 2
MAX_CHOSEN = 12
OTHER_HINT = "The output is a Python literal."
_MAX_PLANS = 6
# A sandbox that broke, for want of memory perhaps, is started anew; calls are not judged by that.
_AGAIN = dg.Retry(attempts=3, on=(SandboxError,), wait_s=0.2)
_FAMILIES = {
    "int": "number", "float": "number", "complex": "number", "str": "text", "bytes": "text",
    "bool": "truth",
}  # fmt: skip


def function_of(item: Mapping[str, Any]) -> StdlibFunction:
    """The function that the item is about."""
    return StdlibFunction(item["module"], item["qualname"], item["is_method"])


def row_of(function: StdlibFunction) -> dict[str, Any]:
    """The row of the source, that is the inputs of the root, for ``function``."""
    return {
        "function": function.key,
        "module": function.module,
        "qualname": function.qualname,
        "is_method": function.is_method,
    }


@dg.step
def describe_function(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    description = describe(function_of(item))
    return {
        "signature": description.signature,
        "summary": description.summary,
        "parameters": [asdict(parameter) for parameter in description.parameters],
        "known_arity": description.known_arity,
    }


@dg.step(retry=_AGAIN)
def make_candidates(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    function, rng = function_of(item), random.Random(ctx.seed)
    plans = known_plans(function)
    if plans is None:
        plans = _accepted_plans(function, _description(item), rng)
    calls = draw_many(function, plans, FIRST_CALLS, rng)
    if not calls:
        raise dg.Filtered("no arguments were found that it accepts")
    return {"plans": list(plans), "calls": calls, "tried": [call_id(call) for call in calls]}


def _accepted_plans(
    function: StdlibFunction, description: Description, rng: random.Random
) -> tuple[str, ...]:
    plans = trial_plans(function, description, rng)
    calls = [_call(function, draw(function, plan, rng)) for plan in plans]
    outcomes = shared_sandbox().probe(calls)
    accepted = [plan for plan, outcome in zip(plans, outcomes, strict=True) if outcome.ok]
    return tuple(accepted[:_MAX_PLANS])


def _description(item: Mapping[str, Any]) -> Description:
    return Description(
        signature=item["signature"],
        parameters=tuple(Parameter(**parameter) for parameter in item["parameters"]),
        summary=item["summary"],
        known_arity=item["known_arity"],
    )


def _call(function: StdlibFunction, call: Mapping[str, Any]) -> Call:
    return Call(function.module, function.qualname, tuple(call["args"]), dict(call["kwargs"]))


def pending_calls(item: Any) -> list[dict[str, Any]]:
    return [{"call": call} for call in item["calls"]]


@dg.step(retry=_AGAIN)
def run_call(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    outcome = shared_sandbox().run(_call(function_of(item), item["call"]))
    if not outcome.ok:
        raise dg.Filtered(f"{outcome.reason}: {outcome.detail}")
    return {
        "example": {
            "args": list(item["call"]["args"]),
            "kwargs": dict(item["call"]["kwargs"]),
            "value": outcome.text,
            "type": outcome.type,
            "wrapper": outcome.wrapper,
        }
    }


def collect_examples(item: Any, results: Sequence[Any], ctx: Any) -> dict[str, Any]:
    count(ctx)
    examples = list(item.get("examples", ()))
    rejected: Counter[str] = Counter()
    for result in results:
        if result.dropped:
            rejected[str(result.reason).partition(":")[0]] += 1
        else:
            examples.append({**result["example"], "item_id": str(result.item_id)})
    made = {
        "calls": len(results),
        "distinct": len({example["value"] for example in examples}),
        "rejected": dict(sorted(rejected.items())),
    }
    return {"examples": examples, "rounds": dg.Append(made)}


def has_enough(item: Mapping[str, Any]) -> bool:
    """Whether another round would add nothing that the job wants."""
    counts = Counter(example["value"] for example in item["examples"])
    if len(counts) >= TARGET_DISTINCT:
        return True
    # There are but two truth values: a handful of each is all that can be had.
    return set(counts) == {"True", "False"} and min(counts.values()) >= MIN_EXAMPLES // 2


@dg.step
def mutate_inputs(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    if has_enough(item):
        return {"calls": []}
    function, rng = function_of(item), random.Random(ctx.seed)
    counts = Counter(example["value"] for example in item["examples"])
    rarest_first = sorted(item["examples"], key=lambda example: counts[example["value"]])
    tried = list(item["tried"])
    calls = mutate_many(function, rarest_first[:MORE_CALLS], MORE_CALLS // 2, rng, tried=tried)
    tried += map(call_id, calls)
    calls += draw_many(function, item["plans"], MORE_CALLS - len(calls), rng, tried=tried)
    return {"calls": calls, "tried": [*item["tried"], *map(call_id, calls)]}


def harden_done(item: Any, round: int) -> bool:  # noqa: A002, ARG001 - the name that a loop test is given
    return has_enough(item) or not item["calls"]


def meets_the_mark(item: Any) -> bool:
    distinct = {example["value"] for example in item["examples"]}
    return len(item["examples"]) >= MIN_EXAMPLES and len(distinct) >= MIN_DISTINCT


@dg.step
def drop_function(item: Any, ctx: Any) -> None:
    count(ctx)
    distinct = len({example["value"] for example in item["examples"]})
    raise dg.Filtered(f"{len(item['examples'])} examples with {distinct} different outputs")


@dg.step
def choose_examples(item: Any, ctx: Any) -> dict[str, Any]:
    """Take outputs in turn, so that a common one does not crowd out the rest."""
    count(ctx)
    rng = random.Random(ctx.seed)
    by_value: dict[str, list[Any]] = {}
    for example in rng.sample(list(item["examples"]), len(item["examples"])):
        by_value.setdefault(example["value"], []).append(example)
    chosen: list[Any] = []
    while by_value and len(chosen) < MAX_CHOSEN:
        for value in list(by_value):
            chosen.append(by_value[value].pop())
            if not by_value[value]:
                del by_value[value]
    types = Counter(example["type"] for example in chosen)
    return {"chosen": chosen[:MAX_CHOSEN], "output_type": min(types, key=lambda t: (-types[t], t))}


def output_family(item: Any) -> str:
    return _FAMILIES.get(item["output_type"], "structure")


@dg.step
def ask_for_number(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    exact = " to the last digit" if item["output_type"] == "float" else ""
    return {"family": "number", "hint": f"The output is a number; write it{exact} as Python does."}


@dg.step
def ask_for_text(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    what = "bytes literal" if item["output_type"] == "bytes" else "string literal"
    return {"family": "text", "hint": f"The output is a {what}, with its quotes and escapes."}


@dg.step
def ask_for_truth(item: Any, ctx: Any) -> dict[str, Any]:  # noqa: ARG001 - the shape of a step
    count(ctx)
    return {"family": "truth", "hint": "The output is True or False."}


@dg.step
def ask_for_structure(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    return {"family": "structure", "hint": f"The output is a {item['output_type']} literal."}


@dg.step
def grade(item: Any, ctx: Any) -> dict[str, Any]:
    """How hard a function is to foresee: by how long its outputs are and how they vary."""
    count(ctx)
    chosen = item["chosen"]
    length = sum(len(example["value"]) for example in chosen) / len(chosen)
    distinct = len({example["value"] for example in chosen})
    level = "easy" if distinct <= 2 else "medium" if length < 24 else "hard"
    return {"level": level, "mean_output_chars": round(length, 2), "distinct_outputs": distinct}


@dg.step
def write_card(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    return {
        "card": {
            "function": item["function"],
            "signature": item["signature"],
            "summary": item["summary"],
            "family": item["family"],
            "level": item["level"],
            "mean_output_chars": item["mean_output_chars"],
            "distinct_outputs": item["distinct_outputs"],
            "rounds": len(item["rounds"]),
            "python": platform.python_version(),
        }
    }


@dg.step
def render_direct(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    function = function_of(item)
    return _rows(
        (example, rendering.direct(function, example, hint=_hint(item, example)))
        for example in item["chosen"]
    )


@dg.step
def render_doctest(item: Any, ctx: Any) -> dict[str, Any]:
    count(ctx)
    function, chosen, rng = function_of(item), list(item["chosen"]), random.Random(ctx.seed)
    rows = []
    for example in chosen:
        others = rng.sample([other for other in chosen if other is not example], len(chosen) - 1)
        text = rendering.doctest(
            function, example, others, signature=item["signature"], summary=item["summary"]
        )
        rows.append((example, text))
    return _rows(rows)


def _hint(item: Mapping[str, Any], example: Mapping[str, Any]) -> str:
    # The hint speaks of the usual type; an example of another type must not be misled by it.
    return item["hint"] if example["type"] == item["output_type"] else OTHER_HINT


def _rows(rendered: Any) -> dict[str, Any]:
    return {
        "rows": [
            {"prompt": prompt, "completion": completion, "item_id": example["item_id"]}
            for example, (prompt, completion) in rendered
        ]
    }


def make_pipeline(seed: int = 0) -> dg.Pipeline:
    """The pipeline; all that is drawn at random in it follows from ``seed``."""
    execute = dg.MapReduce(
        "execute_calls",
        split=pending_calls,
        each=run_call,
        reduce=collect_examples,
    )
    return dg.Pipeline(
        PIPELINE_NAME,
        [
            describe_function,
            make_candidates,
            dg.Loop(
                "harden",
                dg.Sequence("round", [execute, mutate_inputs]),
                until=harden_done,
                max_rounds=MAX_ROUNDS,
            ),
            dg.Conditional(
                "quality_gate", when=meets_the_mark, then=choose_examples, otherwise=drop_function
            ),
            dg.Router(
                "by_output_type",
                key=output_family,
                routes={"number": ask_for_number, "text": ask_for_text, "truth": ask_for_truth},
                default=ask_for_structure,
            ),
            dg.SubPipeline("card", dg.Sequence("make_card", [grade, write_card]), outputs=["card"]),
            dg.Branch("render", {"direct": render_direct, "doctest": render_doctest}),
        ],
        fields={"rounds": dg.Append},
        seed=seed,
    )


pipeline = make_pipeline()
