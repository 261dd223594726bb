"""Values of fields: six kinds, exact at their limits, with blobs that stay lazy.

A JSON value is kept as its canonical text (keys sorted, no spaces, UTF-8) and parsed anew at each
use: an event that holds a value can then not be changed through it, and two values are equal
exactly when their stored forms are.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from datagen_ray.errors import DamagedLogError, InvalidEventError
from datagen_ray.log.ids import INT64_MAX, INT64_MIN

ValueKind: TypeAlias = Literal["int", "float", "bool", "str", "json", "blob"]
VALUE_KINDS: frozenset[str] = frozenset(("int", "float", "bool", "str", "json", "blob"))

MAX_JSON_DEPTH = 127
"""Deepest nesting of a JSON value; the limit of the reference implementation of the log."""


def _refuse(message: str, code: str) -> InvalidEventError:
    return InvalidEventError(message, code=code)


def check_text(text: object, what: str) -> str:
    """``text`` itself, once it is known to be a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise _refuse(f"{what} must be a string, not {type(text).__name__}", "wrong_type")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _refuse(
                f"{what} holds a lone surrogate, which UTF-8 cannot store; replace it", "not_utf8"
            ) from error
    return text


def check_optional_text(text: object, what: str) -> None:
    """As :func:`check_text`, of what may be absent."""
    if text is not None:
        check_text(text, what)


def _check_json(value: Any, depth: int) -> None:
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        check_text(value, "JSON string")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise _refuse(
                f"a JSON value cannot hold {value!r}; use a field of kind float", "bad_json"
            )
    elif isinstance(value, (dict, list, tuple)):
        if depth >= MAX_JSON_DEPTH:
            raise _refuse(
                f"a JSON value is nested deeper than {MAX_JSON_DEPTH} levels; flatten it",
                "json_too_deep",
            )
        if isinstance(value, dict):
            for key, item in value.items():
                check_text(key, "JSON key")
                _check_json(item, depth + 1)
        else:
            for item in value:
                _check_json(item, depth + 1)
    else:
        raise _refuse(
            f"a JSON value cannot hold a {type(value).__name__}; use a codec for it", "wrong_type"
        )


# Making an encoder takes longer than encoding a small value with it.
_encode_json = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode


def json_text(value: Any) -> str:
    """The canonical JSON text of ``value``: sorted keys, no spaces, numbers exact.

    Raises :class:`InvalidEventError` for what JSON cannot hold: NaN and infinities, keys that are
    not strings, lone surrogates, other types, nesting over :data:`MAX_JSON_DEPTH`.
    """
    _check_json(value, 0)
    try:
        return _encode_json(value)
    except ValueError as error:
        # An integer too long for Python's text conversion limit.
        raise _refuse(f"a JSON value cannot be written: {error}", "bad_json") from error


def json_value(text: str) -> Any:
    """The value that a stored JSON text spells, a new object at each call.

    Raises :class:`DamagedLogError` for a text that is not JSON, which another program can have
    stored; what this package writes always parses.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise DamagedLogError(
            f"the stored text {shown!r} is not JSON that can be read: {error}; whoever wrote the "
            "event must write it again under another event_id"
        ) from error


@dataclass(frozen=True, slots=True)
class DatagenBlobValue:
    """A blob, or the lazy reference to one: ``bytes`` is None until it is loaded.

    ``size`` is in bytes; ``checksum`` is ``sha256:<hex>`` where this package wrote it, None or any
    other text where another program did.
    """

    bytes: bytes | None
    size: int | None = None
    checksum: str | None = None

    def lazy(self) -> DatagenBlobValue:
        """The same reference without the bytes."""
        return DatagenBlobValue(None, self.size, self.checksum) if self.bytes is not None else self


def blob_checksum(data: bytes) -> str:
    """The checksum that this package writes for a blob."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def blob_matches(data: bytes, checksum: str | None) -> bool:
    """Whether bytes fit their checksum; one of a form that is not ours proves nothing, so True."""
    if checksum is None or not _OUR_CHECKSUM.match(checksum):
        return True
    return blob_checksum(data) == checksum


_OUR_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}\Z")


RawValue: TypeAlias = "int | float | bool | str | DatagenBlobValue"


@dataclass(frozen=True, slots=True, eq=False)
class DatagenValue:
    """A value with its kind. Make one with :meth:`of`, :meth:`json`, or :meth:`from_dict`.

    ``raw`` is the stored form (canonical text for JSON); :attr:`value` is the Python value. A
    ``raw`` that the kind cannot hold raises :class:`InvalidEventError`.
    Equality is that of the stored form, so NaN equals NaN and 0.0 differs from -0.0.
    """

    kind: ValueKind
    raw: RawValue = field(repr=False)
    is_sound: bool = field(default=True, init=False, repr=False)
    """Whether ``raw`` is known to fit the kind; not so for what was read from a log."""

    def __post_init__(self) -> None:
        kind, raw = self.kind, self.raw
        expected = _RAW_TYPES.get(kind)
        if expected is None:
            raise _unsupported_kind(kind)
        if type(raw) is not expected:
            raise _refuse(
                f"a value of kind {kind} is stored as {expected.__name__}, not as "
                f"{type(raw).__name__}; DatagenValue.of makes one",
                "wrong_type",
            )
        if kind == "int":
            _int64(raw)  # type: ignore[arg-type]  # its type was looked at above
        elif kind == "str":
            check_text(raw, "value")
        elif kind == "json":
            _check_canonical(raw)  # type: ignore[arg-type]

    @classmethod
    def as_stored(cls, kind: str, raw: object) -> DatagenValue:
        """The value that a stored row holds, as it stands: nothing is checked."""
        return cls._unchecked(kind, raw, is_sound=False)

    @classmethod
    def _unchecked(cls, kind: str, raw: object, *, is_sound: bool) -> DatagenValue:
        value = object.__new__(cls)
        object.__setattr__(value, "kind", kind)
        object.__setattr__(value, "raw", raw)
        object.__setattr__(value, "is_sound", is_sound)
        return value

    def check(self) -> None:
        """Raise :class:`InvalidEventError` unless ``raw`` fits the kind, as a write must see to.

        JSON that was read need not be in our spelling (programs write exponents differently), but
        it must be JSON.
        """
        if self.is_sound:
            return
        if self.kind != "json":
            DatagenValue(self.kind, self.raw)
            return
        try:
            json_text(self.value)
        except DamagedLogError as error:
            raise _refuse(str(error), "bad_json") from error

    @classmethod
    def of(cls, value: object) -> DatagenValue:
        """The value of the kind that ``value``'s type names; containers and None are JSON."""
        if isinstance(value, bool):
            return cls("bool", value)
        if isinstance(value, int):
            return cls("int", _int64(value))
        if isinstance(value, float):
            return cls("float", float(value))
        if isinstance(value, str):
            return cls("str", str(check_text(value, "value")))
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            return cls("blob", DatagenBlobValue(data, len(data), blob_checksum(data)))
        if isinstance(value, DatagenBlobValue):
            return cls("blob", value)
        if value is None or isinstance(value, (dict, list, tuple)):
            return cls.json(value)
        raise _refuse(
            f"no value kind holds a {type(value).__name__}; register a codec for it", "wrong_type"
        )

    @classmethod
    def json(cls, value: Any) -> DatagenValue:
        """A JSON value, whatever ``value``'s own type: also of a bare number or string."""
        return cls._unchecked("json", json_text(value), is_sound=True)

    @classmethod
    def from_dict(cls, data: object) -> DatagenValue:
        """The value of an exchange form: ``{"kind", "value"}``; a blob has ``bytes`` instead."""
        if not isinstance(data, Mapping):
            raise _refuse(
                f"value must be an object with a kind, not {type(data).__name__}", "wrong_type"
            )
        if "kind" not in data:
            raise _refuse("value has no 'kind'", "value_missing_key")
        kind = data["kind"]
        if not isinstance(kind, str):
            raise _refuse(f"value kind must be a string, not {kind!r}", "wrong_type")
        if kind not in VALUE_KINDS:
            raise _unsupported_kind(kind)
        if kind == "blob":
            return cls("blob", _blob_from_dict(data))
        if "value" not in data:
            raise _refuse(f"value of kind {kind} has no 'value'", "value_missing_key")
        return cls.of_kind(kind, data["value"])

    @classmethod
    def of_kind(cls, kind: str, value: Any) -> DatagenValue:
        """``value`` as a value of ``kind``; an int is taken for a float, nothing else changes."""
        if kind == "json":
            return cls.json(value)
        if kind == "str":
            return cls("str", str(check_text(value, "value")))
        if kind == "bool" and isinstance(value, bool):
            return cls("bool", value)
        if kind == "int" and isinstance(value, int):
            return cls("int", _int64(value))
        if kind == "float" and isinstance(value, (int, float)):
            try:
                return cls("float", float(value))
            except OverflowError as error:
                raise _refuse("value is too large for a float", "out_of_range") from error
        if kind == "blob" and isinstance(value, (bytes, bytearray, memoryview)):
            return cls.of(value)
        raise _refuse(f"a value of kind {kind} cannot be a {type(value).__name__}", "wrong_type")

    @property
    def value(self) -> Any:
        """The Python value; a new object for JSON, a :class:`DatagenBlobValue` for a blob."""
        return json_value(self.raw) if self.kind == "json" else self.raw  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The exchange form."""
        if isinstance(self.raw, DatagenBlobValue):
            return {
                "kind": "blob",
                "bytes": self.raw.bytes,
                "size": self.raw.size,
                "checksum": self.raw.checksum,
            }
        return {"kind": self.kind, "value": self.value}

    def lazy(self) -> DatagenValue:
        """The same value; a blob without its bytes."""
        if isinstance(self.raw, DatagenBlobValue) and self.raw.bytes is not None:
            return DatagenValue.as_stored("blob", self.raw.lazy())
        return self

    def identity(self) -> tuple[str, object]:
        """What two equal values share; floats by their bits, blobs without asking for bytes."""
        raw = self.raw
        if isinstance(raw, float):
            return (self.kind, struct.pack("<d", raw))
        if isinstance(raw, DatagenBlobValue):
            return (self.kind, (raw.size, raw.checksum))
        return (self.kind, raw)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DatagenValue):
            return NotImplemented
        if self.identity() != other.identity():
            return False
        ours, theirs = self.raw, other.raw
        if isinstance(ours, DatagenBlobValue) and isinstance(theirs, DatagenBlobValue):
            return ours.bytes == theirs.bytes
        return True

    def __hash__(self) -> int:
        return hash(self.identity())

    def __repr__(self) -> str:
        shown = repr(self.raw)
        return f"DatagenValue({self.kind}, {shown if len(shown) <= 80 else shown[:77] + '...'})"


_RAW_TYPES: Mapping[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "json": str,
    "blob": DatagenBlobValue,
}


def _unsupported_kind(kind: object) -> InvalidEventError:
    return _refuse(
        f"unsupported value kind {kind!r}; one of {', '.join(sorted(VALUE_KINDS))}",
        "unsupported_value_kind",
    )


def _check_canonical(text: str) -> None:
    """A stored JSON text is the one that :func:`json_text` gives; equality relies on that."""
    try:
        canonical = json_text(json_value(text)) == text
    except DamagedLogError as error:
        raise _refuse(str(error), "bad_json") from error
    if not canonical:
        raise _refuse(
            "a JSON text is not in its stored form (sorted keys, no spaces); DatagenValue.json "
            "makes one from a value",
            "bad_json",
        )


def _int64(value: int) -> int:
    number = int(value)
    if not INT64_MIN <= number <= INT64_MAX:
        raise _refuse(
            f"integer of {number.bit_length()} bits does not fit 64; store it as JSON",
            "out_of_range",
        )
    return number


def _blob_from_dict(data: Mapping[str, Any]) -> DatagenBlobValue:
    content = data.get("bytes")
    if isinstance(content, (bytearray, memoryview)):
        content = bytes(content)
    elif isinstance(content, list):
        if not all(isinstance(byte, int) for byte in content):
            raise _refuse("blob bytes must be bytes or a list of integers", "wrong_type")
        if not all(0 <= byte <= 255 for byte in content):
            raise _refuse("blob bytes must be integers within 0..255", "out_of_range")
        content = bytes(content)
    elif content is not None and not isinstance(content, bytes):
        raise _refuse(f"blob bytes must be bytes, not {type(content).__name__}", "wrong_type")
    size = data.get("size")
    if size is None:
        size = None if content is None else len(content)
    elif isinstance(size, bool) or not isinstance(size, int):
        raise _refuse(f"blob size must be an integer, not {size!r}", "wrong_type")
    checksum = data.get("checksum")
    if checksum is not None:
        check_text(checksum, "blob checksum")
    return DatagenBlobValue(content, size, checksum)


@dataclass(frozen=True, slots=True)
class DatagenFieldUpdate:
    """What a step does to one field: replace it (``set``) or add to it (``append``).

    ``field_type`` is the stable id of the codec that made the value, ``codec_version`` its version.
    """

    name: str
    op: Literal["set", "append"]
    value: DatagenValue
    field_type: str
    codec_version: int = 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DatagenFieldUpdate:
        """The update of an exchange form with keys name, op, field_type, codec_version, value.

        The checksum of a blob is left out: one that is handed in was computed by nobody we know.
        """
        for key in ("name", "op", "field_type", "value"):
            if key not in data:
                raise _refuse(f"field update has no {key!r}", "missing_key")
        version = data.get("codec_version", 1)
        if isinstance(version, bool) or not isinstance(version, int):
            raise _refuse(f"codec_version must be an integer, not {version!r}", "wrong_type")
        value = DatagenValue.from_dict(data["value"])
        if isinstance(value.raw, DatagenBlobValue):
            value = DatagenValue("blob", replace(value.raw, checksum=None))
        return cls(
            name=check_text(data["name"], "field name"),
            op=data["op"],
            value=value,
            field_type=check_text(data["field_type"], "field type"),
            codec_version=version,
        )
