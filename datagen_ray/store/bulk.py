"""Bulk reads from columns: the statuses of many items, and the overview, without folding each.

What the fold decides for one item is computed here for all items of a table at once, with numpy
over dictionary codes. Items that the fold would refuse are found by the same rules; their exact
violation comes from folding just those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datagen_ray.errors import ItemViolationError
from datagen_ray.log.events import (
    DATAGEN_SCHEMA_VERSION,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
)
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.log.values import VALUE_KINDS

_T = DatagenEventType
_Ints: TypeAlias = "npt.NDArray[np.int64]"
_Bools: TypeAlias = "npt.NDArray[np.bool_]"

STATUS_COLUMNS: tuple[str, ...] = (
    "event_id",
    "item_id",
    "root_item_id",
    "item_seq",
    "event_type",
    "step_name",
    "step_kind",
    "step_index",
    "field_name",
    "field_type",
    "codec_version",
    "value_kind",
    "status",
    "schema_version",
)
"""What deciding a status, and whether an item is damaged, needs of each event."""

OVERVIEW_COLUMNS: tuple[str, ...] = (*STATUS_COLUMNS, "parent_item_id", "run_id", "error_type")

MAX_SAMPLES = 5
"""Failing roots named for each run; the reference's number."""

_STATUSES = tuple(DatagenItemStatus)
_NOT_STARTED = -1


@dataclass(frozen=True)
class ItemStates:
    """One row an item. ``status`` indexes the item statuses, -1 where the item never started."""

    item_ids: pa.Array
    codes: _Ints
    order: _Ints
    starts: _Ints
    status: _Ints
    damaged: _Bools


def item_states(events: pa.Table) -> ItemStates:
    """The lifecycle status of every item in ``events``, which must hold all rows of each."""
    encoded = _encode(events, "item_id")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    count = len(encoded.dictionary)
    if count == 0:
        empty = np.zeros(0, np.int64)
        return ItemStates(encoded.dictionary, codes, empty, empty, empty, empty.astype(bool))
    seqs = events.column("item_seq").to_numpy()
    order = np.lexsort((seqs, codes))
    sorted_codes = codes[order]
    starts = np.flatnonzero(np.r_[True, sorted_codes[1:] != sorted_codes[:-1]])

    kinds = _codes(events, "event_type", [member.value for member in _T])[order]
    stored = _codes(events, "status", [member.value for member in _STATUSES])[order]
    created = kinds == _type_code(_T.ITEM_CREATED)
    terminal = kinds == _type_code(_T.TERMINAL)

    rows = np.arange(len(order))
    last = np.maximum.reduceat(np.where(created | terminal, rows, -1), starts)
    started = np.add.reduceat(created.astype(np.int64), starts) > 0
    running = _STATUSES.index(DatagenItemStatus.RUNNING)
    decided = np.where(created[last], running, stored[last])
    status = np.where(started, decided, _NOT_STARTED)

    damaged = np.zeros(count, bool)
    same = (sorted_codes[1:] == sorted_codes[:-1]) & (seqs[order][1:] == seqs[order][:-1])
    damaged[sorted_codes[1:][same]] = True
    damaged |= started & ~created[starts]
    ends = [_STATUSES.index(s) for s in _STATUSES if s.is_terminal]
    damaged[sorted_codes[terminal & ~np.isin(stored, ends)]] = True
    newer = events.column("schema_version").to_numpy() > DATAGEN_SCHEMA_VERSION
    damaged[codes[newer]] = True
    steps = (kinds == _type_code(_T.STEP_STARTED)) | (kinds == _type_code(_T.STEP_COMPLETED))
    nowhere = _nulls(events, "step_name") | _nulls(events, "step_index")
    nowhere |= _nulls(events, "step_kind")
    damaged[sorted_codes[steps & nowhere[order]]] = True
    _mark_unknown_words(events, codes, damaged)
    _mark_damaged_fields(events, codes, damaged)
    return ItemStates(encoded.dictionary, codes, order, starts, status, damaged)


def _mark_unknown_words(events: pa.Table, codes: _Ints, damaged: _Bools) -> None:
    """Mark items with a row whose type, status or kind the format does not have."""
    words: dict[str, list[str]] = {
        "event_type": [member.value for member in _T],
        "status": [member.value for member in _STATUSES],
        "step_kind": [member.value for member in DatagenStepKind],
        "value_kind": sorted(VALUE_KINDS),
    }
    for column, known in words.items():
        unknown = (_codes(events, column, known) < 0) & ~_nulls(events, column)
        damaged[codes[unknown]] = True


def _mark_damaged_fields(events: pa.Table, codes: _Ints, damaged: _Bools) -> None:
    """Mark items with a field that mixes modes, changes kind, or changes an appended codec."""
    kinds = _codes(events, "event_type", [_T.FIELD_SET.value, _T.FIELD_APPEND.value])
    rows = np.flatnonzero(kinds >= 0)
    if len(rows) == 0:
        return
    columns = [
        _any_codes(events, name)[rows] for name in ("field_name", "value_kind", "field_type")
    ]
    version = events.column("codec_version").fill_null(0).to_numpy()[rows]
    for part in columns:
        damaged[codes[rows][part < 0]] = True
    damaged[codes[rows][_nulls(events, "codec_version")[rows]]] = True
    name, kind, codec = columns
    item, mode = codes[rows], kinds[rows]
    order = np.lexsort((name, item))
    same = (item[order][1:] == item[order][:-1]) & (name[order][1:] == name[order][:-1])
    changed = np.zeros(len(same), bool)
    for part in (mode, kind):
        changed |= part[order][1:] != part[order][:-1]
    appended = mode[order][1:] == 1
    for part in (codec, version):
        changed |= appended & (part[order][1:] != part[order][:-1])
    damaged[item[order][1:][same & changed]] = True


FoldDamaged: TypeAlias = Callable[[list[str]], Mapping[str, ItemViolationError]]
"""Folds the items named and returns the violation of each that the fold refuses."""


@dataclass(frozen=True)
class RootStatuses:
    """The lifecycle status of every root that ever started.

    ``violations`` holds the roots that cannot be folded, by id. They started, so they are never
    to be run from scratch, and they have no status.
    """

    statuses: Mapping[str, DatagenItemStatus]
    violations: Mapping[str, ItemViolationError] = field(default_factory=dict)

    def status(self, item_id: str | DatagenItemId) -> DatagenItemStatus | None:
        """The status of a root; None when it never started or is damaged."""
        return self.statuses.get(str(item_id))

    def is_terminated(self, item_id: str | DatagenItemId) -> bool:
        """Whether the root is completed or filtered."""
        status = self.status(item_id)
        return status is not None and status.is_terminal

    def __len__(self) -> int:
        return len(self.statuses)

    def __iter__(self) -> Iterator[str]:
        return iter(self.statuses)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self.statuses

    def __getitem__(self, item_id: str) -> DatagenItemStatus:
        return self.statuses[item_id]

    def to_dict(self) -> dict[str, str]:
        return {item_id: status.value for item_id, status in self.statuses.items()}


def root_statuses(events: pa.Table, fold_damaged: FoldDamaged) -> RootStatuses:
    """The statuses of the roots among ``events``; rows of sub-items are left out first."""
    rows = pa.compute.equal(events.column("item_id"), events.column("root_item_id"))
    states = item_states(events.filter(rows))
    ids = states.item_ids.to_pylist()
    violations = _violations(states, ids, fold_damaged)
    return RootStatuses(
        {
            item_id: _STATUSES[code]
            for item_id, code in zip(ids, states.status.tolist(), strict=True)
            if code != _NOT_STARTED and item_id not in violations
        },
        violations,
    )


def _violations(
    states: ItemStates, ids: list[str], fold_damaged: FoldDamaged
) -> Mapping[str, ItemViolationError]:
    suspects = [ids[row] for row in np.flatnonzero(states.damaged)]
    return fold_damaged(suspects) if suspects else {}


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


def overview(events: pa.Table, fold_damaged: FoldDamaged) -> Overview:
    """The overview of all ``events`` of a log."""
    states = item_states(events)
    ids = states.item_ids.to_pylist()
    violations = _violations(states, ids, fold_damaged)
    healthy = np.array([item_id not in violations for item_id in ids], bool)
    counted = healthy & (states.status != _NOT_STARTED)

    if len(ids):
        first_rows = states.order[states.starts]
        is_root = _nulls(events, "parent_item_id")[first_rows]
    else:
        is_root = np.zeros(0, bool)
    roots = Counter(states.status[counted & is_root].tolist())

    of_counted = counted[states.codes] if len(ids) else np.zeros(0, bool)
    kinds = _codes(events, "event_type", [member.value for member in _T])
    completions = events.filter(
        pa.array(of_counted & (kinds == _type_code(_T.STEP_COMPLETED)), pa.bool_())
    )
    failed = events.filter(pa.array(of_counted & (kinds == _type_code(_T.FAILED)), pa.bool_()))
    return Overview(
        items=sum(roots.values()),
        running=roots[_STATUSES.index(DatagenItemStatus.RUNNING)],
        completed=roots[_STATUSES.index(DatagenItemStatus.COMPLETED)],
        filtered=roots[_STATUSES.index(DatagenItemStatus.FILTERED)],
        completed_steps=_counts(completions, "step_name"),
        failures=failed.num_rows,
        failures_by_error_type=_counts(failed, "error_type"),
        failures_by_run=_by_run(failed),
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


def _encode(events: pa.Table, column: str) -> Any:
    array = events.column(column).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty column stays chunked
        array = pa.array([], array.type)
    return array.dictionary_encode()


def _any_codes(events: pa.Table, column: str) -> _Ints:
    """Codes of a text column's own values; -1 for null."""
    indices = _encode(events, column).indices.fill_null(-1)
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.int64)


def _codes(events: pa.Table, column: str, known: list[str]) -> _Ints:
    """Positions in ``known``; -1 for null and for what is not in it."""
    encoded = _encode(events, column)
    table = [known.index(v) if v in known else -1 for v in encoded.dictionary.to_pylist()]
    indices = encoded.indices.fill_null(len(table)).to_numpy(zero_copy_only=False)
    codes: _Ints = np.array([*table, -1], np.int64)[indices.astype(np.int64)]
    return codes


def _nulls(events: pa.Table, column: str) -> _Bools:
    return np.asarray(events.column(column).is_null().to_numpy()).astype(bool)


def _type_code(member: DatagenEventType) -> int:
    return list(_T).index(member)
