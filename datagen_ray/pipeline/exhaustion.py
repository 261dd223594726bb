"""When a root is left alone: after so many failures in one stream of its tree."""

from __future__ import annotations

from collections.abc import Sequence

from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.replay import RecordedStream

EXHAUSTED_AFTER = 9
"""After so many FAILED rows in one stream a root is left alone until it is asked for.

Three runs' worth where a run tries a root three times: whoever mends a step after the first run
finds that the second one goes on, and an item that nothing helps does not cost every later run.
"""


def exhausting_failures(root: RecordedStream, after: int) -> Sequence[DatagenEvent]:
    """The FAILED rows of the first stream that has ``after`` of them and could still run."""
    return next((failed for failed in root.active_failures() if len(failed) >= after), ())


def summary_of(failed: Sequence[DatagenEvent]) -> str:
    """One line about the failures of one stream."""
    last = failed[-1]
    message = (last.error_dump or "").partition("\n")[0]
    return (
        f"{len(failed)} failures in {last.item_id!r}, the last at {last.position}: "
        f"{last.error_type}: {message}"
    )
