"""Examples as text: the call as a person writes it, and two styles of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.stdlib_functions import StdlibFunction

STYLES = ("direct", "doctest")
_SHOTS = 2


def expression(function: StdlibFunction, example: Mapping[str, Any]) -> str:
    """Python source whose value is the example's ``value``.

    Methods are called on their receiver, and what has no literal of its own (an iterator, a
    ``Fraction``) is wrapped so that it has: ``list(itertools.pairwise('abc'))``.
    """
    args = list(example["args"])
    named = [f"{name}={text}" for name, text in example["kwargs"].items()]
    if function.is_method:
        target = f"{_receiver(args.pop(0))}.{function.qualname.rpartition('.')[2]}"
    elif function.module == "builtins":
        target = function.qualname
    else:
        target = function.key
    call = f"{target}({', '.join([*args, *named])})"
    wrapper = example["wrapper"]
    return f"{wrapper}({call})" if wrapper else call


def imports(function: StdlibFunction) -> str:
    """The import line that the expression needs, or nothing."""
    return "" if function.module == "builtins" else f"import {function.module}"


def direct(function: StdlibFunction, example: Mapping[str, Any], *, hint: str) -> tuple[str, str]:
    """Prompt and completion of a bare question."""
    code = "\n".join(
        filter(None, [imports(function), f"print(repr({expression(function, example)}))"])
    )
    prompt = (
        "What does this Python program print?\n\n"
        f"```python\n{code}\n```\n\n"
        f"{hint} Give only the output.\n"
    )
    return prompt, example["value"]


def doctest(
    function: StdlibFunction,
    example: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    *,
    signature: str,
    summary: str,
) -> tuple[str, str]:
    """Prompt and completion of an interpreter session that shows some calls and breaks off."""
    shown = [other for other in others if other["value"] != example["value"]][:_SHOTS]
    about = f"{function.module}.{signature}" if function.module != "builtins" else signature
    lines = [f"# {about}"]
    if summary:
        lines.append(f"# {summary}")
    if imports(function):
        lines.append(f">>> {imports(function)}")
    for other in shown:
        lines += [f">>> {expression(function, other)}", other["value"]]
    lines.append(f">>> {expression(function, example)}")
    prompt = "Continue this interactive Python session with the next line of output.\n\n"
    return prompt + "\n".join(lines) + "\n", example["value"]


def _receiver(text: str) -> str:
    # A number needs parentheses: 5.bit_length() is no Python, and -5 .hex() binds the wrong way.
    return text if text[:1] in {"'", '"', "[", "{", "b", "("} else f"({text})"
