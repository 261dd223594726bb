"""Codecs that are ready: dataclasses, pydantic models, numpy arrays.

A class is named in the log by the id that its author gives it, never by its path, so that it may
be moved and renamed. Neither numpy nor pydantic is imported before a user has imported it.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from datagen_ray.errors import PipelineError
from datagen_ray.pipeline.codec import Codec

C = TypeVar("C", bound=type)

Migrate = Callable[[Any, int], Any]
"""From a stored value and the version that wrote it to what the current version would store."""

_MARK = "__datagen_codec__"


def stored(id: str, *, version: int = 1, migrate: Migrate | None = None) -> Callable[[C], C]:  # noqa: A002
    """Let a dataclass or a pydantic model be the declared type of fields.

    ``id`` names it in the log for ever. Raise ``version`` when the shape changes, and give
    ``migrate(value, version)``, which turns the JSON value that an older version stored into what
    the current one would store.
    """

    def mark(cls: C) -> C:
        setattr(cls, _MARK, codec_for(cls, id=id, version=version, migrate=migrate))
        return cls

    return mark


def codec_for(cls: type, *, id: str, version: int = 1, migrate: Migrate | None = None) -> Codec:  # noqa: A002
    """The codec of a dataclass or a pydantic model; as :func:`stored`, for a class of others."""
    if dataclasses.is_dataclass(cls):
        encode, build = partial(_dataclass_json, cls), partial(_build, cls)
    elif _is_pydantic(cls):
        encode, build = partial(_model_json, cls), cls.model_validate  # type: ignore[attr-defined]
    else:
        raise PipelineError(
            f"{cls.__qualname__} is neither a dataclass nor a pydantic model; write a Codec for it"
        )

    def decode(value: Any, written: int) -> Any:
        if written != version:
            if migrate is None:
                raise ValueError(
                    f"version {written} of {id!r} was stored, the current one is {version}; give "
                    "stored(...) a migrate function"
                )
            value = migrate(value, written)
        return build(value)

    return Codec(id, version, encode, decode)


def _is_pydantic(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _model_json(cls: Any, value: Any) -> Any:
    if type(value) is not cls:
        raise TypeError(f"a {cls.__name__} is declared, not a {type(value).__name__}")
    return value.model_dump(mode="json")


def _dataclass_json(cls: Any, value: Any) -> Any:
    if type(value) is not cls:
        raise TypeError(f"a {cls.__name__} is declared, not a {type(value).__name__}")
    return _plain(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields if field.init}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _build(declared: Any, value: Any) -> Any:
    """What was plain, as the declared type: dataclasses and enums, also in lists and dicts."""
    if isinstance(declared, type) and dataclasses.is_dataclass(declared):
        hints = get_type_hints(declared)
        return declared(**{name: _build(hints.get(name, Any), v) for name, v in value.items()})
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return declared(value)
    origin, args = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return _build(inner[0], value) if value is not None and len(inner) == 1 else value
    if origin is list and isinstance(value, list):
        return [_build(args[0], inner) for inner in value]
    if (origin is tuple or declared is tuple) and isinstance(value, list):
        return _build_tuple(args, value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _build(args[1], inner) for key, inner in value.items()}
    return value


def _build_tuple(args: tuple[Any, ...], value: list[Any]) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], inner) for inner in value)
    if len(args) == len(value):
        return tuple(_build(arg, inner) for arg, inner in zip(args, value, strict=True))
    return tuple(value)


def numpy_codec() -> Codec:
    """Arrays as blobs in numpy's own format; arrays of objects, which it pickles, are refused."""
    return _NUMPY


def _encode_array(array: Any) -> bytes:
    numpy = sys.modules["numpy"]
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f"a numpy array is declared, not a {type(array).__name__}")
    file = io.BytesIO()
    numpy.save(file, array, allow_pickle=False)
    return file.getvalue()


def _decode_array(data: bytes, _: int) -> Any:
    import numpy  # only what is read needs it: a log can be resumed without

    return numpy.load(io.BytesIO(data), allow_pickle=False)


_NUMPY = Codec("numpy.ndarray", 1, _encode_array, _decode_array, kind="blob")


def codec_of_type(declared: Any, where: str) -> Codec | None:
    """The codec of a declared type; None where it has none and may be of a kind without."""
    cls = get_origin(declared) or declared
    if not isinstance(cls, type):
        return None
    numpy = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.ndarray:
        return _NUMPY
    # Not inherited: a subclass has another shape.
    own: Codec | None = vars(cls).get(_MARK)
    if own is None and (dataclasses.is_dataclass(cls) or _is_pydantic(cls)):
        raise PipelineError(
            f"{where} is declared as {cls.__name__}, which has no id in logs yet; put "
            f'@stored("{cls.__name__.lower()}") above the class'
        )
    return own
