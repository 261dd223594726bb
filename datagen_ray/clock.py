"""The one place that reads the clock and draws ids; everything else is handed them.

Tests pass their own; ruff's banned-api list keeps raw calls out of the rest of the package.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TypeAlias

Clock: TypeAlias = Callable[[], datetime]
"""A zero-argument callable that returns an aware UTC datetime."""


def utc_now() -> datetime:
    """The wall clock, aware, in UTC."""
    return datetime.now(timezone.utc)  # noqa: TID251 - the one place


def new_run_id(now: Clock = utc_now, random_hex: Callable[[int], str] = secrets.token_hex) -> str:
    """A run id that sorts by time: ``20260131T120000-1a2b3c``."""
    return f"{now():%Y%m%dT%H%M%S}-{random_hex(3)}"
