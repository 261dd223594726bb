"""Logs with generations to merge, and what is physically in them, for the tests of maintenance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa

from datagen_ray.log.events import DatagenEvent
from datagen_ray.log.schema import encode_events
from datagen_ray.store import layout
from datagen_ray.store.creation import open_log
from datagen_ray.store.merge import ShardMerger
from datagen_ray.store.shard import ShardManifest, read_latest_manifest
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch, new_log

SLOT = "slot"
SHARD = layout.shard_uuid(SLOT)


def log_with_generations(folder: Path, *names: str, slot: str = SLOT) -> str:
    """A log whose shard has one generation for each name, with the rows of ``batch(name)``."""
    uri = new_log(folder)
    add_generations(uri, *names, slot=slot)
    return uri


def add_generations(uri: str, *names: str, slot: str = SLOT) -> None:
    for name in names:
        add_generation(uri, batch(name), slot=slot)


def add_generation(uri: str, *appends: list[DatagenEvent], slot: str = SLOT) -> None:
    """One generation of the given appends, whatever rules they break."""
    dataset = open_log(uri)
    with dataset.mem_wal_writer(layout.shard_uuid(slot), max_wal_flush_interval_ms=1) as writer:
        for events in appends:
            writer.put(encode_events(events))


def merger(uri: str, slot: str = SLOT) -> ShardMerger:
    return ShardMerger(LogStorage(uri), layout.shard_uuid(slot))


def manifest_of(uri: str, slot: str = SLOT) -> ShardManifest:
    manifest = read_latest_manifest(LogStorage(uri), layout.shard_uuid(slot))
    assert manifest is not None
    return manifest


def generations(uri: str, slot: str = SLOT) -> list[int]:
    return [table.generation for table in manifest_of(uri, slot).sstables]


def base_ids(uri: str) -> list[str]:
    """Every event id of the base table, repeated as often as it is there."""
    ids: list[str] = open_log(uri).to_table(columns=["event_id"])["event_id"].to_pylist()
    return ids


def ids_of(*names: object) -> list[str]:
    return sorted(event.event_id for name in names for event in batch(name))


def visible(uri: str) -> pa.Table:
    """What a reader sees."""
    return LogReader(LogStorage(uri)).snapshot().read(["event_id", "value_str"], None)


def visible_ids(uri: str) -> list[str]:
    return sorted(visible(uri)["event_id"].to_pylist())


def visible_contents(uri: str, event_id: str) -> set[str]:
    rows = visible(uri).to_pylist()
    return {row["value_str"] for row in rows if row["event_id"] == event_id}


def repeated(ids: list[str]) -> list[str]:
    return [event_id for event_id, count in Counter(ids).items() if count > 1]


def append(owner: ShardOwner, *names: object) -> None:
    for name in names:
        owner.submit(batch(name)).result()
