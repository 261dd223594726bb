"""Item ids and event ids: composed by the client, without asking the store.

An item id is a path. A root id is the key of a source row (``5``); every fan-out adds one
``step:index`` segment (``5/solve_twice:0/judge:1``). An event id is a UUID derived from what the
event is about, so that a retry of the same write carries the same ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from uuid import NAMESPACE_OID

from datagen_ray.errors import InvalidEventError, InvalidItemIdError

_sha1: Callable[[bytes], Any]
try:
    # Python's own: for texts this short it takes half the time of OpenSSL's.
    from _sha1 import sha1 as _sha1  # type: ignore[import-not-found, no-redef]
except ImportError:
    _sha1 = partial(hashlib.sha1, usedforsecurity=False)

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
ORDINAL_MAX = 2**32 - 1
"""An event's ordinal within its checkpoint is a u32 in the shared log format."""

_BRANCH_INDEX = re.compile(r"[+-]?[0-9]+\Z", re.ASCII)
_CANONICAL_INDEX = re.compile(r"(?:0|-?[1-9][0-9]*)\Z", re.ASCII)
_ESCAPES = {"%": "%25", "/": "%2F", ":": "%3A"}
_UNSAFE = re.compile(r"[%/:]")
_NAMESPACE = NAMESPACE_OID.bytes
_VARIANT = {f"{digit:x}": f"{digit & 0x3 | 0x8:x}" for digit in range(16)}
"""The hex digit of a UUID that holds its variant, by what the hash has there."""


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: _ESCAPES[match.group()], text)


def _encodable(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidItemIdError(
            f"{what} must be a string, not {type(text).__name__}", code="wrong_type"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidItemIdError(
            f"{what} {text!r} holds a lone surrogate; replace it, ids are stored as UTF-8",
            code="not_utf8",
        ) from error
    return text


def _index(value: object) -> int:
    if not isinstance(value, int):
        raise InvalidItemIdError(
            f"branch index must be an integer, not {type(value).__name__}", code="wrong_type"
        )
    number = int(value)
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidItemIdError(f"branch index {number} does not fit 64 bits", code="out_of_range")
    return number


@dataclass(frozen=True, slots=True)
class DatagenItemId:
    """The identity of one item: a root key and the fan-out segments below it.

    ``str(item_id)`` is the stored path; two ids are equal when their paths are.

    Example::

        root = DatagenItemId.from_source_key("5")
        child = root.child("solve_twice", 0)       # 5/solve_twice:0
        child.parent == root
    """

    root_key: str
    segments: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_source_key(cls, key: str) -> DatagenItemId:
        """The root id of a source row.

        ``/``, ``:`` and ``%`` are percent-encoded, so any non-empty key is a safe root. Raises
        :class:`InvalidItemIdError` for an empty key or one that UTF-8 cannot hold.
        """
        if not _encodable(key, "source key"):
            raise InvalidItemIdError(
                "source key is empty; give every row a non-empty key", code="item_id_empty_root"
            )
        return cls(_escape(key))

    @classmethod
    def parse(cls, path: str) -> DatagenItemId:
        """The id that a stored path spells. Spellings such as ``x:01`` come back as ``x:1``.

        Raises :class:`InvalidItemIdError` with ``code`` ``item_id_empty_root``,
        ``item_id_malformed_segment`` or ``item_id_bad_branch_index``.
        """
        root, *rest = _encodable(path, "item id").split("/")
        if not root:
            raise InvalidItemIdError(
                f"item id {path!r} has an empty root; start it with the source key",
                code="item_id_empty_root",
            )
        segments: list[tuple[str, int]] = []
        for segment in rest:
            name, colon, index = segment.partition(":")
            if not colon:
                raise InvalidItemIdError(
                    f"item id {path!r} has the segment {segment!r}; write it as step:index",
                    code="item_id_malformed_segment",
                )
            if not _BRANCH_INDEX.match(index) or not INT64_MIN <= int(index) <= INT64_MAX:
                raise InvalidItemIdError(
                    f"item id {path!r} has the branch index {index!r}; use a 64-bit integer",
                    code="item_id_bad_branch_index",
                )
            if not name:
                raise InvalidItemIdError(
                    f"item id {path!r} has a segment without a step name",
                    code="item_id_malformed_segment",
                )
            segments.append((name, int(index)))
        return cls(root, tuple(segments))

    def child(self, step: str, index: int) -> DatagenItemId:
        """The id of a sub-item; ``step`` is percent-encoded as a source key is."""
        if not _encodable(step, "step name"):
            raise InvalidItemIdError(
                "step name is empty; name the step", code="item_id_malformed_segment"
            )
        return DatagenItemId(self.root_key, (*self.segments, (_escape(step), _index(index))))

    @property
    def is_root(self) -> bool:
        return not self.segments

    @property
    def root(self) -> DatagenItemId:
        return DatagenItemId(self.root_key)

    @property
    def parent(self) -> DatagenItemId | None:
        """The item that this one was fanned out of; None for a root."""
        return DatagenItemId(self.root_key, self.segments[:-1]) if self.segments else None

    @property
    def origin_step(self) -> str | None:
        """The name of the fan-out step that made this item; None for a root."""
        return self.segments[-1][0] if self.segments else None

    @property
    def branch_idx(self) -> int | None:
        """Which sub-item of its fan-out this is; None for a root."""
        return self.segments[-1][1] if self.segments else None

    def __str__(self) -> str:
        return "/".join([self.root_key, *(f"{name}:{index}" for name, index in self.segments)])

    def __lt__(self, other: DatagenItemId) -> bool:
        return (self.root_key, self.segments) < (other.root_key, other.segments)


def id_text(item_id: object) -> str:
    """The stored path of an id that was passed as text or as DatagenItemId, whatever it spells.

    Raises :class:`InvalidItemIdError` for anything else, and for text that UTF-8 cannot hold.
    """
    return _encodable(str(item_id) if isinstance(item_id, DatagenItemId) else item_id, "item id")


@lru_cache(maxsize=65536)
def canonical_ids(item_id: str) -> tuple[str, str | None]:
    """``(root_item_id, parent_item_id)`` of a stored path, which must be spelled canonically.

    Raises :class:`InvalidItemIdError`, also with ``code`` ``item_id_not_canonical`` where the path
    parses but another spelling of the same id is the stored one.
    """
    slash = item_id.rfind("/")
    if slash < 0:
        parsed = DatagenItemId.parse(item_id)
        return item_id, None
    parsed = DatagenItemId.parse(item_id)
    if not all(_CANONICAL_INDEX.match(part.rpartition(":")[2]) for part in item_id.split("/")[1:]):
        raise InvalidItemIdError(
            f"item id {item_id!r} is not in its stored spelling; write {str(parsed)!r}",
            code="item_id_not_canonical",
        )
    return parsed.root_key, item_id[:slash]


def datagen_event_id(item_id: str, checkpoint_id: str, ordinal: int) -> str:
    """The id of an event: UUIDv5 under the OID namespace of what the event is about.

    The name is ``item_id NUL checkpoint_id NUL ordinal``, in UTF-8.
    ``ordinal`` is the event's number within its checkpoint, 0 to 2**32 - 1. Raises
    :class:`InvalidEventError` for another type, range, or text that UTF-8 cannot hold.
    """
    if not isinstance(ordinal, int):
        raise InvalidEventError(
            f"ordinal must be an integer, not {type(ordinal).__name__}", code="wrong_type"
        )
    if not 0 <= ordinal <= ORDINAL_MAX:
        raise InvalidEventError(f"ordinal {ordinal} is not within 0..2**32-1", code="out_of_range")
    if not isinstance(item_id, str) or not isinstance(checkpoint_id, str):
        raise InvalidEventError("item_id and checkpoint_id must be strings", code="wrong_type")
    try:
        return event_id_of(event_id_prefix(item_id, checkpoint_id), ordinal)
    except UnicodeEncodeError as error:
        raise InvalidEventError(
            f"event id of item {item_id!r}: a lone surrogate cannot be stored", code="not_utf8"
        ) from error


def event_id_prefix(item_id: str, checkpoint_id: str) -> bytes:
    """What the ids of one checkpoint's events have in common, for :func:`event_id_of`."""
    return _NAMESPACE + f"{item_id}\0{checkpoint_id}\0".encode()


def event_id_of(prefix: bytes, ordinal: int) -> str:
    """As :func:`datagen_event_id`, of parts that are known to be sound."""
    # uuid.uuid5 spelled out: this runs once an event and uuid.UUID costs more than the hash.
    text = _sha1(prefix + b"%d" % ordinal).hexdigest()
    variant = _VARIANT[text[16]]
    return f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{variant}{text[17:20]}-{text[20:32]}"
