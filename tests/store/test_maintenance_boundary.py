from __future__ import annotations

from datagen_ray.store.creation import MAX_MEMTABLE_BATCHES
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log
from datagen_ray.store.shard import read_latest_manifest, read_wal_tail
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import SHARD, SLOT, base_ids, visible_ids
from tests.store.writer_support import event, new_log

EVERYTHING = MaintenanceOptions(
    small_fragments=1, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)


def test_an_entry_that_is_flushed_and_yet_in_the_tail_is_seen_and_merged_once(tmp_path):
    """A generation that is full with its last entry leaves that entry in the tail (pylance 14)."""
    uri = new_log(tmp_path)
    ids = []
    for incarnation in range(2):
        with ShardOwner.claim(uri, SLOT, fsync=False) as owner:
            for number in range(MAX_MEMTABLE_BATCHES):
                ids.append(f"{incarnation}.{number}")
                owner.submit([event(ids[-1], item_seq=len(ids))]).result()
        assert visible_ids(uri) == sorted(ids)
        finish_log(uri, options=EVERYTHING).raise_first_failure()
        assert visible_ids(uri) == sorted(base_ids(uri)) == sorted(ids)
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    assert manifest is not None
    left = read_wal_tail(LogStorage(uri), SHARD, manifest.replay_after).entries
    assert {e for entry in left for e in entry.rows["event_id"].to_pylist()} <= set(ids)
