"""Argument tuples for functions: drawn by what the parameters mean, and found by trying.

A *plan* gives the kind of every argument: ``"sentence width"``, ``"sample n:count"``. Plans come
from a profile, where there is one. Otherwise the names, defaults and number of the parameters
suggest plans, all of them are tried in the sandbox, and those that are accepted are kept. From
plans, calls are drawn; from calls that were of use, others are made by small changes.

Everything is a function of the ``random.Random`` that is handed in.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Sequence
from typing import Any

from jobs import values
from jobs.mutation import mutate
from jobs.profiles import profile
from jobs.stdlib_functions import Description, Parameter, StdlibFunction

MAX_TRIALS = 60
MAX_ARGUMENT_CHARS = 160
_MAX_POSITIONAL = 4

# Tried for a parameter of which nothing is known, most telling first.
_ANY_KIND = (
    "str",
    "int",
    "float",
    "list_int",
    "bytes",
    "list_str",
    "char",
    "dict",
    "pairs",
    "bool",
)
_BY_NAME = {
    "text": "sentence", "string": "str", "s": "str", "str": "str", "word": "word", "line": "str",
    "lines": "lines", "body": "str", "doc": "text", "sep": "sep", "char": "char", "chr": "char",
    "c": "char", "unichr": "char", "chars": "letter", "prefix": "letter", "suffix": "letter",
    "sub": "letter", "old": "letter", "new": "fill", "fillchar": "fill", "width": "width",
    "n": "count", "k": "count", "i": "small", "x": "number", "y": "number", "z": "number",
    "a": "number", "b": "number", "number": "number", "data": "sample", "iterable": "list_int",
    "seq": "list_any", "items": "list_any", "heap": "sorted", "key": "word", "url": "url",
    "uri": "url", "path": "path", "p": "path", "pattern": "regex", "pat": "glob", "name": "file",
    "encoding": "encoding", "errors": "errors", "address": "ip", "host": "host", "query": "query",
    "year": "year", "month": "month", "day": "day", "buffer": "bytes", "bytes": "bytes",
    "format": "struct", "value": "number", "start": "nat", "end": "width", "stop": "width",
    "count": "count", "maxsplit": "count", "tabsize": "count", "code": "char", "node": "literal",
}  # fmt: skip
_RECEIVER = {
    "str": "str", "bytes": "bytes", "int": "int", "float": "float", "complex": "complex",
    "list": "list_any", "tuple": "list_any", "dict": "dict", "set": "set_int",
}  # fmt: skip
# Receivers that no literal has: built from one that has.
_BUILD = {"tuple": tuple}


def known_plans(function: StdlibFunction) -> tuple[str, ...] | None:
    """The plans of the function's profile, or None if it has to be tried out."""
    return profile(function.key)


def trial_plans(
    function: StdlibFunction, description: Description, rng: random.Random
) -> tuple[str, ...]:
    """Plans that might be accepted, at most ``MAX_TRIALS``, the likeliest first."""
    required, optional = _positional(description.parameters)
    counts = [required]
    if optional:
        counts.append(required + 1)
    if not description.known_arity:
        counts += [required + 1, required + 2]
    names = [p.name for p in description.parameters if p.kind in {"positional", "*args"}]
    plans: dict[str, None] = {}
    for count in counts:
        if not 1 <= count <= _MAX_POSITIONAL:
            continue
        choices = [_choices(function, names, position) for position in range(count)]
        plans[" ".join(choice[0] for choice in choices)] = None
        for kind in _ANY_KIND:  # all of one kind: what operators and comparisons ask for
            plans[
                " ".join([choices[0][0] if function.is_method else kind, *[kind] * (count - 1)])
            ] = None
        for _ in range(MAX_TRIALS // len(counts)):
            plans[" ".join(rng.choice(choice) for choice in choices)] = None
    return tuple(plans)[:MAX_TRIALS]


def draw(function: StdlibFunction, plan: str, rng: random.Random) -> dict[str, Any]:
    """One call by ``plan``: ``{"args": [text, ...], "kwargs": {name: text}}``."""
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for part in plan.split():
        name, colon, kind = part.partition(":")
        text = repr(_fitting(function, len(args), values.make(kind if colon else name, rng)))
        if colon:
            kwargs[name] = text
        else:
            args.append(text)
    return {"args": args, "kwargs": kwargs}


def draw_many(
    function: StdlibFunction,
    plans: Sequence[str],
    count: int,
    rng: random.Random,
    *,
    tried: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Up to ``count`` different calls that are not in ``tried``, the plans taken in turn."""
    seen = set(tried)
    calls: list[dict[str, Any]] = []
    for attempt in range(count * 4):
        if not plans or len(calls) == count:
            break
        call = draw(function, plans[attempt % len(plans)], rng)
        if _is_new(call, seen):
            calls.append(call)
    return calls


def mutate_many(
    function: StdlibFunction,
    parents: Sequence[dict[str, Any]],
    count: int,
    rng: random.Random,
    *,
    tried: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Up to ``count`` different calls that differ from a parent in one argument, and are new."""
    seen = {*tried, *map(call_id, parents)}
    calls: list[dict[str, Any]] = []
    for attempt in range(count * 6):
        if not parents or len(calls) == count:
            break
        call = _mutated(function, parents[attempt % len(parents)], rng)
        if _is_new(call, seen):
            calls.append(call)
    return calls


def call_id(call: dict[str, Any]) -> str:
    """What tells one call of a function from another."""
    named = [f"{name}={text}" for name, text in call["kwargs"].items()]
    return ", ".join([*call["args"], *named])


def _is_new(call: dict[str, Any], seen: set[str]) -> bool:
    name = call_id(call)
    if name in seen or len(name) > MAX_ARGUMENT_CHARS:
        return False
    seen.add(name)
    return True


def _mutated(
    function: StdlibFunction, parent: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    args, kwargs = list(parent["args"]), dict(parent["kwargs"])
    at = rng.randrange(len(args) + len(kwargs))
    if at < len(args):
        changed = mutate(ast.literal_eval(args[at]), rng)
        args[at] = repr(_fitting(function, at, changed))
    else:
        name = list(kwargs)[at - len(args)]
        kwargs[name] = repr(mutate(ast.literal_eval(kwargs[name]), rng))
    return {"args": args, "kwargs": kwargs}


def _fitting(function: StdlibFunction, position: int, value: Any) -> Any:
    owner = function.qualname.partition(".")[0]
    if function.is_method and position == 0 and owner in _BUILD:
        return _BUILD[owner](value)
    return value


def _positional(parameters: Sequence[Parameter]) -> tuple[int, int]:
    required = sum(p.required and p.kind == "positional" for p in parameters)
    variadic = any(p.kind == "*args" for p in parameters)
    optional = sum(not p.required and p.kind == "positional" for p in parameters)
    if variadic and not required:
        return 1, 2
    return required or 1, optional + variadic


def _choices(function: StdlibFunction, names: Sequence[str], position: int) -> tuple[str, ...]:
    owner, dot, _ = function.qualname.partition(".")
    if position == 0 and function.is_method and dot:
        return (_RECEIVER.get(owner, "str"),)
    # C functions may leave the receiver out of what they say of themselves.
    shift = 1 if function.is_method and names[:1] not in (["self"], ["x"]) else 0
    name = names[position - shift] if 0 <= position - shift < len(names) else ""
    first = _BY_NAME.get(name.strip("_").lower())
    same = _RECEIVER.get(owner) if function.is_method else None
    ordered = [kind for kind in (first, same) if kind]
    return tuple(dict.fromkeys([*ordered, *_ANY_KIND]))
