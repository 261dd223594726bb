"""What all walks of one executor share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from datagen_ray.clock import Clock
from datagen_ray.log.events import DatagenStreamPosition
from datagen_ray.pipeline.calls import UserCode
from datagen_ray.pipeline.failures import Redact
from datagen_ray.pipeline.item import Reader
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.sink import EventSink

Observe = Callable[[str, str, DatagenStreamPosition], None]
"""Told of a call of user code: ``step``, ``choice``, ``split`` or ``reduce``; item; position."""

_LOGGER = logging.getLogger("datagen_ray.pipeline")


@dataclass
class Environment:
    """The pipeline, where rows go, how user code is called, and who we are."""

    pipeline: Pipeline
    sink: EventSink
    code: UserCode
    reader: Reader
    run_id: str
    now: Clock
    redact: Redact
    base_seed: int
    observe: Observe
    notices: set[str] = field(default_factory=set)

    def notice(self, text: str) -> None:
        """Something that a person should know, said once a run."""
        if text not in self.notices:
            self.notices.add(text)
            _LOGGER.warning(text)
