"""Counts what steps really did, outside the log, for tests that kill a run.

With ``DATAGEN_RAY_COUNT_DIR`` set, every step of the job appends one line to a file of its process
in that folder before it does anything: item id, position, attempt of the item, parted by tabs.
A step whose completion is in the log at attempt *a* must have no line with a later attempt.
"""

from __future__ import annotations

import os
from typing import Any

COUNT_DIR = "DATAGEN_RAY_COUNT_DIR"


def count(ctx: Any) -> None:
    """Note that the step of ``ctx`` runs. Does nothing unless the variable is set."""
    folder = os.environ.get(COUNT_DIR)
    if not folder:
        return
    line = f"{ctx.item_id}\t{position_text(ctx.position)}\t{ctx.attempt}\n"
    path = os.path.join(folder, f"{os.getpid()}.log")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())  # one write: threads and a kill cannot tear the line
    finally:
        os.close(handle)


def position_text(position: Any) -> str:
    """A position as text; a STEP_COMPLETED row of the log gives the same text for the same step."""
    kind = getattr(position.step_kind, "value", position.step_kind)
    return "/".join(
        (
            str(position.enclosing_step or ""),
            str(position.selector_step or ""),
            f"{position.step_name}:{kind}:{position.step_index}",
        )
    )
