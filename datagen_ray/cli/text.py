"""Text from a log as it may be shown on a terminal, which takes some characters for commands."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import typer

_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, invisible marks of direction and form, lone surrogates, other ends of lines."""


def shown(text: str) -> str:
    r"""The text in one line, such characters as escapes: ``a\nb``. JSON needs none of this."""
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if unicodedata.category(each) in _UNSHOWN else each
        for each in text
    )


def echo_lines(lines: Iterable[str]) -> None:
    """Print each as one line."""
    typer.echo("\n".join(map(shown, lines)))
