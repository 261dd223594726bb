"""What looking an item up gives: it never started, it was found, or its events are damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from datagen_ray.errors import ItemViolationError
from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.fold import FoldedDatagenItem, fold_datagen_events


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """The item has no ITEM_CREATED: process it from scratch."""

    def folded(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Found:
    """The item's current state: skip it when it has ended, resume it when it is running."""

    item: FoldedDatagenItem

    def folded(self) -> FoldedDatagenItem:
        return self.item


@dataclass(frozen=True, slots=True)
class Damaged:
    """The item's events cannot be folded. It did start, so it must not be run from scratch."""

    violation: ItemViolationError

    def folded(self) -> FoldedDatagenItem:
        raise self.violation


DatagenItemLookup: TypeAlias = NeverStarted | Found | Damaged
"""``.folded()`` is None for an item that never started; it raises for a damaged one."""


def look_up(events: Iterable[DatagenEvent]) -> DatagenItemLookup:
    """The lookup of the one item that all ``events`` belong to."""
    try:
        folded = fold_datagen_events(events)
    except ItemViolationError as error:
        return Damaged(error)
    return NeverStarted() if folded is None else Found(folded)
