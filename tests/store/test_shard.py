from __future__ import annotations

import json
from pathlib import Path

import pytest

from datagen_ray.errors import ConfigError, CorruptWalError, DamagedLogError
from datagen_ray.store import layout
from datagen_ray.store.shard import (
    decode_manifest,
    drain_generation,
    list_shards,
    read_latest_manifest,
    read_manifest,
    read_wal_tail,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch, event, new_log, wal_path

SHARD = layout.shard_uuid("slot")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_log(tmp_path)


@pytest.fixture
def storage(uri: str) -> LogStorage:
    return LogStorage(uri)


def write(uri: str, *names: str) -> None:
    with ShardOwner.claim(uri, "slot") as owner:
        for name in names:
            owner.submit(batch(name)).result()


def test_a_log_that_nobody_wrote_to_has_no_shards(storage):
    assert list_shards(storage) == []
    assert read_latest_manifest(storage, SHARD) is None


def test_shards_are_listed_and_other_folders_are_not(uri, storage):
    write(uri, "a")
    (Path(uri) / "_mem_wal" / "tmp").mkdir()
    assert list_shards(storage) == [SHARD]


def test_the_manifest_tells_what_was_flushed(uri, storage):
    write(uri, "a", "b")
    manifest = read_latest_manifest(storage, SHARD)
    assert manifest is not None
    assert (manifest.shard_id, manifest.writer_epoch) == (SHARD, 1)
    assert manifest.replay_after == 2
    assert [table.generation for table in manifest.sstables] == [1]
    assert manifest.sstables[0].physical_rows == 6
    assert manifest.current_generation == 2
    assert layout.parse_sstable_name(manifest.sstables[0].path) == 1


@pytest.mark.parametrize(
    "hint",
    [None, b"", b"garbage", b"[]", b'{"version": 1}', b'{"version": 999}', b'{"version": "x"}'],
)
def test_the_latest_manifest_is_found_whatever_the_hint_says(uri, storage, hint):
    write(uri, "a")
    write(uri, "b")
    path = Path(uri) / layout.version_hint_key(SHARD)
    latest = json.loads(path.read_bytes())["version"]
    path.unlink()
    if hint is not None:
        path.write_bytes(hint)
    manifest = read_latest_manifest(storage, SHARD)
    assert manifest is not None
    assert manifest.version == latest
    earlier = read_manifest(storage, SHARD, 1)
    assert read_latest_manifest(storage, SHARD, known=earlier) == manifest


def test_a_manifest_that_was_cut_off_is_reported_as_damage(uri, storage):
    write(uri, "a")
    latest = read_latest_manifest(storage, SHARD)
    path = Path(uri) / layout.manifest_key(SHARD, latest.version)
    for content in (b"", latest.raw[:-5], b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(DamagedLogError, match=f"manifest version {latest.version}"):
            read_latest_manifest(storage, SHARD)


def test_a_manifest_of_another_version_is_reported_as_damage(uri, storage):
    write(uri, "a")
    raw = read_manifest(storage, SHARD, 1).raw
    with pytest.raises(DamagedLogError, match="holds version 1"):
        decode_manifest(raw, SHARD, 2)


def test_the_tail_is_what_no_sstable_holds(uri, storage):
    write(uri, "flushed")
    owner = ShardOwner.claim(uri, "slot")
    owner.submit(batch("a")).result()
    owner.submit(batch("b", rows=2)).result()
    manifest = read_latest_manifest(storage, SHARD)
    tail = read_wal_tail(storage, SHARD, manifest.replay_after)
    assert [entry.rows["event_id"].to_pylist() for entry in tail.entries] == [
        ["a.0", "a.1", "a.2"],
        ["b.0", "b.1"],
    ]
    assert {entry.writer_epoch for entry in tail.entries} == {owner.epoch}
    assert "_tombstone" not in tail.entries[0].rows.column_names
    assert tail.next_position == tail.entries[-1].position + 1
    owner.close()


def test_leftovers_in_the_wal_folder_are_not_entries(uri, storage):
    owner = ShardOwner.claim(uri, "slot")
    owner.submit(batch("a")).result()
    Path(f"{wal_path(uri, 'slot', 2)}#1").write_bytes(b"half")
    tail = read_wal_tail(storage, SHARD, 0)
    assert (len(tail.entries), tail.next_position) == (1, 2)
    owner.close()


def test_the_newest_entry_cut_off_is_told_from_one_that_others_follow(uri, storage):
    owner = ShardOwner.claim(uri, "slot")
    for name in "abc":
        owner.submit(batch(name)).result()
    last = wal_path(uri, "slot", 3)
    whole = last.read_bytes()
    for content in (b"", whole[:8], whole[: len(whole) // 2]):
        last.write_bytes(content)
        with pytest.raises(CorruptWalError, match="no rows follow") as found:
            read_wal_tail(storage, SHARD, 0)
        assert (found.value.last, found.value.position) == (True, 3)
    last.write_bytes(whole)
    wal_path(uri, "slot", 2).write_bytes(b"")
    with pytest.raises(CorruptWalError, match="entries follow") as found:
        read_wal_tail(storage, SHARD, 0)
    assert (found.value.last, found.value.position) == (False, 2)
    wal_path(uri, "slot", 2).write_bytes(whole)
    owner.close()


def test_draining_drops_one_generation_and_nothing_else(uri, storage):
    write(uri, "a")
    write(uri, "b")
    before = read_latest_manifest(storage, SHARD)
    assert [table.generation for table in before.sstables] == [1, 2]
    after = drain_generation(storage, SHARD, 1)
    assert after == read_latest_manifest(storage, SHARD)
    assert [table.generation for table in after.sstables] == [2]
    unchanged = ("writer_epoch", "replay_after", "last_seen", "current_generation")
    assert all(getattr(before, name) == getattr(after, name) for name in unchanged)
    assert after.version == before.version + 1
    assert drain_generation(storage, SHARD, 1) == after


def test_draining_keeps_fields_that_are_not_known_here(uri, storage):
    write(uri, "a")
    latest = read_latest_manifest(storage, SHARD)
    unknown = b"\xaa\x06\x05later"  # field 101, five bytes
    newer = latest.raw.replace(bytes([8, latest.version]), bytes([8, latest.version + 1]), 1)
    assert storage.put_if_absent(layout.manifest_key(SHARD, latest.version + 1), newer + unknown)
    drained = drain_generation(storage, SHARD, 1)
    assert drained.sstables == ()
    assert unknown in drained.raw


def test_a_writer_carries_on_over_a_drain(uri, storage):
    write(uri, "a")
    owner = ShardOwner.claim(uri, "slot")
    owner.submit(batch("b")).result()
    drain_generation(storage, SHARD, 1)
    owner.submit(batch("c")).result()
    owner.close()
    latest = read_latest_manifest(storage, SHARD)
    assert [table.generation for table in latest.sstables] == [2]
    assert latest.writer_epoch == owner.epoch


def test_draining_what_was_never_claimed_is_damage(storage):
    with pytest.raises(DamagedLogError, match="no manifest"):
        drain_generation(storage, SHARD, 1)


def test_a_claim_between_read_and_drain_keeps_its_epoch(uri, storage, monkeypatch):
    write(uri, "a")
    put = storage.put_if_absent
    claimed = []

    def claim_first(key: str, data: bytes) -> bool:
        if not claimed:
            claimed.append(ShardOwner.claim(uri, "slot"))
        return put(key, data)

    monkeypatch.setattr(storage, "put_if_absent", claim_first)
    drained = drain_generation(storage, SHARD, 1)
    assert (drained.writer_epoch, drained.sstables) == (claimed[0].epoch, ())
    claimed[0].submit([event("later")]).result()
    claimed[0].close()


def test_local_put_if_absent_is_taken_once(tmp_path):
    storage = LogStorage(str(tmp_path / "new"))
    assert storage.put_if_absent("a/b/c.json", b"first")
    assert not storage.put_if_absent("a/b/c.json", b"second")
    assert storage.get("a/b/c.json") == b"first"
    assert [file.name for file in storage.list_files("a/b")] == ["c.json"]
    assert storage.list_folders("a") == ["b"]
    assert storage.delete("a/b/c.json")
    assert not storage.delete("a/b/c.json")
    assert storage.get("a/b/c.json") is None
    assert storage.get_many(["a/b/c.json", "x"]) == [None, None]


def test_a_storage_that_cannot_be_opened_is_a_config_error():
    for uri in ("", "nonsense://x/y", "file://elsewhere/x"):
        with pytest.raises(ConfigError):
            LogStorage(uri)
    with pytest.raises(ConfigError):
        LogStorage("s3://bucket/x", {"no_such_option": "1"})
