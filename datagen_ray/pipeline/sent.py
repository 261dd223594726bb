"""Items and outcomes on their way to and from a step that runs in another process.

Exceptions change on such a way: a cluster wraps them, and some do not pickle at all. So an outcome
is data, made where the step ran; whoever asked for the call raises what it carries.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from datagen_ray.pipeline.endings import NOT_THE_ITEMS_FAULT
from datagen_ray.pipeline.failures import FarError, FarTraceback, StepAborted, text_of
from datagen_ray.pipeline.item import FrozenDict, FrozenList, Item, LazyBlob


class SentBlob:
    """A blob that came along with its item; used as :class:`LazyBlob` is."""

    __slots__ = ("_bytes", "checksum")

    def __init__(self, data: bytes, checksum: str | None) -> None:
        self._bytes = data
        self.checksum = checksum

    @property
    def size(self) -> int:
        return len(self._bytes)

    async def load(self) -> bytes:
        return self._bytes

    def read(self) -> bytes:
        return self._bytes

    def __repr__(self) -> str:
        return f"<blob {self.size} bytes>"


class SentItem(Mapping[str, Any]):
    """The fields of an item, as :class:`Item` shows them, in another process."""

    __slots__ = ("_grows", "_values")

    def __init__(self, values: dict[str, Any], grows: frozenset[str]) -> None:
        self._values = values
        self._grows = grows

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._grows:
            return FrozenList()
        raise KeyError(f"{name!r} (the item has: {', '.join(sorted(self)) or 'no fields'})")

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentItem, (self._values, self._grows)

    def __repr__(self) -> str:
        return f"Item({', '.join(self)})"


async def sendable(item: Item) -> SentItem:
    """The item with its blobs loaded, since their log may be out of reach over there."""
    values = {name: await _loaded(item[name]) for name in item}
    return SentItem(values, item.append_fields)


async def _loaded(value: Any) -> Any:
    if isinstance(value, LazyBlob):
        return SentBlob(await value.load(), value.checksum)
    if isinstance(value, FrozenList):
        return FrozenList([await _loaded(inner) for inner in value])
    if isinstance(value, FrozenDict):
        return FrozenDict([(key, await _loaded(inner)) for key, inner in value.items()])
    return value


@dataclass(frozen=True)
class Outcome:
    """What became of one call: its result, or its exception with the traceback as text."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""

    def get(self) -> Any:
        """The result; or the exception is raised, with the far traceback as its cause."""
        if self.error is None:
            return self.result
        self.error.__cause__ = FarTraceback(self.trace)
        if isinstance(self.error, NOT_THE_ITEMS_FAULT):
            # Trouble of a log that the step used, over there, not of this one.
            raise StepAborted(f"{type(self.error).__name__}: {self.error}") from self.error
        raise self.error


class Wire(Protocol):
    """How outcomes become bytes; given by whoever owns the channel."""

    def dumps(self, value: Any) -> bytes: ...

    def loads(self, data: bytes) -> Any: ...


def packed_call(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], wire: Wire
) -> bytes:
    """Call a plain or an async function where no event loop runs; the outcome as bytes."""
    try:
        result = function(*args, **keywords)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except BaseException as error:  # noqa: BLE001 - carried to whoever asked for the call
        return packed_error(error, wire)
    return packed_result(result, wire)


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


def packed_result(result: Any, wire: Wire) -> bytes:
    """A result as an outcome; one that cannot be sent is a failure that says so."""
    try:
        return wire.dumps(Outcome(result))
    except Exception as error:  # noqa: BLE001 - pickling runs a user's code
        reason = f"{type(error).__name__}: {error}"
        return packed_error(
            TypeError(
                f"a {type(result).__name__} was returned that cannot be sent back ({reason}); "
                "return plain fields"
            ),
            wire,
        )


def packed_error(error: BaseException, wire: Wire) -> bytes:
    """The outcome of a call that raised, as bytes that are known to come apart again."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    stand_in = Outcome(error=FarError(type(error).__name__, text_of(error)), trace=trace)
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        # These would mean something to whatever carries the outcome.
        return wire.dumps(stand_in)
    try:
        data = wire.dumps(Outcome(error=error.with_traceback(None), trace=trace))
        wire.loads(data)
    except Exception:  # noqa: BLE001 - pickling runs a user's code, which may raise anything
        return wire.dumps(stand_in)
    return data
