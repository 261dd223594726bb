"""A codec: how values of one user type are stored, under an id that never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datagen_ray.errors import PipelineError
from datagen_ray.log.values import ValueKind

NATIVE: dict[Any, ValueKind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    bytes: "blob",
}
NATIVE_IDS = frozenset((*NATIVE.values(), "json"))


@dataclass(frozen=True)
class Codec:
    """How values of one user type are stored.

    ``encode(value)`` returns what a field of ``kind`` can hold; ``decode(stored, version)`` is
    given the version that wrote it, so that one codec reads all of its history. ``id`` must never
    change.
    """

    id: str
    version: int
    encode: Callable[[Any], Any]
    decode: Callable[[Any, int], Any]
    kind: ValueKind = "json"

    def __post_init__(self) -> None:
        if not self.id or self.id in NATIVE_IDS:
            raise PipelineError(f"codec id {self.id!r} is empty or a built-in one; choose another")
        if type(self.version) is not int or self.version < 1:
            raise PipelineError(f"codec {self.id!r}: version must be a whole number of at least 1")
        if self.kind not in NATIVE_IDS:
            raise PipelineError(f"codec {self.id!r}: {self.kind!r} is no value kind")
