"""Which logs a pipeline can leave, said once more and apart from the executor.

A matcher with backtracking: it tries every choice of every selector and loop, and asks whether
some choice explains all rows of a stream. It knows nothing of how a resume finds its way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.fold import fold_datagen_events
from datagen_ray.pipeline.nodes import Branch, FanOut, Loop, Selector, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import Node, Step


class State(NamedTuple):
    """How many rows are explained, and the counters."""

    at: int
    counters: tuple[tuple[str, int], ...]
    cut: bool = False

    def counter(self, name: str) -> int:
        return dict(self.counters).get(name, 0)

    def count(self, name: str, value: int) -> State:
        return self._replace(counters=tuple(sorted({**dict(self.counters), name: value}.items())))


Position = tuple[str, str, int, str | None, str | None]
Row = tuple[str, Position]


class Matcher:
    def __init__(self, rows: list[Row], ended: bool) -> None:
        self.rows = rows
        self.ended = ended

    def matches(self, body: Node) -> bool:
        for state in self.node(body, 0, None, None, State(0, ())):
            if state.at == len(self.rows) and (not self.ended or not state.cut):
                return True
        return False

    def row(self, kind: str, position: Position, state: State) -> Iterator[State]:
        if state.cut:
            yield state
        elif state.at < len(self.rows):
            if self.rows[state.at] == (kind, position):
                yield state._replace(at=state.at + 1)
        elif not self.ended:
            yield state._replace(cut=True)

    def node(
        self, node: Node, index: int, enclosing: str | None, selector: str | None, state: State
    ) -> Iterator[State]:
        if state.cut:
            yield state
            return
        position = (node.name, node.kind.value, index, enclosing, selector)
        if isinstance(node, Selector):
            for child in node.children:
                yield from self.node(child, index, enclosing, node.name, state)
            if node.may_be_silent:
                yield state
            if not self.ended and state.at == len(self.rows):
                yield state._replace(cut=True)
        elif isinstance(node, (Step, FanOut)):
            yield from self.row("STEP_COMPLETED", position, state)
        elif isinstance(node, Sequence):
            for opened in self.row("STEP_STARTED", position, state):
                for done in self.slots(node, 0, opened.counter(node.name), opened):
                    yield from self.row("STEP_COMPLETED", position, done)
        elif isinstance(node, Loop):
            for opened in self.row("STEP_STARTED", position, state):
                first = opened.counter(node.name)
                if node.check_first:
                    yield from self.row("STEP_COMPLETED", position, opened)
                for done in self.rounds(node, first, node.max_rounds, opened):
                    yield from self.row("STEP_COMPLETED", position, done)

    def slots(self, node: Sequence, slot: int, index: int, state: State) -> Iterator[State]:
        if slot == len(node.steps):
            yield state.count(node.name, index)
            return
        for after in self.node(node.steps[slot], index, node.name, None, state):
            yield from self.slots(node, slot + 1, index + 1, after)

    def rounds(self, node: Loop, index: int, left: int, state: State) -> Iterator[State]:
        if left == 0:
            yield state
            return
        for after in self.node(node.body, index, node.name, None, state):
            wrote = after.at > state.at or after.cut
            counted = after.count(node.name, index + 1) if wrote else after
            yield counted
            if left > 1:
                yield from self.rounds(node, index + 1, left - 1, counted)


def impossible(pipeline: Pipeline, events: list[DatagenEvent]) -> str | None:
    """Why no walk of the pipeline can have left these events; None when one can."""
    by_item: dict[str, list[DatagenEvent]] = defaultdict(list)
    for event in events:
        by_item[event.item_id].append(event)
    nodes = {node.name: node for node in pipeline.nodes() if isinstance(node, FanOut)}
    for item_id, stream in by_item.items():
        stream.sort(key=lambda event: event.item_seq)
        if [event.item_seq for event in stream] != list(range(1, len(stream) + 1)):
            return f"{item_id}: gaps in item_seq"
        folded = fold_datagen_events(stream)
        if folded is None:
            return f"{item_id}: never started"
        created = stream[0].position
        body = pipeline.body
        if created is not None:
            node = nodes[created.step_name]
            if isinstance(node, Branch):
                body = node.branches[folded.query_tags["branch"]]
            else:
                body = node.children[0]
        rows: list[Row] = [
            (str(e.event_type), _position(e))
            for e in stream
            if e.event_type in (DatagenEventType.STEP_STARTED, DatagenEventType.STEP_COMPLETED)
        ]
        if len(set(rows)) != len(rows):
            return f"{item_id}: a position stands twice"
        if rows[0] != ("STEP_COMPLETED", ("input", "root", 0, None, None)):
            return f"{item_id}: does not begin with its inputs"
        last = stream[-1]
        terminals = [e for e in stream if e.event_type is DatagenEventType.TERMINAL]
        if terminals and terminals != [last]:
            return f"{item_id}: something follows TERMINAL"
        ended = bool(terminals) and str(last.status) == "completed" and last.error_type is None
        if not Matcher(rows[1:], ended).matches(body):
            return f"{item_id}: no choice explains its rows: {rows}"
        problem = _check_births(item_id, rows, by_item)
        if problem:
            return problem
    return None


def _check_births(
    item_id: str, rows: list[Row], by_item: dict[str, list[DatagenEvent]]
) -> str | None:
    completed = [position for kind, position in rows if kind == "STEP_COMPLETED"]
    open_fan_outs = set()
    numbers: dict[str, set[int]] = defaultdict(set)
    for child_id, stream in by_item.items():
        if child_id.rpartition("/")[0] != item_id:
            continue
        name, _, number = child_id.rpartition("/")[2].rpartition(":")
        numbers[name].add(int(number))
        born_at = _position(stream[0])
        if born_at not in completed:
            open_fan_outs.add(born_at)
        elif not any(e.event_type is DatagenEventType.TERMINAL for e in stream):
            return f"{child_id}: runs on, though its fan-out completed"
    if len(open_fan_outs) > 1:
        return f"{item_id}: sub-items of two open fan-outs"
    for name, found in numbers.items():
        if found != set(range(len(found))):
            return f"{item_id}: sub-items of {name} are numbered {sorted(found)}"
    return None


def _position(event: DatagenEvent) -> Position:
    return (
        event.step_name or "",
        str(event.step_kind),
        -1 if event.step_index is None else event.step_index,
        event.enclosing_step,
        event.selector_step,
    )
