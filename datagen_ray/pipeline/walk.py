"""One stream's walk through its part of the pipeline: replay first, then live.

Every ``_visit`` first looks at the next recorded row. While there is one the walk only checks that
it is the expected one; when there is none it calls user code and writes rows. See ``replay``.

Positions: every visit of a child slot of a frame takes one index, whether or not it writes a row;
a selector passes its index on. One counter for each frame name of a stream runs on when the frame
is entered again; a loop starts again after the last index at which a row was recorded.
"""

from __future__ import annotations

from typing import Any

from datagen_ray.errors import InternalError, PipelineError
from datagen_ray.log.events import DatagenItemStatus, DatagenStreamPosition
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.pipeline.endings import (
    Ending,
    StreamFailed,
    StreamFiltered,
)
from datagen_ray.pipeline.failures import MAX_MESSAGE_CHARS, redacted, repr_of
from datagen_ray.pipeline.fanout import run_fan_out
from datagen_ray.pipeline.item import Cell, Item
from datagen_ray.pipeline.nodes import (
    Conditional,
    FanOut,
    Loop,
    OnFailure,
    Router,
    Selector,
    Sequence,
)
from datagen_ray.pipeline.replay import RecordedStream, Row, RowKind, start_index
from datagen_ray.pipeline.results import Filtered
from datagen_ray.pipeline.steps import Node, Step
from datagen_ray.pipeline.stream import Stream


class StreamWalk(Stream):
    """One stream on its way through ``body``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counters: dict[str, int] = {}
        self._last_index: dict[str | None, int] = {}

    def spawn(
        self,
        *,
        body: Node,
        writer: DatagenStreamWriter,
        recorded: RecordedStream | None,
        cells: dict[str, Cell],
        parent: Item,
        on_failure: OnFailure,
    ) -> StreamWalk:
        """The walk of a sub-item, which reads through to the fields of ``parent``."""
        return StreamWalk(
            self.env,
            self.tally,
            place=self.place,
            body=body,
            writer=writer,
            recorded=recorded,
            cells=cells,
            parent=parent,
            on_failure=on_failure,
        )

    async def run(self) -> Ending:
        """Walk to the end, leave the place, and return when the end is durable.

        Raises storage trouble and ``PipelineMismatchError`` only.
        """
        ending = await self.walk()
        await self.emitter.finish()
        return ending

    async def walk(self) -> Ending:
        """Walk to the end: no user code is left to run, and the last rows are on their way.

        Whether they arrive is for the caller to find out, with ``emitter.finish()``.
        """
        try:
            await self._visit(self.body, 0, None, None)
            if self.cursor.peek() is not None:
                self.cursor.mismatch("the end of the item")
        except StreamFiltered as filtered:
            return self.end(
                DatagenItemStatus.FILTERED,
                position=filtered.position,
                error_type=Filtered.__name__,
                error_dump=redacted(filtered.reason, self.env.redact, MAX_MESSAGE_CHARS),
            )
        except StreamFailed as failure:
            return self.fail(failure)
        return self.end(DatagenItemStatus.COMPLETED)

    # -- visiting ---------------------------------------------------------------------------

    async def _visit(
        self, node: Node, index: int, enclosing: str | None, selector: str | None
    ) -> None:
        position = DatagenStreamPosition(node.name, node.kind, index, enclosing, selector)
        if isinstance(node, Selector):
            await self._select(node, position)
            return
        self._last_index[enclosing] = index
        if isinstance(node, Step):
            await self._leaf(node, position)
        elif isinstance(node, Sequence):
            self._open(position)
            await self._sequence(node, position)
            self._close(position)
        elif isinstance(node, Loop):
            self._open(position)
            await self._loop(node, position)
            self._close(position)
        elif isinstance(node, FanOut):
            await run_fan_out(self, node, position)
        else:
            raise InternalError(f"step {node.name!r} has the unknown kind {type(node).__name__}")

    async def _leaf(self, step: Step, position: DatagenStreamPosition) -> None:
        if self.cursor.peek() is not None:
            self.cursor.take(RowKind.COMPLETED, position)
            return
        await self.emitter.settle()
        self.tally.steps_executed += 1
        item = await self.item_or_fail(position)
        self.env.observe("step", self.item_id, position)
        try:
            result = await self.env.code.call_step(step, item, self.contexts(position))
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            self.raise_from_user(position, error)
        await self.complete(position, result)

    def _open(self, position: DatagenStreamPosition) -> None:
        if self.cursor.peek() is not None:
            self.cursor.take(RowKind.STARTED, position)
        else:
            self.emitter.queue([self.writer.step_started(position)])

    def _close(self, position: DatagenStreamPosition) -> None:
        if self.cursor.peek() is not None:
            self.cursor.take(RowKind.COMPLETED, position)
        else:
            self.emitter.queue(self.writer.step_completed(position), checkpoint=True)

    async def _sequence(self, node: Sequence, position: DatagenStreamPosition) -> None:
        closed = Row(RowKind.COMPLETED, position)
        index = self._first_index(node)
        for child in node.steps:
            if self.cursor.peek() == closed and not child.may_be_silent:
                # The frame was closed before this step was appended to the pipeline.
                self.env.notice(
                    f"step {child.name!r} was added to {node.name!r} after items had completed "
                    "it; it is skipped for those"
                )
                break
            await self._visit(child, index, node.name, None)
            index += 1
        self._counters[node.name] = index

    def _first_index(self, node: Sequence) -> int:
        """The index of this entry's first slot, as the next row tells where it is one of the frame.

        It is the counter, but for a pipeline that had fewer steps in this frame when earlier
        entries were recorded: steps appended since, if silent, are counted where they were not.
        """
        counter = self._counters.get(node.name, 0)
        row = self.cursor.peek()
        if row is None:
            return counter
        for slot, child in enumerate(node.steps):
            found = start_index(child, row, node.name, None)
            if found is not None and self._last_index.get(node.name, -1) < found - slot < counter:
                return found - slot
        return counter

    async def _loop(self, node: Loop, position: DatagenStreamPosition) -> None:
        closed = Row(RowKind.COMPLETED, position)
        first = self._last_index.get(node.name, -1) + 1
        index = first
        while True:
            row = self.cursor.peek()
            if row == closed:
                return
            if row is None and index == first and await self._needs_no_round(node, position):
                return
            if row is not None:
                found = start_index(node.body, row, node.name, None)
                # Only a body that may write nothing can have rounds that left no row.
                if (
                    found is None
                    or found < index
                    or (found > index and not node.body.may_be_silent)
                ):
                    self.cursor.mismatch(
                        f"round {index} of {position}: the start of {node.body.name!r}"
                    )
                index = found
            await self._visit(node.body, index, node.name, None)
            if self.cursor.peek() is None and await self._is_done(node, position, index - first):
                return
            index += 1

    async def _needs_no_round(self, node: Loop, position: DatagenStreamPosition) -> bool:
        if node.max_rounds == 0:
            return True
        return node.check_first and await self.decide(node.until, position, -1)

    async def _is_done(self, node: Loop, position: DatagenStreamPosition, round_: int) -> bool:
        if round_ + 1 >= node.max_rounds:
            return True
        return await self.decide(node.until, position, round_)

    async def _select(self, node: Selector, position: DatagenStreamPosition) -> None:
        chosen: Node | None
        row = self.cursor.peek()
        if row is not None:
            chosen = next(
                (
                    child
                    for child in node.children
                    if start_index(child, row, position.enclosing_step, node.name)
                    == position.step_index
                ),
                None,
            )
            if chosen is None and not node.may_be_silent:
                self.cursor.mismatch(f"the start of a child of {position}")
        else:
            chosen = await self._choose(node, position)
        if chosen is not None:
            await self._visit(chosen, position.step_index, position.enclosing_step, node.name)

    async def _choose(self, node: Selector, position: DatagenStreamPosition) -> Node | None:
        if isinstance(node, Conditional):
            return node.then if await self.decide(node.when, position) else node.otherwise
        if not isinstance(node, Router):
            raise InternalError(f"step {node.name!r} has the unknown kind {type(node).__name__}")
        key = await self.inline(node.key, position)
        try:
            chosen = node.routes.get(key, node.default)
        except Exception as error:  # noqa: BLE001 - a user's __hash__ may raise anything
            self.raise_from_user(position, error)
        if chosen is None:
            self.raise_from_user(
                position,
                PipelineError(
                    f"Router {node.name!r} has no route for {repr_of(key)} (it has: "
                    f"{', '.join(map(repr, node.routes))}); add it, or a default"
                ),
            )
        return chosen
