"""Short ways to make events, valid unless a test asks otherwise."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from datagen_ray import DatagenEvent, DatagenStepKind, DatagenStreamPosition, DatagenValue

NOW = datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
LEAF = DatagenStreamPosition("draft", DatagenStepKind.LEAF, 0)
FRAME = DatagenStreamPosition("main", DatagenStepKind.SEQUENCE, 0)


def clock() -> datetime:
    return NOW


def row(event_type: str, item_seq: int, item_id: str = "5", **columns: Any) -> DatagenEvent:
    """An event with the columns that its type needs."""
    data: dict[str, Any] = {
        "event_id": f"{item_id}#{item_seq}",
        "item_id": item_id,
        "item_seq": item_seq,
        "checkpoint_id": f"c{item_seq}",
        "event_type": event_type,
        "run_id": "r1",
        "writer_epoch": "w:1",
        "event_ts": NOW,
    }
    if event_type not in ("ITEM_CREATED", "TERMINAL"):
        data.update(step_name="draft", step_kind="leaf", step_index=0)
    if event_type == "STEP_STARTED":
        data.update(step_kind="sequence")
    if event_type == "TERMINAL":
        data.update(status="completed")
    if event_type == "FAILED":
        data.update(error_type="ValueError")
    if event_type in ("FIELD_SET", "FIELD_APPEND"):
        data.update(
            field_name="score", field_type="int", codec_version=1, value=DatagenValue.of(item_seq)
        )
    data.update(columns)
    return DatagenEvent(**data)


def created(item_seq: int = 1, item_id: str = "5", **columns: Any) -> DatagenEvent:
    return row("ITEM_CREATED", item_seq, item_id, **columns)


def field_set(item_seq: int, value: Any, item_id: str = "5", **columns: Any) -> DatagenEvent:
    given = value if isinstance(value, DatagenValue) else DatagenValue.of(value)
    return row("FIELD_SET", item_seq, item_id, value=given, **columns)


def field_append(item_seq: int, value: Any, item_id: str = "5", **columns: Any) -> DatagenEvent:
    given = value if isinstance(value, DatagenValue) else DatagenValue.of(value)
    return row("FIELD_APPEND", item_seq, item_id, value=given, **columns)


def completed(item_seq: int, item_id: str = "5", **columns: Any) -> DatagenEvent:
    return row("STEP_COMPLETED", item_seq, item_id, **columns)


def terminal(item_seq: int, item_id: str = "5", **columns: Any) -> DatagenEvent:
    return row("TERMINAL", item_seq, item_id, **columns)


def stored(event: DatagenEvent, **columns: Any) -> DatagenEvent:
    """The event as a row of a log with other columns, whatever append would say to them."""
    names = tuple(DatagenEvent.__dataclass_fields__)
    return DatagenEvent.as_stored(
        names, [columns.get(name, getattr(event, name)) for name in names]
    )
