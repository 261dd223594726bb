"""What user code says back to the pipeline beside plain values."""

from __future__ import annotations

from dataclasses import dataclass
from types import GenericAlias
from typing import Any


class Filtered(Exception):
    """Raised by user code: this item is not wanted. It ends as ``filtered``, with the reason.

    >>> raise Filtered("too short")
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Permanent(Exception):
    """Raised by user code: trying again cannot help, so no retry policy applies."""


@dataclass(frozen=True)
class Append:
    """A value to be added to a field's list, where a plain value would replace the field.

    ``Append`` and ``Append[float]`` also declare, in a pipeline's ``fields``, that a field is a
    list that grows; such a field reads as ``[]`` before anything was added.
    """

    value: Any

    @classmethod
    def __class_getitem__(cls, element: Any) -> GenericAlias:
        # typing rebuilds an alias with its arguments as a tuple.
        return GenericAlias(cls, element if isinstance(element, tuple) else (element,))
