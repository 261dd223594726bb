"""Which generations a version of the base table has taken in, read from its manifest file.

Each merge marks its generation in the details of the MemWAL index, which stand in the manifest. No
call of Lance's shows them for a version (`index_stats` counts them, of the newest), so they are
read from the file: ``MemWalIndexDetails`` field 9, repeated { 1 shard { 1 uuid }  2 generation }.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from datagen_ray.errors import DamagedLogError

_TYPE_URL = b"/lance.table.MemWalIndexDetails"
_VALUE_TAG = 0x12  # google.protobuf.Any: field 2, the message itself


def merged_generations(manifest: bytes) -> dict[str, int]:
    """The highest generation that is marked as merged, by shard id.

    Raises DamagedLogError for a manifest without a MemWAL index, or with one that does not decode.
    """
    at = manifest.find(_TYPE_URL)
    value = manifest[at + len(_TYPE_URL) :]
    if at < 0 or not value or value[0] != _VALUE_TAG:
        raise DamagedLogError("a version of the base table does not say what was merged into it")
    size, start = _varint(value, 1)
    details: Any = _details_class()()
    try:
        details.ParseFromString(value[start : start + size])
        return {str(uuid.UUID(bytes=mark.shard.value)): mark.generation for mark in details.marks}
    except (DecodeError, ValueError) as error:
        raise DamagedLogError(f"the marks of merged generations do not decode: {error}") from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    number = shift = 0
    for position in range(at, min(at + 10, len(data))):
        number |= (data[position] & 0x7F) << shift
        shift += 7
        if data[position] < 0x80:
            return number, position + 1
    raise DamagedLogError("the marks of merged generations are cut off")


@functools.cache
def _details_class() -> type[Message]:
    field = descriptor_pb2.FieldDescriptorProto
    package = "datagen_ray.marks"
    file = descriptor_pb2.FileDescriptorProto(
        name="datagen_ray/marks.proto", package=package, syntax="proto3"
    )

    def declare(message: str, *fields: tuple[str, int, int, str | None, bool]) -> None:
        described = file.message_type.add(name=message)
        for name, tag, kind, nested, repeated in fields:
            added = described.field.add(name=name, number=tag, type=kind)
            added.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if nested:
                added.type_name = f".{package}.{nested}"

    declare("Shard", ("value", 1, field.TYPE_BYTES, None, False))
    declare(
        "Mark",
        ("shard", 1, field.TYPE_MESSAGE, "Shard", False),
        ("generation", 2, field.TYPE_UINT64, None, False),
    )
    declare("Details", ("marks", 9, field.TYPE_MESSAGE, "Mark", True))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Details"))
