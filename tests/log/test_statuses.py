"""Statuses computed from columns are those of the fold, also which items are damaged."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from datagen_ray import DatagenEvent, DatagenItemStatus, ItemViolationError, fold_datagen_events
from datagen_ray.log.fold import group_by_item
from datagen_ray.log.schema import DATAGEN_SCHEMA, decode_batch, encode_events
from datagen_ray.store.bulk import (
    OVERVIEW_COLUMNS,
    STATUS_COLUMNS,
    Exact,
    RootStatuses,
    item_states,
    overview,
    root_statuses,
)
from datagen_ray.store.columns import LIFECYCLE_COLUMNS, EventColumns
from datagen_ray.store.snapshot import dedupe
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


def exact(rows: pa.Table) -> Exact:
    events = group_by_item(decode_batch(rows))

    def select(item_ids: list[str], columns: tuple[str, ...]) -> pa.Table:
        wanted = rows.filter(pc.is_in(rows.column("item_id"), value_set=pa.array(item_ids)))
        return dedupe(wanted).select(list(columns))

    def fold(item_ids: list[str]) -> dict[str, ItemViolationError]:
        found = {}
        for item_id in item_ids:
            try:
                fold_datagen_events(events[item_id])
            except ItemViolationError as error:
                found[item_id] = error
        return found

    return Exact(select, fold)


def statuses_of(rows: pa.Table) -> RootStatuses:
    """The statuses, the rows coming in pieces of three."""
    pieces = (rows.slice(at, 3).select(list(STATUS_COLUMNS)) for at in range(0, len(rows), 3))
    return root_statuses(pieces, exact(rows))


@pytest.mark.parametrize(("events", "code", "_ids"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_what_the_fold_refuses_is_damaged_and_nothing_else_is(
    events: list[DatagenEvent], code: str, _ids: tuple[str, ...]
) -> None:
    rows = table([*SOUND, *events])
    states = item_states(EventColumns.of([rows.select(list(STATUS_COLUMNS))], STATUS_COLUMNS))
    assert {i for i, bad in zip(states.ids.to_pylist(), states.damaged, strict=True) if bad} == {
        "5"
    }
    statuses = statuses_of(rows)
    assert statuses.to_dict() == {"sound": "completed"}
    assert statuses.violations["5"].code == code
    found = overview([rows.select(list(OVERVIEW_COLUMNS))], exact(rows))
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
    statuses = statuses_of(rows)
    assert statuses.to_dict() == {"sound": "completed", "5": folded.status}
    assert not statuses.violations


def test_what_never_started_has_no_status() -> None:
    rows = table([completed(1), row("FAILED", 2), *SOUND])
    statuses = statuses_of(rows)
    assert list(statuses) == ["sound"]
    assert "5" not in statuses
    assert len(statuses) == 1


def test_statuses_come_in_columns_too() -> None:
    statuses = statuses_of(table([*SOUND, created(1, "5"), created(1, "6"), terminal(2, "6")]))
    assert statuses.to_arrow().to_pylist() == [
        {"item_id": "sound", "status": "completed"},
        {"item_id": "5", "status": "running"},
        {"item_id": "6", "status": "completed"},
    ]
    assert statuses.counts() == {"running": 1, "completed": 2, "filtered": 0}
    assert statuses.is_terminated("6")
    assert statuses.with_status(DatagenItemStatus.RUNNING) == ["5"]
    assert statuses.status("none") is None
    assert dict(statuses) == {"sound": "completed", "5": "running", "6": "completed"}


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([created(1), field_set(2, 1), field_append(3, "x")], False),
        ([created(1), stored(completed(2), step_name=None)], False),
        ([completed(1), created(2)], True),
        ([created(1), terminal(2, status="filtered"), stored(terminal(2), event_id="z")], True),
        ([created(1), stored(completed(2), event_type="MERGED")], True),
        ([stored(created(1), schema_version=3)], True),
    ],
)
def test_the_lifecycle_alone_shows_no_damage_of_steps_and_fields(
    events: list[DatagenEvent], seen: bool
) -> None:
    rows = table([*SOUND, *events])
    pieces = [rows.select(list(LIFECYCLE_COLUMNS))]
    statuses = root_statuses(pieces, exact(rows), LIFECYCLE_COLUMNS)
    assert set(statuses.violations) == ({"5"} if seen else set())
    assert statuses.status("5") == (None if seen else "running")
    assert statuses.status("sound") == "completed"


def test_nothing_has_no_statuses() -> None:
    rows = table([])
    assert len(statuses_of(rows)) == 0
    assert overview([rows.select(list(OVERVIEW_COLUMNS))], exact(rows)).items == 0


def test_copies_of_an_event_count_once_and_damage_nothing() -> None:
    rows = table(SOUND)
    twice = pa.concat_tables([rows, rows.slice(2)])
    statuses = statuses_of(twice)
    assert statuses.to_dict() == {"sound": "completed"}
    assert not statuses.violations
    found = overview([twice.select(list(OVERVIEW_COLUMNS))], exact(twice))
    assert (found.items, found.completed, found.failures) == (1, 1, 1)
    assert sum(found.completed_steps.values()) == 1


def test_a_sub_item_without_its_parent_column_is_no_root() -> None:
    rows = table([*SOUND, stored(created(1, "sound/x:0"), parent_item_id=None)])
    assert list(statuses_of(rows)) == ["sound"]
