"""Small changes to values: what turns one call into its neighbours.

``mutate(value, rng)`` gives a value of the same type, near the given one and mostly different.
"""

from __future__ import annotations

import random
import string
from typing import Any


def mutate(value: Any, rng: random.Random) -> Any:
    """A small change to ``value``; what has no neighbours, such as ``None``, stays."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, value * 2, value // 2, -value, value + rng.randint(-9, 9))
        )
    if isinstance(value, float):
        return rng.choice(
            (-value, value / 2, value + 1, round(value * 1.5, 3), float(round(value)))
        )
    if isinstance(value, complex):
        return complex(mutate(value.real, rng), value.imag)
    if isinstance(value, str):
        return _mutate_text(value, rng)
    if isinstance(value, bytes):
        return _mutate_bytes(value, rng)
    if isinstance(value, list):
        return _mutate_list(value, rng)
    if isinstance(value, tuple):
        return tuple(_mutate_list(list(value), rng, resize=False))
    if isinstance(value, set):
        return value ^ {rng.randrange(16)} or {rng.randrange(16)}
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {k: mutate(v, rng) if k == key else v for k, v in value.items()}
    return value


def _mutate_text(text: str, rng: random.Random) -> str:
    if not text:
        return "a"
    at = rng.randrange(len(text))
    same_sort = string.digits if text[at].isdigit() else string.ascii_lowercase
    return rng.choice(
        (
            text[:at] + rng.choice(same_sort) + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text + text[at],
            text.swapcase(),
            text[::-1],
            text + " " + rng.choice(("and", "or")),
        )
    )


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"a"
    at = rng.randrange(len(data))
    changed = bytes([rng.choice(b"abcdefghijklmnopqrstuvwxyz0123456789")])
    return rng.choice(
        (data[:at] + changed + data[at + 1 :], data + data[at : at + 1], data[1:], data[::-1])
    )


def _mutate_list(values: list[Any], rng: random.Random, *, resize: bool = True) -> list[Any]:
    if not values:
        return values
    at = rng.randrange(len(values))
    changed = [mutate(v, rng) if i == at else v for i, v in enumerate(values)]
    if not resize:
        return changed
    shuffled = rng.sample(values, len(values))
    return rng.choice((changed, shuffled, [*values, values[at]], values[:at] + values[at + 1 :]))
