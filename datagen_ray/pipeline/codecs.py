"""Between the values that user code handles and the values that the log holds.

Six kinds need no codec. Anything else takes a :class:`Codec`: a stable id, a version and two
functions, registered by the user. No class path and no pickle ever reaches the log, so reading one
runs no code that the reader did not register.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import (
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from datagen_ray.errors import CodecError, InvalidEventError, PipelineError, ValueTooLargeError
from datagen_ray.log.values import DatagenBlobValue, DatagenFieldUpdate, DatagenValue, ValueKind
from datagen_ray.pipeline.codec import NATIVE, NATIVE_IDS, Codec
from datagen_ray.pipeline.ready_codecs import codec_of_type
from datagen_ray.pipeline.results import Append

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""Largest single value. A put of 200 MB works, but a batch holds several values."""

MAX_BATCH_BYTES = 128 * 1024 * 1024
"""Most that one step may set. A batch that the log refused would leave a gap in ``item_seq``."""


def is_native(field_type: str) -> bool:
    """Whether a stored value needs no codec of a user."""
    return field_type in NATIVE_IDS


class FieldType(NamedTuple):
    """What was declared of a field: how one value is stored, and whether the field grows."""

    codec: Codec | None
    kind: ValueKind
    append: bool

    @property
    def label(self) -> str:
        inner = self.codec.id if self.codec else self.kind
        return f"append[{inner}]" if self.append else inner


class Stored(NamedTuple):
    """One recorded value, with what is needed to read it back."""

    value: DatagenValue
    field_type: str
    codec_version: int
    event_id: str


def declare_fields(fields: Any, where: str) -> dict[str, FieldType]:
    """The declared fields of a mapping ``name -> type`` or of a TypedDict class."""
    if fields is None:
        return {}
    if isinstance(fields, type):
        fields = get_type_hints(fields)
    if not isinstance(fields, Mapping):
        raise PipelineError(f"{where}: fields={fields!r}; give a mapping from names to types")
    for name in fields:
        if not isinstance(name, str) or not name:
            raise PipelineError(f"{where}: the field name {name!r} is not a text; rename it")
    return {name: _field_type(declared, name, where) for name, declared in fields.items()}


def _field_type(declared: Any, name: str, where: str) -> FieldType:
    append = declared is Append or get_origin(declared) is Append
    if append:
        declared = get_args(declared)[0] if get_args(declared) else Any
    if isinstance(declared, Codec):
        return FieldType(declared, declared.kind, append)
    if isinstance(declared, type) and declared in NATIVE:
        return FieldType(None, NATIVE[declared], append)
    codec = codec_of_type(declared, f"{where}: field {name!r}")
    if codec is not None:
        return FieldType(codec, codec.kind, append)
    origin = get_origin(declared) or declared
    plain = (Any, Literal, Union, types.UnionType, dict, list, tuple, Mapping, object)
    if origin in plain or is_typeddict(declared):
        return FieldType(None, "json", append)
    raise PipelineError(
        f"{where}: field {name!r} is declared as {declared!r}, which no value kind holds; declare "
        "int, float, bool, str, bytes, dict, list, a class under @stored, or a Codec"
    )


_JSON = FieldType(None, "json", False)
_BLOB = FieldType(None, "blob", False)


class FieldTypes:
    """The declared fields of one pipeline, and the codecs that read its log."""

    def __init__(
        self, declared: Mapping[str, FieldType], codecs: Mapping[str, Codec] | None = None
    ) -> None:
        self.declared = dict(declared)
        self.codecs = dict(codecs or {})
        for kept in self.declared.values():
            if kept.codec is not None:
                self.codecs.setdefault(kept.codec.id, kept.codec)

        self.has_blob_codecs = any(codec.kind == "blob" for codec in self.codecs.values())

    def is_append(self, name: str) -> bool:
        kept = self.declared.get(name)
        return kept is not None and kept.append

    def update(self, name: object, value: Any) -> DatagenFieldUpdate:
        """What one returned field does to the log.

        Raises :class:`CodecError` naming the field for a value that it cannot hold.
        """
        if not isinstance(name, str) or not name:
            raise CodecError(f"field name {name!r} is not a text; fields are named by strings")
        append = isinstance(value, Append)
        kept = self.declared.get(name)
        if kept is not None and kept.append != append:
            raise CodecError(
                f"field {name!r} is declared as {kept.label}, yet a step "
                + ("appends to it" if append else "sets it without Append(...)")
            )
        if isinstance(value, Append):
            value = value.value
        if kept is None:
            kept = _BLOB if isinstance(value, (bytes, bytearray, memoryview)) else _JSON
        return DatagenFieldUpdate(
            name=name,
            op="append" if append else "set",
            value=_encode(name, value, kept, name in self.declared),
            field_type=kept.codec.id if kept.codec else kept.kind,
            codec_version=kept.codec.version if kept.codec else 1,
        )

    def decode(self, name: str, stored: Stored, blob: bytes | None = None) -> Any:
        """The Python value of one recorded value, not yet frozen; ``blob`` are its loaded bytes."""
        raw: Any = stored.value.value if stored.value.kind != "blob" else blob
        if stored.field_type in NATIVE_IDS:
            return raw
        codec = self.codecs.get(stored.field_type)
        if codec is None:
            raise CodecError(
                f"field {name!r} was written by version {stored.codec_version} of the codec "
                f"{stored.field_type!r}, which is not registered; give it to the Pipeline "
                "(codecs=[...]), or declare the field with its type"
            )
        if stored.codec_version > codec.version:
            raise CodecError(
                f"field {name!r} was written by version {stored.codec_version} of the codec "
                f"{codec.id!r}, newer than the registered {codec.version}; upgrade"
            )
        return _user_codec(name, codec, "decode", codec.decode, raw, stored.codec_version)

    def needs_bytes(self, stored: Stored) -> bool:
        """Whether reading the value takes its blob: a codec has to see it, a plain blob is lazy."""
        return stored.value.kind == "blob" and stored.field_type not in NATIVE_IDS


def _encode(name: str, value: Any, kept: FieldType, is_declared: bool) -> DatagenValue:
    if kept.codec is not None:
        value = _user_codec(name, kept.codec, "encode", kept.codec.encode, value)
    elif kept.kind == "int" and isinstance(value, bool):
        raise CodecError(f"field {name!r} is declared int, yet the value is a bool")
    try:
        encoded = DatagenValue.of_kind(kept.kind, value)
    except (InvalidEventError, RecursionError) as error:
        cure = "" if is_declared else "; declare its type in fields={...}"
        raise CodecError(f"field {name!r}: {error}{cure}") from error
    size = _size(encoded)
    if size > MAX_VALUE_BYTES:
        raise ValueTooLargeError(
            f"field {name!r} takes {size} bytes, more than {MAX_VALUE_BYTES}; store it elsewhere "
            "and keep its address"
        )
    return encoded


def value_bytes(update: DatagenFieldUpdate) -> int:
    """About how many bytes an update takes in a batch."""
    return _size(update.value) + len(update.name)


def _size(value: DatagenValue) -> int:
    raw = value.raw
    if isinstance(raw, str):
        return len(raw) if raw.isascii() else len(raw.encode())
    if isinstance(raw, DatagenBlobValue):
        return raw.size or 0
    return 8


def _user_codec(
    name: str, codec: Codec, verb: str, function: Callable[..., Any], *args: Any
) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise CodecError(
            f"field {name!r}: codec {codec.id!r} could not {verb}: {type(error).__name__}: {error}"
        ) from error
