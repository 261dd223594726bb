"""The events of the log: their types, their columns, their exchange form.

A :class:`DatagenEvent` is one immutable row. Its exchange form (:meth:`DatagenEvent.to_dict`) has
the log's columns as keys, with the six ``value_*`` columns folded into ``value`` and
``query_tags_json`` into ``query_tags``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from datagen_ray.clock import utc_now
from datagen_ray.errors import InvalidEventError
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.log.values import DatagenValue, check_text, json_text, json_value

DATAGEN_SCHEMA_VERSION = 2
"""The version that this package writes. Versions 1 and 2 are read; newer ones are refused."""

DATAGEN_OLDEST_READABLE_VERSION = 1


class _StoredEnum(str, Enum):
    """An enum whose members are the stored strings."""

    def __str__(self) -> str:
        return str(self.value)


class DatagenEventType(_StoredEnum):
    ITEM_CREATED = "ITEM_CREATED"
    STEP_STARTED = "STEP_STARTED"
    FIELD_SET = "FIELD_SET"
    FIELD_APPEND = "FIELD_APPEND"
    STEP_COMPLETED = "STEP_COMPLETED"
    FAILED = "FAILED"
    TERMINAL = "TERMINAL"


class DatagenItemStatus(_StoredEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FILTERED = "filtered"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (DatagenItemStatus.COMPLETED, DatagenItemStatus.FILTERED)


class DatagenStepKind(_StoredEnum):
    ROOT = "root"
    LEAF = "leaf"
    SEQUENCE = "sequence"
    LOOP = "loop"
    MAP_REDUCE = "map_reduce"
    BRANCH = "branch"
    SUB_PIPELINE = "sub_pipeline"
    CONDITIONAL = "conditional"
    ROUTER = "router"

    @property
    def is_driver(self) -> bool:
        """Sequence and Loop: the kinds that open a frame with STEP_STARTED."""
        return self in (DatagenStepKind.SEQUENCE, DatagenStepKind.LOOP)

    @property
    def is_selector(self) -> bool:
        """Conditional and Router: the kinds that write no row of their own."""
        return self in (DatagenStepKind.CONDITIONAL, DatagenStepKind.ROUTER)


@dataclass(frozen=True, slots=True)
class DatagenStreamPosition:
    """Where in a pipeline an event belongs. All five parts together are its identity."""

    step_name: str
    step_kind: DatagenStepKind
    step_index: int
    enclosing_step: str | None = None
    selector_step: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DatagenStreamPosition:
        """From the keys step_name, step_kind, index, enclosing, selector."""
        for key in ("step_name", "step_kind", "index"):
            if key not in data:
                raise InvalidEventError(f"position has no {key!r}", code="missing_key")
        index = data["index"]
        if isinstance(index, bool) or not isinstance(index, int):
            raise InvalidEventError(
                f"position index must be an integer, not {index!r}", code="wrong_type"
            )
        return cls(
            step_name=check_text(data["step_name"], "step_name"),
            step_kind=parse_enum(DatagenStepKind, data["step_kind"], "step kind"),
            step_index=index,
            enclosing_step=_optional_text(data.get("enclosing"), "enclosing"),
            selector_step=_optional_text(data.get("selector"), "selector"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_name": self.step_name,
            "step_kind": str(self.step_kind),
            "step_index": self.step_index,
            "enclosing_step": self.enclosing_step,
            "selector_step": self.selector_step,
        }

    def __str__(self) -> str:
        where = f" in {self.enclosing_step}" if self.enclosing_step is not None else ""
        chosen = f" by {self.selector_step}" if self.selector_step is not None else ""
        return f"{self.step_name}[{self.step_index}] ({self.step_kind}{where}{chosen})"


_E = TypeVar("_E", bound=_StoredEnum)


def parse_enum(enum: type[_E], value: object, what: str) -> _E:
    """The member that a stored string spells, exactly; else :class:`InvalidEventError`."""
    if isinstance(value, enum):
        return value
    if not isinstance(value, str):
        raise InvalidEventError(
            f"{what} must be a string, not {type(value).__name__}", code="wrong_type"
        )
    try:
        return enum(value)
    except ValueError as error:
        known = ", ".join(member.value for member in enum)
        raise InvalidEventError(
            f"unsupported {what} {value!r}; one of {known}",
            code=f"unsupported_{what.replace(' ', '_')}",
        ) from error


def _optional_text(value: object, what: str) -> str | None:
    return None if value is None else check_text(value, what)


_RFC3339 = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[Tt ](\d{2}):(\d{2}):(\d{2})(?:\.(\d+))?"
    r"(?:[Zz]|([+-])(\d{2}):(\d{2}))\Z",
    re.ASCII,
)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EARLIEST = datetime.min.replace(tzinfo=timezone.utc)
_LATEST = datetime.max.replace(tzinfo=timezone.utc)


def parse_timestamp(text: str) -> datetime:
    """An RFC 3339 time as UTC, truncated to microseconds. A leap second is the next second."""
    match = _RFC3339.match(text)
    if match is None:
        raise _bad_timestamp(text)
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    micros = int((match[7] or "0")[:6].ljust(6, "0"))
    leap = second == 60
    try:
        moment = datetime(
            year, month, day, hour, minute, 59 if leap else second, micros, tzinfo=timezone.utc
        )
        if leap:
            moment += timedelta(seconds=1)
        if match[8]:
            if int(match[9]) > 23 or int(match[10]) > 59:
                raise _bad_timestamp(text)
            offset = timedelta(hours=int(match[9]), minutes=int(match[10]))
            moment += -offset if match[8] == "+" else offset
    except (ValueError, OverflowError) as error:
        raise _bad_timestamp(text) from error
    return moment


def in_utc(moment: object) -> datetime:
    """An aware time in UTC; :class:`InvalidEventError` for what is none."""
    if not isinstance(moment, datetime):
        raise InvalidEventError(
            f"event_ts must be a datetime or RFC 3339 text, not {type(moment).__name__}",
            code="wrong_type",
        )
    if moment.tzinfo is timezone.utc:
        return moment
    if moment.utcoffset() is None:
        raise InvalidEventError(
            f"event_ts {moment} has no time zone; use an aware datetime", code="bad_timestamp"
        )
    try:
        return moment.astimezone(timezone.utc)
    except OverflowError as error:
        raise InvalidEventError(
            f"event_ts {moment} is outside of the years 1 to 9999 in UTC", code="bad_timestamp"
        ) from error


def _bad_timestamp(text: str) -> InvalidEventError:
    return InvalidEventError(
        f"event_ts {text!r} is not an RFC 3339 time such as 2024-01-02T03:04:05Z",
        code="bad_timestamp",
    )


def format_timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with none, three or six digits of fraction, as the shared format has it."""
    moment = moment.astimezone(timezone.utc)
    if moment.microsecond == 0:
        return moment.isoformat(timespec="seconds")
    whole = moment.microsecond % 1000 == 0
    return moment.isoformat(timespec="milliseconds" if whole else "microseconds")


def timestamp_micros(moment: datetime) -> int:
    """Microseconds since the epoch, exact over the whole range of datetime."""
    delta = moment - EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def timestamp_from_micros(micros: int) -> datetime:
    """The stored time; one outside of the years 1 to 9999 as the nearest that a datetime holds.

    Times decide nothing, so a strange one must not keep its row from being read.
    """
    try:
        return EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return _LATEST if micros > 0 else _EARLIEST


_REQUIRED_KEYS = (
    "event_id",
    "item_id",
    "root_item_id",
    "item_seq",
    "checkpoint_id",
    "event_type",
    "run_id",
    "writer_epoch",
)
TEXT_COLUMNS = ("event_id", "item_id", "root_item_id", "checkpoint_id", "run_id", "writer_epoch")
OPTIONAL_TEXT_COLUMNS = (
    "parent_item_id",
    "step_name",
    "enclosing_step",
    "selector_step",
    "field_name",
    "field_type",
    "error_type",
    "error_dump",
    "traceback",
)
_INT_COLUMNS = ("item_seq", "attempt", "schema_version")
_OPTIONAL_INT_COLUMNS = ("step_index", "codec_version")


class Composition(NamedTuple):
    """One call of the stream writer, and what the events that it composed have in common.

    ``checkpoint_events`` is how many they are where they are a whole checkpoint, else 0.
    """

    checkpoint_id: str
    id_prefix: bytes
    moment: datetime
    checkpoint_events: int


class _Composed:
    """Holds the mark of an event, which is none of its columns: a copy or a pickle is without."""

    __slots__ = ("composition",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagenEvent(_Composed):
    """One immutable row of the log.

    ``root_item_id`` and ``parent_item_id`` are derived from ``item_id`` when omitted;
    ``event_ts`` is the current time when omitted; it is stored in UTC at microseconds.
    ``query_tags`` is any JSON value. The rules between columns are checked on append
    (:mod:`datagen_ray.log.validate`), not here: a damaged log must still be readable.
    """

    event_id: str
    item_id: str
    item_seq: int
    checkpoint_id: str
    event_type: DatagenEventType
    run_id: str
    writer_epoch: str
    root_item_id: str = ""
    parent_item_id: str | None = None
    step_name: str | None = None
    step_kind: DatagenStepKind | None = None
    step_index: int | None = None
    enclosing_step: str | None = None
    selector_step: str | None = None
    attempt: int = 0
    field_name: str | None = None
    field_type: str | None = None
    codec_version: int | None = None
    value: DatagenValue | None = None
    query_tags_json: str | None = None
    status: DatagenItemStatus | None = None
    error_type: str | None = None
    error_dump: str | None = None
    traceback: str | None = None
    event_ts: datetime = None  # type: ignore[assignment]  # filled in below, never None after
    schema_version: int = DATAGEN_SCHEMA_VERSION

    def __post_init__(self) -> None:
        put = object.__setattr__
        if type(self.event_type) is not DatagenEventType:
            put(self, "event_type", parse_enum(DatagenEventType, self.event_type, "event type"))
        if self.step_kind is not None and type(self.step_kind) is not DatagenStepKind:
            put(self, "step_kind", parse_enum(DatagenStepKind, self.step_kind, "step kind"))
        if self.status is not None and type(self.status) is not DatagenItemStatus:
            put(self, "status", parse_enum(DatagenItemStatus, self.status, "status"))
        if not self.root_item_id:
            put(self, "root_item_id", DatagenItemId.parse(self.item_id).root_key)
        if self.parent_item_id is None and "/" in self.item_id:
            # Not parsed: append does that, and names what is wrong with the id.
            put(self, "parent_item_id", self.item_id.rpartition("/")[0] or None)
        put(self, "event_ts", utc_now() if self.event_ts is None else in_utc(self.event_ts))

    @classmethod
    def as_stored(cls, names: Sequence[str], row: Sequence[Any]) -> DatagenEvent:
        """The event that a stored row is: every column as it stands, nothing derived or checked."""
        event = object.__new__(cls)
        put = object.__setattr__
        for name, value in zip(names, row, strict=True):
            put(event, name, value)
        return event

    @classmethod
    def of_row(cls, *row: Any) -> DatagenEvent:
        """As :meth:`as_stored`, for all columns in the order of the fields: the quickest way."""
        event = _OpenRow(*row)
        event.__class__ = cls
        return event  # type: ignore[no-any-return]  # it is a cls now

    @classmethod
    def composed(cls, composition: Composition, *row: Any) -> DatagenEvent:
        """As :meth:`of_row`, for rows that keep every rule of append between their columns.

        For :mod:`datagen_ray.log.stream` alone. Append does not check such a row once more; an
        event that is made from it in any other way is checked.
        """
        event = _OpenRow(*row)
        event.composition = composition
        event.__class__ = cls
        return event  # type: ignore[no-any-return]  # it is a cls now

    @property
    def query_tags(self) -> Any:
        """The tags as a JSON value, a new object at each call; None where there are none."""
        return None if self.query_tags_json is None else json_value(self.query_tags_json)

    @property
    def position(self) -> DatagenStreamPosition | None:
        """Where in the pipeline the event belongs; None when it names no step."""
        if self.step_name is None or self.step_kind is None or self.step_index is None:
            return None
        return _position(
            self.step_name,
            self.step_kind,
            self.step_index,
            self.enclosing_step,
            self.selector_step,
        )

    def content(self) -> tuple[object, ...]:
        """All that is stored but the id, comparable: equal exactly when the stored rows are."""
        return (
            self.item_id,
            self.item_seq,
            self.checkpoint_id,
            self.event_type,
            self.run_id,
            self.writer_epoch,
            self.root_item_id,
            self.parent_item_id,
            self.step_name,
            self.step_kind,
            self.step_index,
            self.enclosing_step,
            self.selector_step,
            self.attempt,
            self.field_name,
            self.field_type,
            self.codec_version,
            None if self.value is None else self.value.identity(),
            self.query_tags_json,
            self.status,
            self.error_type,
            self.error_dump,
            self.traceback,
            timestamp_micros(self.event_ts),
            self.schema_version,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DatagenEvent:
        """The event of an exchange form. Unknown keys are an error, None is the same as absent."""
        if not isinstance(data, Mapping):
            raise InvalidEventError(
                f"an event must be an object, not {type(data).__name__}", code="wrong_type"
            )
        for key in _REQUIRED_KEYS:
            if key not in data:
                raise InvalidEventError(f"event has no {key!r}", code="missing_key")
        unknown = sorted(set(data) - _EXCHANGE_KEYS)
        if unknown:
            raise InvalidEventError(
                f"event has the unknown key {unknown[0]!r}; known are the columns of the log",
                code="unknown_key",
            )
        columns: dict[str, Any] = {}
        for name in TEXT_COLUMNS:
            columns[name] = check_text(data[name], name)
        if not columns["root_item_id"]:
            raise InvalidEventError("root_item_id must not be empty", code="empty_column")
        for name in OPTIONAL_TEXT_COLUMNS:
            columns[name] = _optional_text(data.get(name), name)
        for name in _INT_COLUMNS + _OPTIONAL_INT_COLUMNS:
            value = data.get(name)
            if value is None and name != "item_seq":
                continue
            if not isinstance(value, int):
                raise InvalidEventError(
                    f"{name} must be an integer, not {type(value).__name__}", code="wrong_type"
                )
            columns[name] = int(value)
        columns["event_type"] = parse_enum(DatagenEventType, data["event_type"], "event type")
        if data.get("step_kind") is not None:
            columns["step_kind"] = parse_enum(DatagenStepKind, data["step_kind"], "step kind")
        if data.get("status") is not None:
            columns["status"] = parse_enum(DatagenItemStatus, data["status"], "status")
        if data.get("value") is not None:
            columns["value"] = DatagenValue.from_dict(data["value"])
        if data.get("query_tags") is not None:
            columns["query_tags_json"] = json_text(data["query_tags"])
        moment = data.get("event_ts")
        columns["event_ts"] = parse_timestamp(moment) if isinstance(moment, str) else moment
        return cls(**columns)

    def to_dict(self) -> dict[str, Any]:
        """The exchange form: every column, ``value`` folded, times as RFC 3339 text."""
        return {
            "event_id": self.event_id,
            "item_id": self.item_id,
            "root_item_id": self.root_item_id,
            "parent_item_id": self.parent_item_id,
            "item_seq": self.item_seq,
            "checkpoint_id": self.checkpoint_id,
            "event_type": str(self.event_type),
            "step_name": self.step_name,
            "step_kind": None if self.step_kind is None else str(self.step_kind),
            "step_index": self.step_index,
            "enclosing_step": self.enclosing_step,
            "selector_step": self.selector_step,
            "attempt": self.attempt,
            "run_id": self.run_id,
            "writer_epoch": self.writer_epoch,
            "field_name": self.field_name,
            "field_type": self.field_type,
            "codec_version": self.codec_version,
            "value": None if self.value is None else self.value.to_dict(),
            "query_tags": self.query_tags,
            "status": None if self.status is None else str(self.status),
            "error_type": self.error_type,
            "error_dump": self.error_dump,
            "traceback": self.traceback,
            "event_ts": format_timestamp(self.event_ts),
            "schema_version": self.schema_version,
        }


# A pipeline has few positions and a log names each of them in millions of rows.
_position = functools.lru_cache(maxsize=4096, typed=True)(DatagenStreamPosition)

_OpenRow: Any = make_dataclass(
    "_OpenRow",
    [(column.name, Any) for column in fields(DatagenEvent)],
    bases=(_Composed,),
    slots=True,
)
"""An event while it is made: the same slots, and not yet frozen.

Setting the columns of a frozen object one by one takes five times as long as filling one of these
and then making it an event.
"""

_EXCHANGE_KEYS = frozenset(
    (
        *TEXT_COLUMNS,
        *OPTIONAL_TEXT_COLUMNS,
        *_INT_COLUMNS,
        *_OPTIONAL_INT_COLUMNS,
        "event_type",
        "step_kind",
        "status",
        "value",
        "query_tags",
        "event_ts",
    )
)
