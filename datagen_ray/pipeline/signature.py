"""How a callable of a user wants to be called, read off its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from datagen_ray.errors import PipelineError

ANY_NUMBER = 99
"""The number of positional arguments of a callable with ``*args``."""


class Shape(NamedTuple):
    """``positional`` counts what it needs beside ``ctx``; ``odd`` names what nobody passes it."""

    is_async: bool
    takes_ctx: bool
    positional: int
    odd: str | None = None


def shape_of(function: Callable[..., Any]) -> Shape:
    """``ctx`` is passed where there is a parameter of that name."""
    # Of an instance it is the method of its class that says whether it is async.
    target = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(target)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Shape(is_async, False, 1)  # a builtin without a signature
    takes_ctx = False
    positional = 0
    odd: str | None = None
    for parameter in parameters:
        if parameter.name == "ctx" and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes_ctx = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional = ANY_NUMBER
        elif parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            odd = odd or parameter.name
        else:
            positional += 1
    return Shape(is_async, takes_ctx, positional, odd)


def check_takes(function: Callable[..., Any], where: str, forms: tuple[str, ...]) -> None:
    """Refuse a callable that none of the ``forms``, such as ``"item, round"``, would call.

    The forms are in order of length; any of them may have ``ctx`` added.
    """
    shape = shape_of(function)
    lengths = [len(form.split(", ")) for form in forms]
    fits = shape.positional in lengths or shape.positional >= ANY_NUMBER
    if fits and shape.odd is None:
        return
    shown = " or ".join(f"({form})" for form in forms)
    trouble = (
        f"needs the keyword argument {shape.odd!r}"
        if shape.odd is not None
        else f"takes {shape.positional} arguments beside ctx"
    )
    raise PipelineError(f"{where} {trouble}; it is called with {shown}, and ctx where it takes it")
