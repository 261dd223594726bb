"""Maintenance over S3, against an emulation of it."""

from __future__ import annotations

import pytest

from datagen_ray.errors import LeaseLostError
from datagen_ray.store import layout
from datagen_ray.store.creation import create_log, open_log
from datagen_ray.store.lease import MaintenanceLease
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log, maintain_once
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import SHARD, SLOT, append, ids_of
from tests.store.test_object_store import options  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

EVERYTHING = MaintenanceOptions(
    small_fragments=2, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)


@pytest.fixture
def uri(options: dict[str, str], request: pytest.FixtureRequest) -> str:  # noqa: F811
    uri = layout.log_uri("s3://bucket/maintained", "pipeline", request.node.name)
    create_log(uri, options)
    return uri


def test_a_log_is_merged_compacted_indexed_and_collected(uri, options):  # noqa: F811
    storage = LogStorage(uri, options)
    reader = LogReader(storage, options)
    for number in range(3):
        with ShardOwner.claim(uri, SLOT, storage_options=options) as owner:
            append(owner, f"{number}a", f"{number}b")
        held = reader.snapshot()
        assert held.sstables
        report = maintain_once(uri, storage_options=options, options=EVERYTHING)
        assert report.failures == []
        assert len(report.merged) == 1
        names = [f"{n}{letter}" for n in range(number + 1) for letter in "ab"]
        seen = reader.snapshot().read(["event_id"], None)["event_id"].to_pylist()
        assert sorted(seen) == ids_of(*names)
    lost = ShardOwner.claim(uri, SLOT, storage_options=options)
    append(lost, "tail")
    # object stores give times in whole seconds, so what was just written has no age yet
    finish_log(uri, storage_options=options, options=EVERYTHING).raise_first_failure()
    finish_log(uri, storage_options=options, options=EVERYTHING).raise_first_failure()
    ids = open_log(uri, options).to_table(columns=["event_id"])["event_id"].to_pylist()
    assert sorted(ids) == ids_of(*names, "tail")
    manifest = read_latest_manifest(storage, SHARD)
    assert manifest is not None
    assert manifest.sstables == ()
    assert [
        name
        for name in storage.list_folders(layout.shard_folder(SHARD))
        if layout.parse_sstable_name(name)
    ] == []


def test_one_maintainer_is_elected(uri, options):  # noqa: F811
    now = [0.0]
    holder = MaintenanceLease(uri, "holder", lease_s=5, storage_options=options)
    candidate = MaintenanceLease(
        uri, "candidate", lease_s=5, storage_options=options, monotonic=lambda: now[0]
    )
    assert holder.try_acquire()
    assert not candidate.try_acquire()
    holder.renew()
    now[0] += 6
    assert not candidate.try_acquire()
    now[0] += 6
    assert candidate.try_acquire()
    with pytest.raises(LeaseLostError, match="candidate was elected"):
        holder.check_still_leader()
