"""What a log takes on disk after many checkpoints, a pass of maintenance and collection."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import lance
import pytest

from datagen_ray.log.events import DatagenEvent, DatagenStepKind, DatagenStreamPosition
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.log.values import DatagenFieldUpdate, DatagenValue
from datagen_ray.store import layout
from datagen_ray.store.creation import MAX_MEMTABLE_BATCHES, open_log
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner, WriterOptions
from tests.store.maintenance_support import SHARD, SLOT, manifest_of
from tests.store.writer_support import event, new_log, wal_positions

CHECKPOINTS = 20_000
EVERYTHING = MaintenanceOptions(
    small_fragments=1, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)
POSITION = DatagenStreamPosition("solve", DatagenStepKind.LEAF, 0, "main")


def checkpoints(count: int) -> Iterator[list[DatagenEvent]]:
    """Two string fields of 120 characters and a completed step, 50 checkpoints an item."""
    letters = random.Random(count)
    for first in range(0, count, 50):
        stream = DatagenStreamWriter.open(f"item-{first}", run_id="run", writer_epoch="slot:1")
        for _ in range(50):
            values = [DatagenValue.of(letters.randbytes(60).hex()) for _ in range(2)]
            fields = [
                DatagenFieldUpdate(n, "set", v, "str") for n, v in zip("xy", values, strict=True)
            ]
            yield stream.step_completed(POSITION, fields)


def tree(folder: str | Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)


@pytest.mark.slow
def test_little_more_stays_than_one_table_of_the_rows(tmp_path):
    uri = new_log(tmp_path)
    with ShardOwner.claim(uri, SLOT, options=WriterOptions(entry_rows=512)) as owner:
        for future in [owner.submit(batch) for batch in checkpoints(CHECKPOINTS)]:
            future.result()
    finish_log(uri, options=EVERYTHING).raise_first_failure()
    rows = open_log(uri).to_table()
    assert rows.num_rows == 3 * CHECKPOINTS
    lance.write_dataset(rows, str(tmp_path / "one.lance"))
    files, size = tree(uri)
    _, least = tree(tmp_path / "one.lance")
    assert files <= 5 * CHECKPOINTS / 1000
    assert size <= 1.5 * least
    names = os.listdir(Path(uri) / layout.shard_folder(SHARD))
    assert [name for name in names if layout.parse_sstable_name(name)] == []


@pytest.mark.slow
def test_appends_of_one_caller_leave_two_manifests_a_generation_and_no_entries(tmp_path):
    uri = new_log(tmp_path)
    storage = LogStorage(uri)
    count = 4 * MAX_MEMTABLE_BATCHES + 100
    with ShardOwner.claim(uri, SLOT, fsync=False) as owner:
        for number in range(count):
            owner.submit([event(f"e{number}", item_seq=number + 1)]).result()
    generations = manifest_of(uri).current_generation - 1
    finish_log(uri, options=EVERYTHING).raise_first_failure()
    latest = read_latest_manifest(storage, SHARD)
    assert latest is not None
    assert latest.version <= 2 * generations + 1
    assert generations <= count / MAX_MEMTABLE_BATCHES + 1
    assert len(wal_positions(uri, SLOT)) <= 2
    assert open_log(uri).count_rows() == count
