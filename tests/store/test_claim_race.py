"""A put of the former owner that lands while its shard is being claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datagen_ray.store import claim, layout
from datagen_ray.store.creation import MemTableLimits, open_log
from datagen_ray.store.shard import probe_wal
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import SHARD, SLOT, encode_events, ids_of, visible_ids
from tests.store.writer_support import batch, new_log


def entry_of(folder: Path, name: str) -> bytes:
    """A WAL entry as a writer of epoch 1 leaves it."""
    uri = new_log(folder)
    writer = open_log(uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1)
    writer.put(encode_events(batch(name)))
    entry = LogStorage(uri).get(layout.wal_key(SHARD, 1))
    assert entry is not None
    return entry


def land_after_the_first_open(
    monkeypatch: pytest.MonkeyPatch, storage: LogStorage, late: bytes
) -> list[int]:
    """Have ``late`` land once the shard was opened for the first time; notes each opening."""
    opened: list[int] = []
    open_writer = claim._open_writer

    def open_and_let_it_land(*arguments: Any) -> Any:
        writer = open_writer(*arguments)
        if not opened:
            position = probe_wal(storage, SHARD, 0) + 1
            assert storage.put_if_absent(layout.wal_key(SHARD, position), late)
        opened.append(1)
        return writer

    monkeypatch.setattr(claim, "_open_writer", open_and_let_it_land)
    return opened


@pytest.mark.parametrize("ahead", [[], ["z"]], ids=["an empty tail", "a tail"])
def test_rows_that_land_behind_what_a_claim_replayed_are_not_dropped_by_its_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: list[str]
) -> None:
    late = entry_of(tmp_path / "other", "late")
    uri = new_log(tmp_path / "log")
    storage = LogStorage(uri)
    former = open_log(uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1)
    for name in ahead:
        former.put(encode_events(batch(name)))
    opened = land_after_the_first_open(monkeypatch, storage, late)
    with ShardOwner.claim(uri, SLOT) as owner:
        assert len(opened) == 2, "it was noticed, and claimed once more"
        # A reader sees them from now on, so they must never go again.
        assert visible_ids(uri) == ids_of(*ahead, "late")
        owner.submit(batch("new")).result()
    assert visible_ids(uri) == ids_of(*ahead, "late", "new")


def test_nor_are_those_that_land_while_a_tail_past_the_limits_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = entry_of(tmp_path / "other", "late")
    uri = new_log(tmp_path / "log")
    former = open_log(uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1)
    ahead = [str(number) for number in range(6)]
    for name in ahead:
        former.put(encode_events(batch(name)))
    few = MemTableLimits(rows=100_000, batches=3, size_bytes=256 << 20)
    monkeypatch.setattr(claim, "memtable_limits", lambda _: few)
    opened = land_after_the_first_open(monkeypatch, LogStorage(uri), late)
    with ShardOwner.claim(uri, SLOT) as owner:
        assert len(opened) == 3, "too many to hold, once more for the late one, and as usual"
        assert visible_ids(uri) == ids_of(*ahead, "late")
        owner.submit(batch("new")).result()
    assert visible_ids(uri) == ids_of(*ahead, "late", "new")


def test_a_put_that_comes_after_a_claim_finds_its_position_taken(tmp_path: Path) -> None:
    uri = new_log(tmp_path / "log")
    storage = LogStorage(uri)
    open_log(uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1)
    before = probe_wal(storage, SHARD, 0)
    with ShardOwner.claim(uri, SLOT):
        late = entry_of(tmp_path / "other", "late")
        assert not storage.put_if_absent(layout.wal_key(SHARD, before + 1), late)
    assert visible_ids(uri) == []
