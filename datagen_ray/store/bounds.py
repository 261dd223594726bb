"""Which numbers the options of a store may be; looked at before anything else is."""

from __future__ import annotations

from typing import Any

from datagen_ray.errors import ConfigError

LONGEST_S = 100 * 365.25 * 24 * 3600.0
"""A hundred years. Longer times overflow what threads and dates can hold."""


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raise ConfigError, which names the option, unless it is a whole number of at least that."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def check_seconds(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Raise ConfigError, which names the option, unless it is a time that can be waited for."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value <= LONGEST_S or (value == 0 and not above_zero)):
        return
    least = "greater than 0" if above_zero else "0 or more"
    raise ConfigError(f"{name} is {value!r}; it must be {least} seconds, at most {LONGEST_S:.0f}")
