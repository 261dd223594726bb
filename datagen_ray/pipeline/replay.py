"""What the log already says about a root's tree, and the cursor that walks along it.

Resuming walks the pipeline and a stream's rows together. The next recorded row must be the one
that the walk expects; while rows remain no user code is called, since choices are taken from the
rows. When they end, the stream is live, once and for all.

Three rows bind a choice: STEP_STARTED, STEP_COMPLETED, and the births of sub-items, which lie in
streams of their own but are written before anything else can follow in the parent's. FAILED binds
nothing: what failed may go another way the next time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NoReturn

from datagen_ray.errors import PipelineMismatchError
from datagen_ray.log.events import (
    DatagenEvent,
    DatagenEventType,
    DatagenStepKind,
    DatagenStreamPosition,
)
from datagen_ray.log.fold import FoldedDatagenItem, fold_datagen_events, order_events
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.pipeline.codecs import Stored
from datagen_ray.pipeline.item import Cell
from datagen_ray.pipeline.nodes import FanOut, Selector
from datagen_ray.pipeline.steps import INPUT_STEP, Node

BRANCH_TAG = "branch"
"""The query tag of a Branch's sub-item that holds the name of its branch."""

INPUT_POSITION = DatagenStreamPosition(INPUT_STEP, DatagenStepKind.ROOT, 0)

_CURE = (
    "run the pipeline that it was recorded with; or keep its steps in their places and add the "
    "changed one, under a new name, at the end of its sequence; or start a new experiment"
)


class RowKind(Enum):
    """The rows that bind a choice."""

    STARTED = "STEP_STARTED"
    COMPLETED = "STEP_COMPLETED"
    BIRTHS = "births of sub-items"


class Row(NamedTuple):
    """One recorded row that the walk has to account for."""

    kind: RowKind
    position: DatagenStreamPosition

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.position}"


@dataclass
class RecordedStream:
    """One item as the log has it."""

    item_id: str
    folded: FoldedDatagenItem
    rows: list[Row]
    terminal: DatagenEvent | None
    failed: list[DatagenEvent]
    created_at: DatagenStreamPosition | None
    branch: str | None
    index: int
    births: dict[DatagenStreamPosition, list[RecordedStream]] = field(default_factory=dict)

    def cells(self) -> dict[str, Cell]:
        """The recorded fields, nothing decoded."""
        return {
            name: Cell(
                kept.mode == "append",
                tuple(
                    Stored(value, kept.field_type, kept.codec_version, event_id)
                    for value, event_id in zip(kept.values, kept.event_ids, strict=True)
                ),
            )
            for name, kept in self.folded.fields.items()
        }

    def innermost_frame(self) -> DatagenStreamPosition:
        """The frame that was opened last and not closed; the inputs where none is open."""
        open_frames = self.folded.trajectory.open_frames
        for row in reversed(self.rows):
            if row.kind is RowKind.STARTED and row.position in open_frames:
                return row.position
        return INPUT_POSITION

    def active_failures(self) -> Iterable[list[DatagenEvent]]:
        """The FAILED rows of each stream that could still run: none of an ended one, or below."""
        if self.terminal is not None:
            return
        yield self.failed
        for group in self.births.values():
            for child in group:
                yield from child.active_failures()


def read_tree(root_id: str, history: Sequence[DatagenEvent]) -> RecordedStream | None:
    """The recorded tree of a root; None where nothing was recorded.

    Raises ``ItemViolationError`` for events that cannot be folded, and
    :class:`PipelineMismatchError` for ones that no pipeline leaves.
    """
    by_item: dict[str, list[DatagenEvent]] = defaultdict(list)
    for event in history:
        by_item[event.item_id].append(event)
    if not by_item:
        return None
    streams = {item_id: _read_stream(item_id, events) for item_id, events in by_item.items()}
    root = streams.get(root_id)
    if root is None:
        raise PipelineMismatchError(
            f"item {root_id!r}: the log has sub-items of it, such as {next(iter(streams))!r}, yet "
            f"nothing of itself; {_CURE}"
        )
    _attach_children(streams)
    return root


def _attach_children(streams: Mapping[str, RecordedStream]) -> None:
    for item_id, stream in streams.items():
        parent_id = stream.folded.parent_item_id
        if parent_id is None:
            continue
        parent = streams.get(parent_id)
        if parent is None or stream.created_at is None:
            missing = "no parent" if parent is None else "no position of its fan-out"
            raise PipelineMismatchError(f"item {item_id!r} has {missing} in the log; {_CURE}")
        parent.births.setdefault(stream.created_at, []).append(stream)
    for stream in streams.values():
        for group in stream.births.values():
            group.sort(key=lambda child: child.index)


def _read_stream(item_id: str, events: list[DatagenEvent]) -> RecordedStream:
    ordered = order_events(events)
    folded = fold_datagen_events(ordered)
    if folded is None:
        raise PipelineMismatchError(
            f"item {item_id!r} has {ordered[0].event_type} in the log but no ITEM_CREATED; {_CURE}"
        )
    rows: list[Row] = []
    terminal: DatagenEvent | None = None
    failed: list[DatagenEvent] = []
    for event in ordered:
        position = event.position
        if event.event_type is DatagenEventType.TERMINAL:
            terminal = event
        elif event.event_type is DatagenEventType.FAILED:
            failed.append(event)
        elif position is not None and event.event_type is DatagenEventType.STEP_STARTED:
            rows.append(Row(RowKind.STARTED, position))
        elif position is not None and event.event_type is DatagenEventType.STEP_COMPLETED:
            rows.append(Row(RowKind.COMPLETED, position))
    if not rows or rows[0] != Row(RowKind.COMPLETED, INPUT_POSITION):
        found = rows[0] if rows else "nothing"
        raise PipelineMismatchError(
            f"item {item_id!r}: after ITEM_CREATED the log has {found}, the pipeline expects the "
            f"item's inputs; {_CURE}"
        )
    tags = folded.query_tags
    branch = tags.get(BRANCH_TAG) if isinstance(tags, dict) else None
    return RecordedStream(
        item_id=item_id,
        folded=folded,
        rows=rows[1:],
        terminal=terminal,
        failed=failed,
        created_at=ordered[0].position,
        branch=branch if isinstance(branch, str) else None,
        index=DatagenItemId.parse(item_id).branch_idx or 0,
    )


def start_index(node: Node, row: Row, enclosing: str | None, selector: str | None) -> int | None:
    """The index at which ``row`` is the first row of a visit of ``node``; None if it is not one."""
    if isinstance(node, Selector):
        for child in node.children:
            found = start_index(child, row, enclosing, node.name)
            if found is not None:
                return found
        return None
    position = row.position
    if (
        position.step_name == node.name
        and position.step_kind is node.kind
        and position.enclosing_step == enclosing
        and position.selector_step == selector
        and (row.kind is RowKind.STARTED) == node.kind.is_driver
        and (row.kind is not RowKind.BIRTHS or isinstance(node, FanOut))
    ):
        return position.step_index
    return None


class Cursor:
    """Where the walk stands in a stream's rows."""

    def __init__(self, stream: RecordedStream | None) -> None:
        self._stream = stream
        self._rows = stream.rows if stream else []
        self._next = 0
        self._births = dict(stream.births) if stream else {}

    def peek(self) -> Row | None:
        """The next recorded row; None when the stream is live.

        Births that nothing has claimed come after the last row: their fan-out did not complete.
        """
        if self._next < len(self._rows):
            return self._rows[self._next]
        for position in self._births:
            return Row(RowKind.BIRTHS, position)
        return None

    def take(self, kind: RowKind, position: DatagenStreamPosition) -> None:
        """Step over the next row, which must be this one."""
        row = self.peek()
        if row is None or row.kind is not kind or row.position != position:
            self.mismatch(f"{kind.value} of {position}")
        self._next += 1

    def claim_births(self, position: DatagenStreamPosition) -> list[RecordedStream]:
        """The sub-items of one execution of a fan-out, in order."""
        return self._births.pop(position, [])

    def mismatch(self, expected: str) -> NoReturn:
        """The row at hand is not the one that the pipeline would have written."""
        item_id = self._stream.item_id if self._stream else "?"
        raise_mismatch(item_id, str(self.peek() or "no further row"), expected)


def raise_mismatch(item_id: str, found: str, expected: str) -> NoReturn:
    """Say what the log has, what the pipeline would have written, and what to do."""
    raise PipelineMismatchError(
        f"item {item_id!r}: the log has {found}, the pipeline expects {expected}; {_CURE}"
    )
