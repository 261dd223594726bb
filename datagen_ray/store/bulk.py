"""Bulk reads from columns: the statuses of many items, and the overview, without folding each.

What the fold decides for one item is computed here for all items at once, with numpy over the
numbers that ``columns`` makes of the rows. Two rows at one place of an item may be copies of one
event, which count once, or two events, which damage it. Which of them they are shows only in the
whole rows; so items with such rows, or with anything that the fold might refuse, are *suspects*:
their rows are read again, deduplicated, and judged alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import ItemViolationError
from datagen_ray.log.events import DatagenEventType, DatagenItemStatus
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.store.columns import (
    ABSENT,
    DETAIL_COLUMNS,
    EVENT_TYPES,
    FAILURE_COLUMNS,
    KINDS,
    LIFECYCLE_COLUMNS,
    STATUSES,
    STEP_KINDS,
    EventColumns,
    Marks,
    Numbers,
    RowDetails,
)

_T = DatagenEventType

STATUS_COLUMNS: tuple[str, ...] = (*LIFECYCLE_COLUMNS, *DETAIL_COLUMNS)
"""The columns that :func:`root_statuses` asks its pieces for, unless only the lifecycle counts."""

OVERVIEW_COLUMNS: tuple[str, ...] = (*STATUS_COLUMNS, "parent_item_id", *FAILURE_COLUMNS)
"""The columns that :func:`overview` asks its pieces for."""

MAX_SAMPLES = 5
"""Failing roots named for each run; the reference's number."""

_STATUSES = tuple(DatagenItemStatus)
_NOT_STARTED = -1


@dataclass(frozen=True)
class ItemStates:
    """One entry an item. ``status`` indexes the item statuses, -1 where the item never started.

    ``is_root`` is None where the rows do not tell.
    """

    ids: pa.Array
    status: Numbers
    damaged: Marks
    is_root: Marks | None = None

    def named(self, marks: Marks) -> list[str]:
        """The ids of the items that are marked."""
        found: list[str] = self.ids.filter(pa.array(marks)).to_pylist()
        return found


def item_states(rows: EventColumns) -> ItemStates:
    """The lifecycle status of every item; ``rows`` must hold all rows of each."""
    count = len(rows.ids)
    status = np.full(count, _NOT_STARTED, np.int8)
    damaged = np.zeros(count, bool)
    if count == 0:
        is_root = None if rows.is_root is None else np.zeros(0, bool)
        return ItemStates(rows.ids, status, damaged, is_root)
    order = _order(rows)
    item, seq = _ordered(rows.item, order), _ordered(rows.seq, order)
    kind, stored = _ordered(rows.kind, order), _ordered(rows.status, order)
    same_item = item[1:] == item[:-1]
    starts = np.flatnonzero(np.r_[True, ~same_item])

    created = kind == _type_code(_T.ITEM_CREATED)
    terminal = kind == _type_code(_T.TERMINAL)
    places = np.arange(len(item), dtype=np.int32 if len(item) < 1 << 31 else np.int64)
    last = np.maximum.reduceat(np.where(created | terminal, places, -1), starts)
    started = np.logical_or.reduceat(created, starts)
    running = STATUSES.index(DatagenItemStatus.RUNNING.value)
    decided = np.where(created[last], running, stored[last])
    owner = item[starts]
    status[owner] = np.where(started, decided, _NOT_STARTED)

    damaged[item[1:][same_item & (seq[1:] == seq[:-1])]] = True
    damaged[owner[started & ~created[starts]]] = True
    ends = [STATUSES.index(s.value) for s in _STATUSES if s.is_terminal]
    damaged[item[terminal & ~np.isin(stored, ends)]] = True
    bad = rows.is_newer | (rows.kind == ABSENT) | (rows.kind >= len(EVENT_TYPES))
    damaged[rows.item[bad | (rows.status >= len(STATUSES))]] = True
    if rows.details is not None:
        _mark_damaged_details(rows, rows.details, damaged)
        _mark_damaged_fields(rows, rows.details, damaged)
    is_root = None
    if rows.is_root is not None:
        is_root = np.zeros(count, bool)
        is_root[owner] = _ordered(rows.is_root, order)[starts]
    return ItemStates(rows.ids, status, damaged, is_root)


def _order(rows: EventColumns) -> Numbers | None:
    """The rows by item and ``item_seq``; None where they are in that order, as most logs are."""
    item, seq = rows.item, rows.seq
    behind = (item[1:] > item[:-1]) | ((item[1:] == item[:-1]) & (seq[1:] >= seq[:-1]))
    if behind.all():
        return None
    if seq.min() >= 0 and seq.max() < 1 << 32:
        # One number for both sorts several times as fast as two.
        return np.argsort(item.astype(np.int64) << 32 | seq)
    return np.lexsort((seq, item))


def _ordered(values: Numbers, order: Numbers | None) -> Numbers:
    return values if order is None else values[order]


def _mark_damaged_details(rows: EventColumns, details: RowDetails, damaged: Marks) -> None:
    """Mark items with a step or a value that the format does not have."""
    bad = details.step_kind >= len(STEP_KINDS)
    bad |= details.value_kind >= len(KINDS)
    steps = (rows.kind == _type_code(_T.STEP_STARTED)) | (
        rows.kind == _type_code(_T.STEP_COMPLETED)
    )
    nowhere = (details.step_name == ABSENT) | (details.step_kind == ABSENT)
    damaged[rows.item[bad | (steps & (nowhere | ~details.has_step_index))]] = True


def _mark_damaged_fields(rows: EventColumns, details: RowDetails, damaged: Marks) -> None:
    """Mark items with a field that mixes modes, changes kind, or changes an appended codec."""
    appends = rows.kind == _type_code(_T.FIELD_APPEND)
    places = np.flatnonzero(appends | (rows.kind == _type_code(_T.FIELD_SET)))
    if len(places) == 0:
        return
    item, name = rows.item[places], details.field_name[places]
    kind, codec = details.value_kind[places], details.field_type[places]
    incomplete = (name == ABSENT) | (kind == ABSENT) | (codec == ABSENT)
    damaged[item[incomplete | ~details.has_codec_version[places]]] = True
    # Absent ones are marked already, so the place that -1 takes here does not matter.
    order = np.argsort((item.astype(np.int64) << 32) + name)
    item, name, kind, codec = item[order], name[order], kind[order], codec[order]
    appended, version = appends[places][order], details.codec_version[places][order]
    same = (item[1:] == item[:-1]) & (name[1:] == name[:-1])
    changed = (appended[1:] != appended[:-1]) | (kind[1:] != kind[:-1])
    recoded = (codec[1:] != codec[:-1]) | (version[1:] != version[:-1])
    damaged[item[1:][same & (changed | (appended[1:] & recoded))]] = True


@dataclass(frozen=True)
class Exact:
    """The slow, exact look at a few items.

    ``rows`` gives all rows of the items named, each content of an event once; ``fold`` folds them
    and gives the violation of each that the fold refuses.
    """

    rows: Callable[[list[str], tuple[str, ...]], pa.Table]
    fold: Callable[[list[str]], Mapping[str, ItemViolationError]]


def _judged(
    states: ItemStates, exact: Exact, columns: tuple[str, ...]
) -> tuple[EventColumns, ItemStates, Mapping[str, ItemViolationError]]:
    """The suspects' rows and states, read exactly, and the violations among them."""
    suspects = states.named(states.damaged)
    rows = EventColumns.of([exact.rows(suspects, columns)] if suspects else [], columns)
    judged = item_states(rows)
    damaged = judged.named(judged.damaged)
    return rows, judged, exact.fold(damaged) if damaged else {}


class RootStatuses(Mapping[str, DatagenItemStatus]):
    """The lifecycle status of every root that ever started, in columns, and by id.

    ``ids`` is an Arrow array of their ids and ``codes`` a numpy array of int8: the place of each
    one's status in ``DatagenItemStatus``. Looked up by id, the result is a mapping; the first
    lookup makes its table, at about 0.4 seconds and 100 MB a million roots. ``violations`` holds
    the roots that cannot be folded, by id. They started, so they are never to be run from
    scratch, and they have no status.
    """

    def __init__(
        self,
        ids: pa.Array,
        codes: Numbers,
        violations: Mapping[str, ItemViolationError] = MappingProxyType({}),
    ) -> None:
        self.ids = ids
        self.codes = codes
        self.violations = violations

    def status(self, item_id: str | DatagenItemId) -> DatagenItemStatus | None:
        """The status of a root; None when it never started or is damaged."""
        code = self._code_of.get(str(item_id))
        return None if code is None else _STATUSES[code]

    def is_terminated(self, item_id: str | DatagenItemId) -> bool:
        """Whether the root is completed or filtered."""
        status = self.status(item_id)
        return status is not None and status.is_terminal

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids.to_pylist())

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._code_of

    def __getitem__(self, item_id: str) -> DatagenItemStatus:
        return _STATUSES[self._code_of[item_id]]

    def __repr__(self) -> str:
        return f"RootStatuses({self.counts()}, violations={len(self.violations)})"

    def counts(self) -> dict[str, int]:
        """How many roots have each lifecycle status."""
        numbers = np.bincount(self.codes, minlength=len(_STATUSES)).tolist()
        return {
            status.value: number
            for status, number in zip(_STATUSES, numbers, strict=True)
            if status is not DatagenItemStatus.FAILED
        }

    def with_status(self, status: DatagenItemStatus) -> list[str]:
        """The ids of the roots that have it."""
        having = pa.array(self.codes == _STATUSES.index(status))
        found: list[str] = self.ids.filter(having).to_pylist()
        return found

    def to_arrow(self) -> pa.Table:
        """Two columns: ``item_id``, and ``status`` as a dictionary of strings."""
        words = pa.array([status.value for status in _STATUSES])
        status = pa.DictionaryArray.from_arrays(pa.array(self.codes), words)
        return pa.table({"item_id": self.ids, "status": status})

    def to_dict(self) -> dict[str, str]:
        return {item_id: _STATUSES[code].value for item_id, code in self._code_of.items()}

    @cached_property
    def _code_of(self) -> dict[str, int]:
        return dict(zip(self.ids.to_pylist(), self.codes.tolist(), strict=True))


def root_statuses(
    pieces: Iterable[pa.Table], exact: Exact, columns: tuple[str, ...] = STATUS_COLUMNS
) -> RootStatuses:
    """The statuses of the roots among the rows of ``pieces``; sub-items are left out."""
    states = item_states(EventColumns.of(pieces, columns))
    _, judged, violations = _judged(states, exact, columns)
    ids: list[pa.Array] = []
    codes: list[Numbers] = []
    for found, counted in ((states, ~states.damaged), (judged, _without(judged, violations))):
        # Told by the id: a stray sub-item whose row names no parent is not a root.
        chosen = counted & (found.status != _NOT_STARTED) & ~_are_paths(found.ids)
        ids.append(found.ids.filter(pa.array(chosen)))
        codes.append(found.status[chosen])
    return RootStatuses(
        pa.concat_arrays(ids),
        np.concatenate(codes),
        {item_id: error for item_id, error in violations.items() if "/" not in item_id},
    )


def _are_paths(ids: pa.Array) -> Marks:
    """Which ids are those of sub-items."""
    text = ids.buffers()[2]
    if text is None or not (np.frombuffer(text, np.uint8) == ord("/")).any():
        return np.zeros(len(ids), bool)
    marks: Marks = pc.match_substring(ids, "/").to_numpy(zero_copy_only=False)
    return marks


def _without(states: ItemStates, violations: Mapping[str, ItemViolationError]) -> Marks:
    return np.array([item_id not in violations for item_id in states.ids.to_pylist()], bool)


@dataclass(frozen=True)
class RunFailures:
    """The failures of one run, with up to five roots that failed, in id order."""

    failures: int
    failures_by_error_type: Mapping[str, int]
    sample_root_item_ids: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "failures": self.failures,
            "failures_by_error_type": dict(self.failures_by_error_type),
            "sample_root_item_ids": list(self.sample_root_item_ids),
        }


@dataclass(frozen=True)
class Overview:
    """What a log holds: roots by status, completed steps and failures over all items.

    ``violations`` holds the items that could not be folded; they are counted nowhere else.
    """

    items: int
    running: int
    completed: int
    filtered: int
    completed_steps: Mapping[str, int]
    failures: int
    failures_by_error_type: Mapping[str, int]
    failures_by_run: Mapping[str, RunFailures]
    violations: Mapping[str, ItemViolationError] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The exchange form; ``violations`` appears only where there are any."""
        data: dict[str, Any] = {
            "items": self.items,
            "running": self.running,
            "completed": self.completed,
            "filtered": self.filtered,
            "completed_steps": dict(self.completed_steps),
            "failures": self.failures,
            "failures_by_error_type": dict(self.failures_by_error_type),
            "failures_by_run": {run: f.to_dict() for run, f in self.failures_by_run.items()},
        }
        if self.violations:
            data["violations"] = {
                item_id: {"code": error.code, "message": str(error)}
                for item_id, error in sorted(self.violations.items())
            }
        return data


@dataclass
class _Tally:
    """Counts that add up."""

    roots: Counter[int] = field(default_factory=Counter)
    completed_steps: Counter[str] = field(default_factory=Counter)
    failed: list[pa.Table] = field(default_factory=list)

    def add(self, rows: EventColumns, states: ItemStates, counted: Marks) -> None:
        counted = counted & (states.status != _NOT_STARTED)
        if states.is_root is not None:
            self.roots.update(states.status[counted & states.is_root].tolist())
        if len(rows) == 0 or rows.details is None:
            return
        completed = counted[rows.item] & (rows.kind == _type_code(_T.STEP_COMPLETED))
        names = rows.details.step_name[completed & (rows.details.step_name != ABSENT)]
        for number, count in enumerate(np.bincount(names, minlength=1).tolist()):
            if count:
                self.completed_steps[rows.details.step_names[number]] += count
        if rows.failed is not None:
            self.failed.append(rows.failed.filter(pa.array(counted[rows.failed.column("item")])))


def overview(pieces: Iterable[pa.Table], exact: Exact) -> Overview:
    """The overview of all rows of a log, given in ``pieces``."""
    rows = EventColumns.of(pieces, OVERVIEW_COLUMNS)
    states = item_states(rows)
    exact_rows, judged, violations = _judged(states, exact, OVERVIEW_COLUMNS)
    tally = _Tally()
    tally.add(rows, states, ~states.damaged)
    tally.add(exact_rows, judged, _without(judged, violations))
    failed = pa.concat_tables(tally.failed, promote_options="permissive") if tally.failed else None
    return Overview(
        items=sum(tally.roots.values()),
        running=tally.roots[_STATUSES.index(DatagenItemStatus.RUNNING)],
        completed=tally.roots[_STATUSES.index(DatagenItemStatus.COMPLETED)],
        filtered=tally.roots[_STATUSES.index(DatagenItemStatus.FILTERED)],
        completed_steps=dict(sorted(tally.completed_steps.items())),
        failures=0 if failed is None else failed.num_rows,
        failures_by_error_type={} if failed is None else _counts(failed, "error_type"),
        failures_by_run={} if failed is None else _by_run(failed),
        violations=violations,
    )


def _by_run(failed: pa.Table) -> dict[str, RunFailures]:
    runs: dict[str, RunFailures] = {}
    for run in sorted(pa.compute.unique(failed.column("run_id")).to_pylist()):
        rows = failed.filter(pa.compute.equal(failed.column("run_id"), run))
        roots = sorted(pa.compute.unique(rows.column("root_item_id")).to_pylist())
        runs[run] = RunFailures(
            rows.num_rows, _counts(rows, "error_type"), tuple(roots[:MAX_SAMPLES])
        )
    return runs


def _counts(rows: pa.Table, column: str) -> dict[str, int]:
    counts = pa.compute.value_counts(rows.column(column).drop_null())
    pairs: Iterable[tuple[str, int]] = zip(
        counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True
    )
    return dict(sorted(pairs))


def _type_code(member: DatagenEventType) -> int:
    return EVENT_TYPES.index(member.value)
