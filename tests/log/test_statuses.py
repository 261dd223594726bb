"""Statuses computed from columns are those of the fold, also which items are damaged."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from datagen_ray import DatagenEvent, ItemViolationError, fold_datagen_events
from datagen_ray.log.fold import group_by_item
from datagen_ray.log.schema import DATAGEN_SCHEMA, decode_batch, encode_events
from datagen_ray.store.bulk import (
    OVERVIEW_COLUMNS,
    STATUS_COLUMNS,
    item_states,
    overview,
    root_statuses,
)
from tests.log.builders import completed, created, field_append, field_set, row, stored, terminal
from tests.log.test_fold import VIOLATIONS

SOUND = [
    created(1, "sound"),
    field_set(2, 1, "sound"),
    field_append(3, "x", "sound", field_name="log"),
    field_append(4, "y", "sound", field_name="log"),
    field_set(5, 2, "sound", field_type="other", codec_version=-1),
    completed(6, "sound"),
    row("FAILED", 7, "sound"),
    terminal(8, "sound"),
]


def table(events: list[DatagenEvent]) -> pa.Table:
    """The rows as they are stored; the encoder takes unknown words as they stand."""
    return pa.Table.from_batches([encode_events(events)], schema=DATAGEN_SCHEMA)


def violations(rows: pa.Table) -> Any:
    events = group_by_item(decode_batch(rows))

    def fold(item_ids: list[str]) -> dict[str, ItemViolationError]:
        found = {}
        for item_id in item_ids:
            try:
                fold_datagen_events(events[item_id])
            except ItemViolationError as error:
                found[item_id] = error
        return found

    return fold


@pytest.mark.parametrize(("events", "code", "_ids"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_what_the_fold_refuses_is_damaged_and_nothing_else_is(
    events: list[DatagenEvent], code: str, _ids: tuple[str, ...]
) -> None:
    rows = table([*SOUND, *events])
    states = item_states(rows.select(list(STATUS_COLUMNS)))
    ids = states.item_ids.to_pylist()
    assert {item_id for item_id, bad in zip(ids, states.damaged, strict=True) if bad} == {"5"}
    statuses = root_statuses(rows.select(list(STATUS_COLUMNS)), violations(rows))
    assert statuses.to_dict() == {"sound": "completed"}
    assert statuses.violations["5"].code == code
    found = overview(rows.select(list(OVERVIEW_COLUMNS)), violations(rows))
    assert (found.items, found.completed, found.failures) == (1, 1, 1)
    assert set(found.violations) == {"5"}


@pytest.mark.parametrize(
    "events",
    [
        [created(1), terminal(2)],
        [created(1), terminal(2, status="filtered")],
        [terminal(2), created(1)],
        [created(1), terminal(2), created(3)],
        [created(1), created(2), terminal(3)],
        [created(1), terminal(2), completed(3)],
        [created(7), completed(9)],
        [created(1), field_set(2, 1, codec_version=-1), field_set(3, 1, codec_version=-2)],
        [stored(created(1), status=None)],
    ],
)
def test_the_status_is_that_of_the_fold(events: list[DatagenEvent]) -> None:
    rows = table([*SOUND, *events])
    folded = fold_datagen_events(events)
    assert folded is not None
    statuses = root_statuses(rows.select(list(STATUS_COLUMNS)), violations(rows))
    assert statuses.to_dict() == {"sound": "completed", "5": folded.status}
    assert not statuses.violations


def test_what_never_started_has_no_status() -> None:
    rows = table([completed(1), row("FAILED", 2), *SOUND])
    statuses = root_statuses(rows.select(list(STATUS_COLUMNS)), violations(rows))
    assert list(statuses) == ["sound"]
    assert "5" not in statuses
    assert len(statuses) == 1


def test_nothing_has_no_statuses() -> None:
    rows = table([])
    assert len(root_statuses(rows.select(list(STATUS_COLUMNS)), violations(rows))) == 0
    assert overview(rows.select(list(OVERVIEW_COLUMNS)), violations(rows)).items == 0
