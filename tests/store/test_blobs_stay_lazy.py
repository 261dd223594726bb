"""Folding reads no blob: shown by the bytes that a process of its own reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datagen_ray import (
    DatagenFieldUpdate,
    DatagenStepKind,
    DatagenStore,
    DatagenStreamPosition,
    DatagenStreamWriter,
    DatagenValue,
)
from datagen_ray.log.validate import validate_append
from datagen_ray.store.writer import ShardOwner

ROOT = Path(__file__).parents[2]
BLOB_BYTES = 1 << 20
ITEMS_PER_BATCH = 200


def write(uri: str, items: int, steps: int, blobs: int) -> tuple[str, ShardOwner]:
    """A log of ``items * (2 * steps + 1)`` events and some; a part of the blobs in a WAL tail.

    Gives the id of a blob event, and the writer that keeps the tail from being flushed.
    """
    DatagenStore.open(uri, fsync=False).close()
    event_id = ""
    every = max(1, items // blobs)
    with ShardOwner.claim(uri, "one", fsync=False) as owner:
        waiting = []
        for first in range(0, items, ITEMS_PER_BATCH):
            events = []
            for number in range(first, min(first + ITEMS_PER_BATCH, items)):
                writer = DatagenStreamWriter.open(str(number), run_id="r", writer_epoch="w")
                events.append(writer.item_created())
                for index in range(steps):
                    place = DatagenStreamPosition("count", DatagenStepKind.LEAF, index)
                    update = DatagenFieldUpdate("n", "set", DatagenValue.of(index), "int")
                    events += writer.step_completed(place, [update])
                if number % every == 0:
                    events += blob_step(writer)
                    event_id = event_id or events[-2].event_id
            waiting.append(owner.submit(events))
        for future in waiting:
            future.result()
    tail = ShardOwner.claim(uri, "two", fsync=False)
    for number in range(8):
        writer = DatagenStreamWriter.open(f"tail-{number}", run_id="r", writer_epoch="w")
        tail.submit(validate_append([writer.item_created(), *blob_step(writer)])).result()
    return event_id, tail


def blob_step(writer: DatagenStreamWriter) -> list:  # type: ignore[type-arg]
    place = DatagenStreamPosition("draw", DatagenStepKind.LEAF, 0)
    blob = DatagenValue.of(os.urandom(BLOB_BYTES))
    return writer.step_completed(place, [DatagenFieldUpdate("image", "set", blob, "png")])


@pytest.mark.parametrize("merged", [False, True], ids=["flushed", "merged"])
def test_folding_a_log_reads_none_of_its_blobs(tmp_path: Path, merged: bool) -> None:
    check(tmp_path, items=1000, steps=5, blobs=64, merged=merged)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_folding_a_million_events_with_a_gigabyte_of_blobs_reads_none(tmp_path: Path) -> None:
    found = check(tmp_path, items=20_000, steps=25, blobs=1024, merged=False)
    assert found["events"] > 1_000_000


def evict(folder: Path) -> None:
    """Have the kernel forget the files, so that what is used of them comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def check(folder: Path, *, items: int, steps: int, blobs: int, merged: bool) -> dict[str, int]:
    uri = str(folder / "log.lance")
    event_id, tail = write(uri, items, steps, blobs)
    if merged:
        with DatagenStore.open(uri, shard_id="one", fsync=False) as store:
            store.cleanup_own_shard()
    evict(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.store.fold_measured", uri, event_id],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        tail.close()
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    sys.stdout.write(f"{found}\n")
    assert found["items"] == items + 8
    # All rows are read several times over, and yet much less than there is in blobs.
    assert found["read_bytes"] < found["events"] * 650 + (1 << 20)
    assert found["disk_bytes"] < found["events"] * 1500 + (8 << 20)
    assert found["blob_bytes"] == BLOB_BYTES
    assert found["blob_read_bytes"] < 3 * BLOB_BYTES
    return found
