"""How a stream ends, as the walks of this layer tell each other. User code sees none of it."""

from __future__ import annotations

from typing import NamedTuple

from datagen_ray.errors import (
    InternalError,
    RunSupersededError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.log.events import DatagenEvent, DatagenStreamPosition
from datagen_ray.pipeline.failures import FailureDetails


class Drained(Exception):
    """The root stops between two steps, as its executor is to end; all that it did is durable."""


NOT_THE_ITEMS_FAULT = (
    Drained,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
    RunSupersededError,
    InternalError,
)
"""Never recorded as a failure of the item: it goes up to whoever holds the writer.

User code may raise the same types, of a log of its own; ``runner`` makes those failures of the
item. What comes out of user code but is trouble of *this* log is wrapped in :class:`OwnTrouble`.
"""


SELF_CANCELLED = "CancelledError: a step cancelled the task that it runs in"
"""Why a root failed whose task was cancelled though nobody outside of it did that."""


class OwnTrouble(Exception):
    """This log could not be read on behalf of user code; the cause says why."""


class StreamFiltered(Exception):
    """The stream ends here as filtered."""

    def __init__(self, position: DatagenStreamPosition, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason


class StreamFailed(Exception):
    """The stream stops here; ``recorded`` where the FAILED row is in a sub-item's stream."""

    def __init__(
        self, position: DatagenStreamPosition, details: FailureDetails, *, recorded: bool = False
    ) -> None:
        super().__init__(position, details)
        self.position = position
        self.details = details
        self.recorded = recorded


class Ending(NamedTuple):
    """How a walk ended: ``terminal`` is its TERMINAL row, None where the item stays running."""

    terminal: DatagenEvent | None
    details: FailureDetails | None
