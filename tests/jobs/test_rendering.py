"""What a prompt shows is what was run."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import pytest

from jobs import rendering
from jobs.stdlib_functions import StdlibFunction


def example(args: list[str], value: str, wrapper: str = "", **kwargs: str) -> dict[str, Any]:
    return {"args": args, "kwargs": kwargs, "value": value, "wrapper": wrapper, "type": "?"}


CASES = [
    (StdlibFunction("math", "gcd"), example(["4", "6"], "2"), "math.gcd(4, 6)"),
    (StdlibFunction("builtins", "len"), example(["'ab'"], "2"), "len('ab')"),
    (
        StdlibFunction("builtins", "str.upper", is_method=True),
        example(["'ab'"], "'AB'"),
        "'ab'.upper()",
    ),
    (
        StdlibFunction("builtins", "int.bit_length", is_method=True),
        example(["-5"], "3"),
        "(-5).bit_length()",
    ),
    (
        StdlibFunction("builtins", "int.from_bytes"),
        example(["b'a'", "'big'"], "97", signed="False"),
        "int.from_bytes(b'a', 'big', signed=False)",
    ),
    (
        StdlibFunction("itertools", "pairwise"),
        example(["'abc'"], "[('a', 'b'), ('b', 'c')]", "list"),
        "list(itertools.pairwise('abc'))",
    ),
]


@pytest.mark.parametrize(("function", "made", "source"), CASES, ids=lambda case: str(case)[:30])
def test_an_expression_has_the_value_of_its_example(
    function: StdlibFunction, made: dict[str, Any], source: str
) -> None:
    assert rendering.expression(function, made) == source
    names = {"__builtins__": __builtins__}
    if function.module != "builtins":
        names[function.module.partition(".")[0]] = importlib.import_module(function.module)
    assert eval(source, names) == ast.literal_eval(made["value"])


def test_the_direct_style_asks_about_a_program() -> None:
    function, made, source = CASES[0]
    prompt, completion = rendering.direct(function, made, hint="A number.")
    assert f"import math\nprint(repr({source}))" in prompt
    assert completion == "2"


def test_a_session_breaks_off_before_its_answer() -> None:
    function, made, source = CASES[0]
    others = [example(["9", "6"], "3"), example(["2", "8"], "2"), example(["5", "7"], "1")]
    prompt, completion = rendering.doctest(
        function, made, others, signature="gcd(*integers)", summary="Greatest common divisor."
    )
    assert prompt.endswith(
        "# math.gcd(*integers)\n# Greatest common divisor.\n>>> import math\n"
        f">>> math.gcd(9, 6)\n3\n>>> math.gcd(5, 7)\n1\n>>> {source}\n"
    )
    assert completion == "2"
