"""Fan-outs: sub-items are born together, walk side by side, and are reduced.

The births of one execution are one append, so a resume finds all of them or none and never splits
twice. They carry the full position of the execution that made them; that is what ties them to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datagen_ray.errors import (
    InputError,
    InternalError,
    PipelineError,
)
from datagen_ray.log.events import DatagenEvent, DatagenItemStatus, DatagenStreamPosition
from datagen_ray.log.fold import FoldedDatagenItem
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.pipeline.births import Planned, birth_events, check_births, plan_births
from datagen_ray.pipeline.codecs import value_bytes
from datagen_ray.pipeline.endings import Drained, Ending
from datagen_ray.pipeline.failures import FailureDetails
from datagen_ray.pipeline.fields import Pairs, input_updates, merged
from datagen_ray.pipeline.item import Item, SubItem
from datagen_ray.pipeline.nodes import Branch, FanOut, MapReduce, SubPipeline
from datagen_ray.pipeline.replay import (
    BRANCH_TAG,
    RecordedStream,
    Row,
    RowKind,
    raise_mismatch,
    start_index,
)
from datagen_ray.pipeline.results import Append, Filtered
from datagen_ray.pipeline.steps import Node

if TYPE_CHECKING:
    from datagen_ray.pipeline.walk import StreamWalk


@dataclass
class _Child:
    """One sub-item: a walk to make, or an end that was recorded."""

    item_id: str
    index: int
    branch: str | None
    walk: StreamWalk | None = None
    item: Item | None = None
    ending: Ending | None = None

    def finished(self) -> SubItem:
        """How it ended, told by its TERMINAL row alone, so that a resume tells the same."""
        if self.walk is not None:
            self.item = self.walk.own_item()
        if self.ending is None or self.ending.terminal is None or self.item is None:
            raise InternalError(f"sub-item {self.item_id!r} is reduced before its end")
        row = self.ending.terminal
        if row.error_type is None:
            status = "completed"
        else:
            status = "filtered" if row.error_type == Filtered.__name__ else "failed"
        return SubItem(
            self.item,
            item_id=self.item_id,
            index=self.index,
            branch=self.branch,
            status=status,
            dropped=row.status is DatagenItemStatus.FILTERED,
            reason=row.error_dump,
        )


async def run_fan_out(walk: StreamWalk, node: FanOut, position: DatagenStreamPosition) -> None:
    """One execution of a fan-out, at ``position`` of the parent's stream."""
    row = walk.cursor.peek()
    if row == Row(RowKind.COMPLETED, position):
        walk.cursor.take(RowKind.COMPLETED, position)
        _count(walk, node, walk.cursor.claim_births(position))
        return
    if row is None:
        children = await _give_birth(walk, node, position)
    elif row == Row(RowKind.BIRTHS, position):
        recorded = walk.cursor.claim_births(position)
        _count(walk, node, recorded)
        parent = await walk.item_or_fail(position)
        children = [_resumed(walk, node, stream, parent) for stream in recorded]
    else:
        walk.cursor.mismatch(f"births of sub-items, or STEP_COMPLETED, of {position}")
    await _run_all(walk, children)
    _stop_if_failed(walk, node, position, children)
    await walk.complete(position, await _reduce(walk, node, position, children))


def _count(walk: StreamWalk, node: FanOut, recorded: Iterable[RecordedStream]) -> None:
    """Numbers of sub-items go on after those of earlier executions."""
    for stream in recorded:
        known = walk.next_sub_item.get(node.name, 0)
        walk.next_sub_item[node.name] = max(known, stream.index + 1)


# -- birth ----------------------------------------------------------------------------------


async def _give_birth(
    walk: StreamWalk, node: FanOut, position: DatagenStreamPosition
) -> list[_Child]:
    try:
        plan = await plan_births(walk, node, position)
        events, children = await _born(walk, node, position, plan)
        if events:
            await walk.emitter.commit(events, checkpoint=True)
    except Exception as error:  # noqa: BLE001 - splits are user code and may raise anything
        walk.raise_from_user(position, error)
    return children


async def _born(
    walk: StreamWalk,
    node: FanOut,
    position: DatagenStreamPosition,
    plan: list[Planned],
) -> tuple[list[DatagenEvent], list[_Child]]:
    env = walk.env
    first = walk.next_sub_item.get(node.name, 0)
    own_id = DatagenItemId.parse(walk.item_id)
    parent = await walk.item()
    events: list[DatagenEvent] = []
    children: list[_Child] = []
    size = 0
    for index, (branch, body, inputs) in enumerate(plan, start=first):
        updates = await input_updates(env.reader, inputs)
        size += sum(map(value_bytes, updates))
        check_births(node, size, len(events))
        writer = DatagenStreamWriter.open(
            str(own_id.child(node.name, index)),
            run_id=env.run_id,
            writer_epoch=env.sink.writer_epoch,
            query_tags=None if branch is None else {BRANCH_TAG: branch},
            now=env.now,
        )
        born = birth_events(writer, updates, position)
        events += born
        child_walk = walk.spawn(
            body=body,
            writer=writer,
            recorded=None,
            cells=merged({}, born),
            parent=parent,
            on_failure=node.on_failure,
        )
        children.append(_Child(writer.item_id, index, branch, walk=child_walk))
    if children:
        walk.next_sub_item[node.name] = first + len(children)
    return events, children


# -- resume ---------------------------------------------------------------------------------


def _resumed(walk: StreamWalk, node: FanOut, recorded: RecordedStream, parent: Item) -> _Child:
    body = _body_of(node, recorded)
    child = _Child(recorded.item_id, recorded.index, recorded.branch)
    if recorded.terminal is not None:
        _check_ended(body, recorded)
        child.ending = Ending(recorded.terminal, None)
        child.item = Item(recorded.cells(), walk.env.reader)
        return child
    child.walk = walk.spawn(
        body=body,
        writer=resumed_writer(walk, recorded.folded),
        recorded=recorded,
        cells=recorded.cells(),
        parent=parent,
        on_failure=node.on_failure,
    )
    return child


def resumed_writer(walk: StreamWalk, folded: FoldedDatagenItem) -> DatagenStreamWriter:
    """A writer that goes on where the recorded rows end."""
    env = walk.env
    return DatagenStreamWriter.resume(
        folded, run_id=env.run_id, writer_epoch=env.sink.writer_epoch, now=env.now
    )


def _body_of(node: FanOut, recorded: RecordedStream) -> Node:
    body: Node | None = None
    if isinstance(node, Branch):
        body = node.branches.get(recorded.branch or "")
    elif recorded.branch is None:
        body = node.children[0]
    if body is None:
        raise_mismatch(
            recorded.item_id,
            f"a sub-item of the branch {recorded.branch!r}"
            if recorded.branch is not None
            else "a sub-item of no branch",
            f"a branch of {node.name!r}",
        )
    return body


def _check_ended(body: Node, recorded: RecordedStream) -> None:
    """An ended sub-item is not walked again, but must have begun as its body would begin."""
    if recorded.rows:
        fits = start_index(body, recorded.rows[0], None, None) == 0
    else:
        # Without a row: a selector chose nothing, or the first step filtered or failed.
        ended = recorded.terminal
        fits = body.may_be_silent or (ended is not None and ended.error_type is not None)
    if not fits:
        found = str(recorded.rows[0]) if recorded.rows else "its end after its inputs"
        raise_mismatch(recorded.item_id, found, f"the start of {body.name!r}")


# -- running and reducing -------------------------------------------------------------------


async def _run_all(parent: StreamWalk, children: list[_Child]) -> None:
    """Walk all that have not ended. Siblings of one that fails walk on to their own ends."""
    running = [child for child in children if child.walk is not None]
    if not running:
        return

    async def run(child: _Child, walk: StreamWalk) -> None:
        child.ending = await walk.run()

    for _ in running:
        parent.place.join()
    parent.place.leave()
    await all_or_error([run(child, child.walk) for child in running if child.walk is not None])
    await parent.place.enter()


async def all_or_error(calls: list[Coroutine[Any, Any, None]]) -> None:
    """Await all; on an error or a cancellation stop the others and wait until they stopped.

    One that is drained stops none: the steps that run beside it are to end.
    """
    if len(calls) == 1:
        await calls[0]
        return
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() or _is_error(task.exception()) for task in done):
                break
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # The first real error: the others may only have been cancelled because of it.
    for error in errors:
        if _is_error(error) and not isinstance(error, asyncio.CancelledError):
            raise error
    if errors:
        raise errors[0]


def _is_error(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Drained)


def _stop_if_failed(
    walk: StreamWalk, node: FanOut, position: DatagenStreamPosition, children: list[_Child]
) -> None:
    for child in children:
        if child.ending is None:
            raise InternalError(f"sub-item {child.item_id!r} has no end")
        if child.ending.terminal is None:
            details = child.ending.details or FailureDetails("InternalError", "no details", "")
            walk.raise_failed_below(position, details)
        if isinstance(node, SubPipeline):
            ended = child.finished()
            if ended.dropped:
                walk.raise_from_user(position, Filtered(ended.reason or ""))


async def _reduce(
    walk: StreamWalk, node: FanOut, position: DatagenStreamPosition, children: list[_Child]
) -> Any:
    results = [child.finished() for child in children]
    if walk.env.reader.types.has_blob_codecs:
        for result in results:
            await result.load_bytes()
    if isinstance(node, SubPipeline):
        try:
            return _outputs(walk, node, results[0])
        except InputError as error:
            walk.raise_from_user(position, error)
    reduce = node.reduce if isinstance(node, (MapReduce, Branch)) else None
    if reduce is None:
        return {
            result.branch: None if result.dropped else dict(result.items()) for result in results
        }
    await walk.emitter.settle()
    code = walk.env.code
    item = await walk.item_or_fail(position)
    args = (results,) if code.shape(reduce).positional == 1 else (item, results)
    walk.env.observe("reduce", walk.item_id, position)
    try:
        return await code.call_heavy(reduce, args, walk.contexts(position)(0))
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        walk.raise_from_user(position, error)


def _outputs(walk: StreamWalk, node: SubPipeline, ended: SubItem) -> Pairs:
    pairs = Pairs()
    for name in node.outputs:
        grows = walk.env.reader.types.is_append(name)
        if name not in ended and not grows:
            raise PipelineError(
                f"SubPipeline {node.name!r} ended without its output {name!r} "
                f"(it set: {', '.join(sorted(ended)) or 'nothing'}); set it in every case"
            )
        if grows:
            pairs += [(name, Append(value)) for value in ended[name]]
        else:
            pairs.append((name, ended[name]))
    return pairs
