from __future__ import annotations

from pathlib import Path

import pytest

from datagen_ray.errors import ConfigError, CorruptWalError, DamagedLogError
from datagen_ray.store import layout
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.repair import repair_log, repair_shard
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch, new_log, stored_ids, wal_path

SHARD = layout.shard_uuid("slot")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A log whose writer vanished with three entries in the tail."""
    uri = new_log(tmp_path)
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("flushed")).result()
    owner = ShardOwner.claim(uri, "slot")
    for name in "abc":
        owner.submit(batch(name)).result()
    return uri


def ids(*names: str) -> set[str]:
    return {event.event_id for name in names for event in batch(name)}


def test_a_whole_log_needs_no_repair(uri):
    assert repair_log(LogStorage(uri)) == []


def test_the_newest_entry_cut_off_is_set_aside_and_the_shard_can_be_claimed(uri):
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    last = manifest.replay_after
    while wal_path(uri, "slot", last + 1).exists():
        last += 1
    wal_path(uri, "slot", last).write_bytes(b"")
    with pytest.raises(CorruptWalError, match="datagen-ray repair"):
        ShardOwner.claim(uri, "slot")
    wal_path(uri, "slot", last).write_bytes(b"")
    (planned,) = repair_log(LogStorage(uri), dry_run=True)
    assert (planned.kind, planned.number) == ("wal", last)
    assert wal_path(uri, "slot", last).exists()
    assert repair_log(LogStorage(uri)) == [planned]
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("next")).result()
    assert set(stored_ids(uri)) == ids("flushed", "a", "b", "next")


def test_the_newest_manifest_cut_off_is_set_aside_and_the_shard_can_be_claimed(uri):
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    path = Path(uri) / layout.manifest_key(SHARD, manifest.version + 1)
    path.write_bytes(b"")
    with pytest.raises(DamagedLogError, match="datagen-ray repair"):
        ShardOwner.claim(uri, "slot")
    (done,) = repair_log(LogStorage(uri))
    assert (done.kind, done.number) == ("manifest", manifest.version + 1)
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("next")).result()
    assert set(stored_ids(uri)) == ids("flushed", "a", "b", "c", "next")


def test_damage_that_others_follow_is_reported_and_left_alone(uri):
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    damaged = next(
        position
        for position in range(manifest.replay_after + 1, manifest.replay_after + 9)
        if wal_path(uri, "slot", position).exists()
    )
    wal_path(uri, "slot", damaged).write_bytes(b"")
    with pytest.raises(CorruptWalError, match="entries follow"):
        repair_log(LogStorage(uri))


def empty_newest_manifests(uri: str) -> None:
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    for version in (manifest.version, manifest.version - 1):
        (Path(uri) / layout.manifest_key(SHARD, version)).write_bytes(b"")


def test_the_manifests_of_a_flush_and_of_the_claim_after_it_are_set_aside(uri):
    empty_newest_manifests(uri)
    assert [repair.kind for repair in repair_log(LogStorage(uri))] == ["manifest"] * 2
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("next")).result()
    assert set(stored_ids(uri)) == ids("flushed", "a", "b", "c", "next")


def test_manifests_on_whose_strength_the_wal_was_collected_must_be_restored(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("d")).result()
    collect_garbage(LogStorage(uri), wal_retention_s=0)
    empty_newest_manifests(uri)
    with pytest.raises(DamagedLogError, match="collected on their strength: restore"):
        repair_log(LogStorage(uri))


def test_a_shard_with_rows_and_no_whole_manifest_is_not_repaired(uri):
    for path in (Path(uri) / layout.manifest_folder(SHARD)).glob("*.binpb"):
        path.write_bytes(b"")
    with pytest.raises(DamagedLogError, match="no manifest that is whole: restore one"):
        repair_log(LogStorage(uri))


def test_object_stores_have_nothing_to_repair(uri):
    storage = LogStorage("memory:///log.lance")
    with pytest.raises(ConfigError, match="nothing to repair"):
        repair_log(storage)
    with pytest.raises(ConfigError, match="nothing to repair"):
        repair_shard(storage, SHARD)
