"""An item as user code sees it: a mapping of decoded fields that cannot be changed.

What a step sees is always what was stored, decoded: a step that would change a list in place, or
rely on an object being the very one that was returned, would behave differently after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from datagen_ray.log.values import DatagenBlobValue, DatagenValue
from datagen_ray.pipeline.codecs import FieldTypes, Stored, is_native
from datagen_ray.pipeline.endings import NOT_THE_ITEMS_FAULT, OwnTrouble
from datagen_ray.pipeline.sink import BlobLoader

_ABSENT = object()


class FrozenList(list[Any]):
    """A list that refuses to change; ``list(x)`` and ``copy.deepcopy(x)`` make one that does."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("an item's values are read-only; copy the list and return the copy")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [thaw(value) for value in self]

    def copy(self) -> list[Any]:
        return list(self)


class FrozenDict(dict[str, Any]):
    """A dict that refuses to change; ``dict(x)`` and ``copy.deepcopy(x)`` make one that does."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("an item's values are read-only; copy the dict and return the copy")

    pop = popitem = clear = update = setdefault = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: thaw(value) for key, value in self.items()}

    def copy(self) -> dict[str, Any]:
        return dict(self)


def freeze(value: Any) -> Any:
    """JSON-like values, deeply read-only; anything else as it is."""
    if type(value) is dict:
        return FrozenDict((key, freeze(inner)) for key, inner in value.items())
    if type(value) is list:
        return FrozenList([freeze(inner) for inner in value])
    return value


def thaw(value: Any) -> Any:
    """A changeable copy of a frozen value."""
    if isinstance(value, dict):
        return {key: thaw(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [thaw(inner) for inner in value]
    return value


class LazyBlob:
    """A blob whose bytes are fetched when they are asked for.

    ``read()`` blocks, so it belongs in plain functions; async ones ``await blob.load()``.
    """

    __slots__ = ("_blob", "_bytes", "_event_id", "_loader", "_loop")

    def __init__(
        self,
        event_id: str,
        blob: DatagenBlobValue,
        loader: BlobLoader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._event_id = event_id
        self._blob = blob
        self._bytes = blob.bytes
        self._loader = loader
        self._loop = loop

    @property
    def size(self) -> int | None:
        return self._blob.size

    @property
    def checksum(self) -> str | None:
        return self._blob.checksum

    async def load(self) -> bytes:
        """The bytes."""
        if self._bytes is None:
            try:
                self._bytes = await self._loader.load(self._event_id)
            except NOT_THE_ITEMS_FAULT as error:
                # User code stands between here and the walk, and may raise such errors itself.
                raise OwnTrouble(str(error)) from error
        return self._bytes

    def read(self) -> bytes:
        """The bytes, from a thread. In an event loop it would block everybody, so it refuses.

        It refuses there even when the bytes are at hand: after a resume they would not be.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("read() blocks; in an async function use: await blob.load()")
        if self._bytes is None:
            self._bytes = asyncio.run_coroutine_threadsafe(self.load(), self._loop).result()
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a lazy blob does not leave its process; pass its bytes")

    def __repr__(self) -> str:
        return f"<blob {self.size} bytes>"


class Reader:
    """What decoding needs beside the recorded values: types, blobs and the event loop."""

    __slots__ = ("blobs", "loop", "types")

    def __init__(
        self, types: FieldTypes, blobs: BlobLoader, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.types = types
        self.blobs = blobs
        self.loop = loop


class Cell:
    """The recorded state of one field: its one value, or all that was appended to it."""

    __slots__ = ("_decoded", "append", "stored")

    def __init__(self, append: bool, stored: tuple[Stored, ...]) -> None:
        self.append = append
        self.stored = stored
        self._decoded: Any = _ABSENT

    def plus(self, stored: Stored) -> Cell:
        """The same field with one more appended value."""
        return Cell(True, (*self.stored, stored))

    @property
    def holds_blob(self) -> bool:
        return any(stored.value.kind == "blob" for stored in self.stored)

    async def load_bytes(self, reader: Reader) -> None:
        """Fetch the blobs that codecs have to see, so that reading the field never has to wait."""
        loaded = list(self.stored)
        for index, stored in enumerate(loaded):
            raw = stored.value.raw
            if (
                isinstance(raw, DatagenBlobValue)
                and raw.bytes is None
                and reader.types.needs_bytes(stored)
            ):
                data = await reader.blobs.load(stored.event_id)
                loaded[index] = stored._replace(value=DatagenValue.of(data))
        self.stored = tuple(loaded)

    def read(self, name: str, reader: Reader) -> Any:
        if self._decoded is not _ABSENT:
            return self._decoded
        values = [self._one(name, stored, reader) for stored in self.stored]
        value = FrozenList(values) if self.append else values[-1]
        # What a user's codec makes may be changeable, so it is made anew at each read.
        if all(is_native(stored.field_type) for stored in self.stored):
            self._decoded = value
        return value

    def _one(self, name: str, stored: Stored, reader: Reader) -> Any:
        raw = stored.value.raw
        if isinstance(raw, DatagenBlobValue):
            if not reader.types.needs_bytes(stored):
                return LazyBlob(stored.event_id, raw, reader.blobs, reader.loop)
            return reader.types.decode(name, stored, raw.bytes)
        return freeze(reader.types.decode(name, stored))


class Item(Mapping[str, Any]):
    """The fields of an item at one moment; a sub-item reads its parent's through."""

    __slots__ = ("_cells", "_parent", "_reader")

    def __init__(
        self, cells: Mapping[str, Cell], reader: Reader, parent: Item | None = None
    ) -> None:
        self._cells = cells
        self._reader = reader
        self._parent = parent

    def __getitem__(self, name: str) -> Any:
        cell = self._cells.get(name)
        if cell is not None:
            return cell.read(name, self._reader)
        if self._parent is not None:
            return self._parent[name]
        if self._reader.types.is_append(name):
            return FrozenList()
        raise KeyError(f"{name!r} (the item has: {', '.join(sorted(self)) or 'no fields'})")

    def __contains__(self, name: object) -> bool:
        return name in self._cells or (self._parent is not None and name in self._parent)

    def __iter__(self) -> Iterator[str]:
        yield from self._cells
        if self._parent is not None:
            yield from (name for name in self._parent if name not in self._cells)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __repr__(self) -> str:
        return f"Item({', '.join(self)})"

    @property
    def append_fields(self) -> frozenset[str]:
        """The fields that were declared to grow; they read as ``[]`` while they are absent."""
        types = self._reader.types
        return frozenset(name for name in types.declared if types.is_append(name))

    @property
    def holds_blob(self) -> bool:
        """Whether reading some field may have to fetch bytes."""
        if any(cell.holds_blob for cell in self._cells.values()):
            return True
        return self._parent is not None and self._parent.holds_blob

    async def load_bytes(self) -> None:
        """Fetch the blobs that codecs have to decode, here and in the parents."""
        for cell in self._cells.values():
            if cell.holds_blob:
                await cell.load_bytes(self._reader)
        if self._parent is not None:
            await self._parent.load_bytes()


class SubItem(Mapping[str, Any]):
    """A finished sub-item, as a reducer gets it: the fields that it set itself, and how it ended.

    ``status`` is ``completed``, ``filtered`` or ``failed``; ``reason`` says why it was dropped or
    what it failed of. ``dropped`` is what to skip: filtered, or failed under ``drop``.
    """

    __slots__ = ("_item", "branch", "dropped", "index", "item_id", "reason", "status")

    def __init__(
        self,
        item: Item,
        *,
        item_id: str,
        index: int,
        branch: str | None,
        status: str,
        dropped: bool,
        reason: str | None,
    ) -> None:
        self._item = item
        self.item_id = item_id
        self.index = index
        self.branch = branch
        self.status = status
        self.dropped = dropped
        self.reason = reason

    async def load_bytes(self) -> None:
        """Fetch the blobs that codecs have to decode."""
        await self._item.load_bytes()

    @property
    def ok(self) -> bool:
        return self.status == "completed"

    def __getitem__(self, name: str) -> Any:
        return self._item[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._item)

    def __len__(self) -> int:
        return len(self._item)

    def __repr__(self) -> str:
        return f"<sub-item {self.item_id} {self.status}>"
