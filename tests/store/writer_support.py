"""Events, and what a log holds of them, for the tests of the writer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import lance
import pyarrow as pa

from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.values import DatagenValue
from datagen_ray.store import layout
from datagen_ray.store.creation import create_log, open_log
from datagen_ray.store.shard import list_shards, read_latest_manifest, read_wal_tail
from datagen_ray.store.storage import LogStorage

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)


def event(event_id: str, *, item_seq: int = 1, text: str = "x") -> DatagenEvent:
    return DatagenEvent(
        event_id=event_id,
        item_id="item",
        item_seq=item_seq,
        checkpoint_id="checkpoint",
        event_type=DatagenEventType.FIELD_SET,
        run_id="run",
        writer_epoch="slot:1",
        field_name="field",
        value=DatagenValue.of(text),
        event_ts=NOON,
    )


def batch(name: object, rows: int = 3) -> list[DatagenEvent]:
    """A caller's batch: ``rows`` events with the ids ``<name>.<row>``."""
    return [event(f"{name}.{row}", item_seq=row + 1) for row in range(rows)]


def new_log(folder: Path) -> str:
    uri = layout.log_uri(str(folder), "pipeline", "experiment")
    create_log(uri)
    return uri


def wal_positions(uri: str, slot: str) -> list[int]:
    folder = Path(uri) / layout.wal_folder(layout.shard_uuid(slot))
    names = os.listdir(folder) if folder.exists() else []
    return sorted(p for name in names if (p := layout.parse_wal_name(name)) is not None)


def wal_path(uri: str, slot: str, position: int) -> Path:
    return Path(uri) / layout.wal_key(layout.shard_uuid(slot), position)


def wal_ids(uri: str, slot: str, after: int = 0) -> list[list[str]]:
    """The event ids of each WAL entry that carries rows, in order."""
    tail = read_wal_tail(LogStorage(uri), layout.shard_uuid(slot), after)
    return [entry.rows["event_id"].to_pylist() for entry in tail.entries]


def stored_ids(uri: str, storage_options: dict[str, str] | None = None) -> list[str]:
    """Every event id that a reader must see: base table, SSTables and WAL tails."""
    return [
        event_id
        for table in _sources(uri, storage_options)
        for event_id in table["event_id"].to_pylist()
    ]


def _sources(uri: str, storage_options: dict[str, str] | None) -> Iterator[pa.Table]:
    storage = LogStorage(uri, storage_options)
    yield open_log(uri, storage_options).to_table(columns=["event_id"])
    for shard in list_shards(storage):
        manifest = read_latest_manifest(storage, shard)
        assert manifest is not None
        for table in manifest.sstables:
            path = f"{uri}/{layout.sstable_key(shard, table.path)}"
            options = storage_options or None
            yield lance.dataset(path, storage_options=options).to_table(columns=["event_id"])
        for entry in read_wal_tail(storage, shard, manifest.replay_after).entries:
            yield entry.rows
