"""Shard manifests and WAL tails: read, and drained of what was merged.

A shard's manifest is one immutable protobuf file a version. Versions have no gaps, because they
are never collected, so the latest is found by starting anywhere known and probing upward. It
says which WAL entries are already in SSTables (``replay_after``), which SSTables there are, and
who may write (``writer_epoch``).

A WAL entry is one Arrow IPC stream. The tail is what follows ``replay_after``, up to the first
position that is missing; a claim marks its place in it with an entry without rows.
"""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from datagen_ray.errors import CorruptWalError, DamagedLogError, StorageError
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store import layout
from datagen_ray.store.storage import PARALLEL_REQUESTS, LogStorage

TOMBSTONE_COLUMN = "_tombstone"
_EPOCH_KEY = b"writer_epoch"
_SENTINEL_KEY = b"fence_sentinel"
_MAX_DRAIN_CONFLICTS = 100
# Smaller files are read: each mapping costs a system resource that is limited to some 65,000.
_MAPPED_FROM_BYTES = 128 << 10


@dataclass(frozen=True)
class SsTable:
    """One flushed generation, as the shard manifest lists it. ``path`` is relative to the shard."""

    generation: int
    path: str
    in_memory_bytes: int = 0
    physical_rows: int = 0


@dataclass(frozen=True)
class ShardManifest:
    """One version of a shard's manifest.

    ``replay_after``: the highest WAL position that SSTables hold; the tail starts behind it.
    ``raw``: the file as it was read, with every field that this package does not know.
    """

    shard_id: str
    version: int
    writer_epoch: int
    replay_after: int
    last_seen: int
    current_generation: int
    sstables: tuple[SsTable, ...]
    raw: bytes = field(repr=False, compare=False)


@dataclass(frozen=True)
class WalEntry:
    """The rows of one WAL entry and the epoch of the writer that put it."""

    position: int
    rows: pa.Table
    writer_epoch: int


@dataclass(frozen=True)
class WalTail:
    """A run of WAL entries without a hole; ``next_position`` is the first that was missing."""

    entries: tuple[WalEntry, ...]
    next_position: int


def list_shards(storage: LogStorage) -> list[str]:
    """The ids of all shards that were ever claimed in a log, sorted."""
    names = storage.list_folders(layout.MEM_WAL_FOLDER)
    return sorted(shard for name in names if (shard := layout.parse_shard_name(name)))


def read_manifest(storage: LogStorage, shard: str, version: int) -> ShardManifest | None:
    """One version of a shard's manifest, or None when it does not exist (yet).

    Raises DamagedLogError when the file is there but is not that manifest.
    """
    raw = storage.get(layout.manifest_key(shard, version))
    return None if raw is None else decode_manifest(raw, shard, version)


def read_latest_manifest(
    storage: LogStorage, shard: str, *, known: ShardManifest | None = None
) -> ShardManifest | None:
    """The newest manifest of a shard, or None when the shard was never claimed.

    Starts at ``known`` where the caller has an earlier one, else at the hint, which may be
    missing, stale or garbage, and probes upward.
    """
    latest = known
    if latest is None:
        latest = _hinted_manifest(storage, shard)
    if latest is None:
        names = (file.name for file in storage.list_files(layout.manifest_folder(shard)))
        versions = [version for name in names if (version := layout.parse_manifest_name(name))]
        if not versions:
            return None
        latest = read_manifest(storage, shard, max(versions))
    while latest is not None:
        newer = read_manifest(storage, shard, latest.version + 1)
        if newer is None:
            break
        latest = newer
    return latest


def read_wal_tail(storage: LogStorage, shard: str, after: int) -> WalTail:
    """Every WAL entry behind a position, in order, without the ones that carry no rows.

    Raises CorruptWalError for an entry that cannot be decoded; its ``last`` says whether it is
    the newest, which cannot have been acknowledged, or whether entries follow it.
    """
    if storage.is_local:
        position = after + 1
        files: list[tuple[int, Any]] = []
        while (data := _read_local(storage, layout.wal_key(shard, position))) is not None:
            files.append((position, data))
            position += 1
    else:
        files = _fetch_tail(storage, shard, after)
    entries = []
    for position, data in files:
        entry = _decode_entry(storage, shard, position, data)
        if entry is not None:
            entries.append(entry)
    return WalTail(tuple(entries), after + 1 + len(files))


def find_hole(storage: LogStorage, shard: str, after: int) -> CorruptWalError | None:
    """What to raise if an entry behind a position is missing and others follow it, else None.

    Lance replays what follows and readers stop there, so they would not agree. Whoever calls
    this looks at the manifest afterwards: a tail that was flushed and collected has no hole.
    """
    names = (file.name for file in storage.list_files(layout.wal_folder(shard)))
    listed = {position for name in names if (position := layout.parse_wal_name(name))}
    last = max(listed, default=0)
    # A listing may miss what was put while it was made.
    while after < last and (
        after + 1 in listed or storage.exists(layout.wal_key(shard, after + 1))
    ):
        after += 1
    if after >= last:
        return None
    return CorruptWalError(
        f"WAL entry {after + 1} of shard {shard} in {storage.uri} is missing, and entries up to "
        f"{last} follow it, so acknowledged rows are lost: restore the file",
        shard_id=shard,
        position=after + 1,
        last=False,
    )


def probe_wal(storage: LogStorage, shard: str, after: int) -> int:
    """The last position of the run of WAL entries behind a position; ``after`` if there is none."""
    while storage.exists(layout.wal_key(shard, after + 1)):
        after += 1
    return after


def drain_generation(storage: LogStorage, shard: str, generation: int) -> ShardManifest:
    """Drop a merged generation from the shard's manifest; return the manifest without it.

    Writes the next version from a fresh read, all else unchanged, and starts again when someone
    else wrote that version first: a claim in between therefore keeps its epoch. Draining what is
    not listed (any more) changes nothing. The version hint is left alone.
    """
    latest: ShardManifest | None = None
    for _ in range(_MAX_DRAIN_CONFLICTS):
        latest = read_latest_manifest(storage, shard, known=latest)
        if latest is None:
            raise DamagedLogError(
                f"shard {shard} of {storage.uri} has no manifest, so generation {generation} "
                "cannot be drained; nothing must delete files below _mem_wal"
            )
        if all(table.generation != generation for table in latest.sstables):
            return latest
        raw = _without_generation(latest, generation)
        key = layout.manifest_key(shard, latest.version + 1)
        if storage.put_if_absent(key, raw):
            return decode_manifest(raw, shard, latest.version + 1)
    raise StorageError(
        f"shard {shard} of {storage.uri} changed {_MAX_DRAIN_CONFLICTS} times while generation "
        f"{generation} was being drained; drain it again when there is less going on"
    )


def manifest_without(
    manifest: ShardManifest, paths: Collection[str], replay_after: int, current_generation: int
) -> ShardManifest:
    """The next version of a manifest, without some SSTables and with a longer tail. Not written.

    Lance replays only WAL entries of the current generation and later ones.
    """
    message: Any = _manifest_class()()
    message.ParseFromString(manifest.raw)
    message.version = manifest.version + 1
    message.replay_after = replay_after
    message.current_generation = current_generation
    kept = [table for table in message.sstables if table.path not in paths]
    del message.sstables[:]
    message.sstables.extend(kept)
    raw = bytes(message.SerializeToString(deterministic=True))
    return decode_manifest(raw, manifest.shard_id, manifest.version + 1)


def decode_manifest(raw: bytes, shard: str, version: int) -> ShardManifest:
    """Parse a manifest file. Raises DamagedLogError unless it is that version of that shard."""
    message: Any = _manifest_class()()
    try:
        message.ParseFromString(raw)
        stored_shard = str(uuid.UUID(bytes=message.shard_id.value))
    except (DecodeError, ValueError) as error:
        raise _damaged_manifest(shard, version, f"{len(raw)} bytes do not decode") from error
    if (message.version, stored_shard) != (version, shard):
        raise _damaged_manifest(
            shard, version, f"it holds version {message.version} of shard {stored_shard}"
        )
    return ShardManifest(
        shard_id=shard,
        version=version,
        writer_epoch=message.writer_epoch,
        replay_after=message.replay_after,
        last_seen=message.last_seen,
        current_generation=message.current_generation,
        sstables=tuple(
            SsTable(table.generation, table.path, table.in_memory_bytes, table.physical_rows)
            for table in message.sstables
        ),
        raw=raw,
    )


def _damaged_manifest(shard: str, version: int, reason: str) -> DamagedLogError:
    return DamagedLogError(
        f"manifest version {version} of shard {shard} is damaged: {reason}; if the machine lost "
        "power, run `datagen-ray repair`, else restore the file"
    )


def _hinted_manifest(storage: LogStorage, shard: str) -> ShardManifest | None:
    hinted = _read_hint(storage, shard)
    if hinted is None:
        return None
    try:
        return read_manifest(storage, shard, hinted)
    except DamagedLogError:
        return None  # a stale hint may name one that a power loss took; only the newest matters


def _read_hint(storage: LogStorage, shard: str) -> int | None:
    raw = storage.get(layout.version_hint_key(shard))
    if raw is None:
        return None
    try:
        hint = json.loads(raw)
    except ValueError:
        return None
    version = hint.get("version") if isinstance(hint, dict) else None
    return version if type(version) is int and 0 < version < 1 << 63 else None


def _without_generation(manifest: ShardManifest, generation: int) -> bytes:
    message: Any = _manifest_class()()
    message.ParseFromString(manifest.raw)
    message.version = manifest.version + 1
    kept = [table for table in message.sstables if table.generation != generation]
    del message.sstables[:]
    message.sstables.extend(kept)
    return bytes(message.SerializeToString(deterministic=True))


def _fetch_tail(storage: LogStorage, shard: str, after: int) -> list[tuple[int, bytes]]:
    """List, fetch in parallel, then probe on for what was put since the listing."""
    names = (file.name for file in storage.list_files(layout.wal_folder(shard)))
    listed = {position for name in names if (position := layout.parse_wal_name(name))}
    files: list[tuple[int, bytes]] = []
    position = after + 1
    while True:
        wanted: list[int] = []
        while position + len(wanted) in listed and len(wanted) < 4 * PARALLEL_REQUESTS:
            wanted.append(position + len(wanted))
        if not wanted:
            wanted = [position]
        found = storage.get_many([layout.wal_key(shard, number) for number in wanted])
        for number, data in zip(wanted, found, strict=True):
            if data is None:
                return files
            files.append((number, data))
        position += len(wanted)


def sentinel_entry(writer_epoch: int) -> bytes:
    """A WAL entry without rows, as a claim puts one: it keeps its position taken."""
    metadata = {_SENTINEL_KEY: b"true", _EPOCH_KEY: str(writer_epoch).encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([], metadata=metadata)):
        pass
    return bytes(sink.getvalue().to_pybytes())


def _read_local(storage: LogStorage, key: str) -> Any:
    """The bytes of a local entry; a large one is mapped, so that blobs nobody asks for stay put."""
    path = storage.path(key)
    try:
        if os.path.getsize(path) >= _MAPPED_FROM_BYTES:
            with pa.memory_map(path) as file:
                return file.read_buffer()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}; look after the disk") from error
    return storage.get(key)


def _decode_entry(storage: LogStorage, shard: str, position: int, data: Any) -> WalEntry | None:
    try:
        return _parse_entry(position, data)
    except _UNDECODABLE as error:
        last = not _rows_follow(storage, shard, position)
        cure = (
            "no rows follow it, so if the machine lost power, nothing in it was acknowledged and "
            "`datagen-ray repair` sets it aside; else restore the file"
            if last
            else "entries follow it, so acknowledged rows are lost: restore the file"
        )
        raise CorruptWalError(
            f"WAL entry {position} of shard {shard} in {storage.uri} cannot be decoded "
            f"({len(data)} bytes); {cure}",
            shard_id=shard,
            position=position,
            last=last,
        ) from error


def _parse_entry(position: int, data: bytes) -> WalEntry | None:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        metadata = reader.schema.metadata or {}
        if metadata.get(_SENTINEL_KEY) == b"true":
            return None
        epoch = int(metadata[_EPOCH_KEY])
        rows = reader.read_all()
    # pyarrow trusts what it reads, and crashes on an offset that points elsewhere.
    rows.validate(full=True)
    for column in DATAGEN_SCHEMA:
        if rows.schema.field(column.name).type != column.type:
            raise ValueError(f"column {column.name} is {rows.schema.field(column.name).type}")
    if TOMBSTONE_COLUMN in rows.column_names:
        rows = rows.drop_columns([TOMBSTONE_COLUMN])
    return WalEntry(position, rows.replace_schema_metadata(None), epoch)


def _rows_follow(storage: LogStorage, shard: str, position: int) -> bool:
    """Whether an entry with rows comes after one that is cut off.

    Claims that were tried since then have put their row-less entries behind it, and failed.
    """
    while (data := storage.get(layout.wal_key(shard, position := position + 1))) is not None:
        try:
            if _parse_entry(position, data) is not None:
                return True
        except _UNDECODABLE:
            continue  # cut off as well
    return False


# SystemError: pyarrow (25) raises it for some broken schemas.
_UNDECODABLE = (pa.ArrowException, OSError, KeyError, ValueError, SystemError)


@functools.cache
def _manifest_class() -> type[Message]:
    """The manifest's message type: the fields that are used here; others survive a rewrite."""
    number = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="datagen_ray/shard_manifest.proto", package="datagen_ray.store", syntax="proto3"
    )

    def declare(message: str, fields: list[tuple[str, int, int, str | None]]) -> None:
        described = file.message_type.add(name=message)
        for name, tag, kind, nested in fields:
            added = described.field.add(name=name, number=tag, type=kind)
            added.label = number.LABEL_REPEATED if name == "sstables" else number.LABEL_OPTIONAL
            if nested:
                added.type_name = f".datagen_ray.store.{nested}"

    declare("ShardId", [("value", 1, number.TYPE_BYTES, None)])
    declare(
        "SsTable",
        [
            ("generation", 1, number.TYPE_UINT64, None),
            ("path", 2, number.TYPE_STRING, None),
            ("in_memory_bytes", 3, number.TYPE_UINT64, None),
            ("physical_rows", 4, number.TYPE_UINT64, None),
        ],
    )
    declare(
        "ShardManifest",
        [
            ("version", 1, number.TYPE_UINT64, None),
            ("writer_epoch", 2, number.TYPE_UINT64, None),
            ("replay_after", 3, number.TYPE_UINT64, None),
            ("last_seen", 4, number.TYPE_UINT64, None),
            ("current_generation", 6, number.TYPE_UINT64, None),
            ("sstables", 8, number.TYPE_MESSAGE, "SsTable"),
            ("shard_id", 11, number.TYPE_MESSAGE, "ShardId"),
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("datagen_ray.store.ShardManifest")
    return message_factory.GetMessageClass(descriptor)
