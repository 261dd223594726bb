"""From what user code returns to field updates, and from recorded updates to fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from datagen_ray.errors import CodecError, ValueTooLargeError
from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.values import DatagenFieldUpdate
from datagen_ray.pipeline import codecs
from datagen_ray.pipeline.codecs import Stored
from datagen_ray.pipeline.item import Cell, LazyBlob, Reader
from datagen_ray.pipeline.results import Append


class Pairs(list[tuple[str, Any]]):
    """Fields and values made by the package itself, where one field may come more than once."""


async def result_updates(reader: Reader, step_name: str, result: Any) -> list[DatagenFieldUpdate]:
    """The updates that a step's result stands for; :class:`CodecError` for a wrong one."""
    if result is None:
        return []
    if isinstance(result, Pairs):
        return await _updates(reader, result)
    if not isinstance(result, Mapping):
        close = getattr(result, "close", None)
        if close is not None and hasattr(result, "cr_frame"):
            close()  # a coroutine that nobody awaits would only add a warning
        raise CodecError(
            f"step {step_name!r} returned a {type(result).__name__}; return a dict of fields, or "
            "None"
        )
    return await _updates(reader, result.items())


async def input_updates(reader: Reader, inputs: Mapping[Any, Any]) -> list[DatagenFieldUpdate]:
    """The updates that an item is born with; a field declared to grow is given as a list."""
    pairs: list[tuple[Any, Any]] = []
    for name, value in inputs.items():
        if isinstance(name, str) and reader.types.is_append(name) and not isinstance(value, Append):
            if not isinstance(value, (list, tuple)):
                raise CodecError(
                    f"input {name!r} is declared to grow, so it is a list, not a "
                    f"{type(value).__name__}"
                )
            pairs += [(name, Append(element)) for element in value]
        else:
            pairs.append((name, value))
    return await _updates(reader, pairs)


async def _updates(reader: Reader, pairs: Iterable[tuple[Any, Any]]) -> list[DatagenFieldUpdate]:
    updates = []
    for name, value in pairs:
        if isinstance(value, LazyBlob):
            value = await value.load()
        elif isinstance(value, Append) and isinstance(value.value, LazyBlob):
            value = Append(await value.value.load())
        updates.append(reader.types.update(name, value))
    size = sum(map(codecs.value_bytes, updates))
    if size > codecs.MAX_BATCH_BYTES:
        raise ValueTooLargeError(
            f"the fields take {size} bytes together, more than {codecs.MAX_BATCH_BYTES}; set them "
            "in several steps, or store them elsewhere and keep their addresses"
        )
    return updates


def merged(cells: Mapping[str, Cell], events: Iterable[DatagenEvent]) -> dict[str, Cell]:
    """The fields after a checkpoint. A new dict: views that were handed out stay as they were."""
    joined = dict(cells)
    for event in events:
        if event.value is None or event.field_name is None or event.field_type is None:
            continue
        stored = Stored(event.value, event.field_type, event.codec_version or 0, event.event_id)
        known = joined.get(event.field_name)
        grows = event.event_type is DatagenEventType.FIELD_APPEND
        if grows and known is not None:
            joined[event.field_name] = known.plus(stored)
        else:
            joined[event.field_name] = Cell(grows, (stored,))
    return joined
