"""Logs too large to write step by step: rows made by column, put where a merge would put them.

Each root has five events: ITEM_CREATED, its input field, STEP_COMPLETED(input), a step, and a
TERMINAL for nine roots of ten. The base table gets them as a merge leaves them, with the indexes
that maintenance keeps; SSTables and WAL tails are written by real writers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from datagen_ray import DatagenStore
from datagen_ray.log.schema import DATAGEN_SCHEMA, decode_batch
from datagen_ray.store.compaction import ROWS_PER_FRAGMENT
from datagen_ray.store.creation import create_log
from datagen_ray.store.writer import ShardOwner

EVENTS_A_ROOT = 5
CHUNK_ROOTS = 100_000
RUNNING_EVERY = 10
EVENT_TS = 1_767_225_600_000_000
"""Microseconds since the epoch: any fixed time."""


def root_id(number: int) -> str:
    return f"root-{number:09d}"


def is_running(number: int) -> bool:
    return number % RUNNING_EVERY == 0


def root_rows(first: int, last: int) -> pa.Table:
    """The events of the roots numbered ``first`` up to, but not including, ``last``."""
    kinds = ("ITEM_CREATED", "FIELD_SET", "STEP_COMPLETED", "STEP_COMPLETED", "TERMINAL")
    count = (last - first) * EVENTS_A_ROOT
    ids = [root_id(number) for number in range(first, last) for _ in range(EVENTS_A_ROOT)]
    columns: dict[str, Any] = {name: [None] * count for name in DATAGEN_SCHEMA.names}
    columns["event_id"] = [
        f"{number:08x}-{seq:04x}-5000-8000-{number * 7919 % 2**48:012x}"
        for number in range(first, last)
        for seq in range(EVENTS_A_ROOT)
    ]
    columns["item_id"] = columns["root_item_id"] = ids
    columns["item_seq"] = list(range(1, EVENTS_A_ROOT + 1)) * (last - first)
    columns["checkpoint_id"] = ["checkpoint"] * count
    columns["attempt"] = [0] * count
    columns["run_id"] = ["bench"] * count
    columns["writer_epoch"] = ["bench:1"] * count
    columns["schema_version"] = [2] * count
    columns["event_ts"] = [EVENT_TS] * count
    pattern: dict[str, tuple[Any, ...]] = {
        "event_type": kinds,
        "step_name": (None, "input", "input", "solve", None),
        "step_kind": (None, "root", "root", "leaf", None),
        "step_index": (None, 0, 0, 0, None),
        "enclosing_step": (None, None, None, "main", None),
        "field_name": (None, "question", None, None, None),
        "field_type": (None, "str", None, None, None),
        "codec_version": (None, 1, None, None, None),
        "value_kind": (None, "str", None, None, None),
        "value_str": (None, "q" * 120, None, None, None),
        "status": ("running", None, None, None, "completed"),
    }
    for name, values in pattern.items():
        columns[name] = list(values) * (last - first)
    table = pa.table(
        [
            pa.array(columns[field.name], pa.int64()).cast(field.type)
            if field.name == "event_ts"
            else pa.array(columns[field.name], field.type)
            for field in DATAGEN_SCHEMA
        ],
        schema=DATAGEN_SCHEMA,
    )
    running = [is_running(n) for n in range(first, last)]
    keep = [
        not (ended and seq == EVENTS_A_ROOT - 1)
        for ended in running
        for seq in range(EVENTS_A_ROOT)
    ]
    return table.filter(pa.array(keep))


def _chunks(roots: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, roots, CHUNK_ROOTS):
        yield from root_rows(first, min(roots, first + CHUNK_ROOTS)).to_batches()


def make_log(folder: Path, roots: int, *, indexes: bool = True) -> str:
    """A log whose base table holds ``roots`` roots; returns its URI."""
    uri = str(folder / "log.lance")
    create_log(uri, fsync=False)
    reader = pa.RecordBatchReader.from_batches(DATAGEN_SCHEMA, _chunks(roots))
    lance.write_dataset(reader, uri, mode="append", max_rows_per_file=ROWS_PER_FRAGMENT)
    if indexes:
        with DatagenStore.open(uri, fsync=False) as store:
            store.refresh_indexes()
    return uri


def add_upper_levels(
    uri: str, first: int, *, sstables: int, sstable_roots: int, tail_roots: int
) -> int:
    """Write more roots: ``sstables`` flushed ones, then a tail. Returns the next free number.

    The writer is left without being closed, as one that was killed, so that the tail stays.
    """
    owner = ShardOwner.claim(uri, "bench", fsync=False)
    for _ in range(sstables):
        owner.submit(decode_batch(root_rows(first, first + sstable_roots))).result()
        owner.flush()
        first += sstable_roots
    for _ in range(tail_roots // 100):
        owner.submit(decode_batch(root_rows(first, first + 100))).result()
        first += 100
    return first
