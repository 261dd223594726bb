"""How sub-items, and roots, come into the log: planned, measured, and in one append."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from datagen_ray.errors import CodecError, InternalError, ValueTooLargeError
from datagen_ray.log.events import DatagenEvent, DatagenStreamPosition
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.log.values import DatagenFieldUpdate
from datagen_ray.pipeline.codecs import MAX_BATCH_BYTES
from datagen_ray.pipeline.nodes import Branch, FanOut, MapReduce, SubPipeline
from datagen_ray.pipeline.replay import INPUT_POSITION
from datagen_ray.pipeline.steps import Node

if TYPE_CHECKING:
    from datagen_ray.pipeline.walk import StreamWalk

MAX_SUB_ITEMS = 10_000
MAX_BIRTH_BYTES = MAX_BATCH_BYTES
MAX_BIRTH_ROWS = 60_000
"""The births of one execution are one batch, and a batch is never split."""


class Planned(NamedTuple):
    """One sub-item to be."""

    branch: str | None
    body: Node
    inputs: Mapping[str, Any]


async def plan_births(
    walk: StreamWalk, node: FanOut, position: DatagenStreamPosition
) -> list[Planned]:
    """What is to be born, from the branches or from the user's split; nothing is written yet."""
    if isinstance(node, Branch):
        return [Planned(name, body, {}) for name, body in node.branches.items()]
    if isinstance(node, SubPipeline):
        return [Planned(None, node.body, {})]
    if not isinstance(node, MapReduce):
        raise InternalError(f"step {node.name!r} has the unknown kind {type(node).__name__}")
    await walk.emitter.settle()
    item = await walk.item()
    ctx = walk.contexts(position)(0)
    walk.env.observe("split", walk.item_id, position)
    inputs = await walk.env.code.call_heavy(node.split, (item,), ctx, most=MAX_SUB_ITEMS)
    if not isinstance(inputs, list):
        raise CodecError(
            f"the split of {node.name!r} returned a {type(inputs).__name__}; return a list with "
            "one dict of inputs a sub-item"
        )
    if len(inputs) > MAX_SUB_ITEMS:
        raise ValueTooLargeError(
            f"the split of {node.name!r} returned more than {MAX_SUB_ITEMS} sub-items; split in "
            "two levels"
        )
    for index, given in enumerate(inputs):
        if not isinstance(given, Mapping):
            raise CodecError(
                f"the split of {node.name!r} returned a {type(given).__name__} for sub-item "
                f"{index}; return a dict of inputs for each"
            )
    return [Planned(None, node.each, given) for given in inputs]


def check_births(node: FanOut, size_bytes: int, rows: int) -> None:
    """Refuse more than one append can hold."""
    if size_bytes > MAX_BIRTH_BYTES or rows > MAX_BIRTH_ROWS:
        raise ValueTooLargeError(
            f"the sub-items of {node.name!r} take more than {MAX_BIRTH_BYTES} bytes or "
            f"{MAX_BIRTH_ROWS} rows, too many to be born at once; split in two levels, and leave "
            "in the item what the sub-items can read from it"
        )


def birth_events(
    writer: DatagenStreamWriter,
    updates: list[DatagenFieldUpdate],
    position: DatagenStreamPosition | None = None,
) -> list[DatagenEvent]:
    """ITEM_CREATED, the inputs and their STEP_COMPLETED, for one append."""
    created = writer.item_created()
    if position is not None:
        created = replace(created, **position.to_dict())
    return [created, *writer.step_completed(INPUT_POSITION, updates)]
