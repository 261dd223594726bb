"""The same guarantees over S3, against an emulation of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from datagen_ray.errors import LogNotFoundError, RunSupersededError, WriterFencedError
from datagen_ray.store import layout
from datagen_ray.store.creation import create_log, open_log
from datagen_ray.store.runs import begin_run, check_not_superseded, claim_all_shards, latest_run
from datagen_ray.store.shard import (
    drain_generation,
    list_shards,
    read_latest_manifest,
    read_wal_tail,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch, stored_ids

pytestmark = pytest.mark.slow
SHARD = layout.shard_uuid("slot")


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "aws_access_key_id": "testing",
        "aws_secret_access_key": "testing",
        "aws_region": "us-east-1",
        "aws_endpoint": f"http://{host}:{port}",
        "allow_http": "true",
    }
    client = boto3.client(
        "s3",
        endpoint_url=options["aws_endpoint"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    client.close()
    yield options
    server.stop()


@pytest.fixture
def uri(options: dict[str, str], request: pytest.FixtureRequest) -> str:
    uri = layout.log_uri("s3://bucket/root", "pipeline", request.node.name.replace("[", "-"))
    create_log(uri, options)
    return uri


def claim(uri: str, options: dict[str, str]) -> ShardOwner:
    return ShardOwner.claim(uri, "slot", storage_options=options)


def test_appends_are_read_back_from_the_tail_and_from_sstables(uri, options):
    storage = LogStorage(uri, options)
    assert list_shards(storage) == []
    assert read_latest_manifest(storage, SHARD) is None
    owner = claim(uri, options)
    for number in range(20):
        owner.submit(batch(number)).result()
    tail = read_wal_tail(storage, SHARD, 0)
    assert [entry.position for entry in tail.entries] == list(range(1, 21))
    assert tail.next_position == 21
    owner.close()
    assert list_shards(storage) == [SHARD]
    manifest = read_latest_manifest(storage, SHARD)
    assert manifest.replay_after == 20
    assert len(set(stored_ids(uri, options))) == 60
    drained = drain_generation(storage, SHARD, 1)
    assert drained == read_latest_manifest(storage, SHARD)
    assert drained.sstables == ()


def test_fenced_writer_acknowledges_nothing(uri, options):
    old = claim(uri, options)
    old.submit(batch("a")).result()
    new = claim(uri, options)
    with pytest.raises(WriterFencedError):
        old.submit(batch("lost")).result()
    new.submit(batch("b")).result()
    old.close()
    new.close()
    assert sorted(stored_ids(uri, options)) == sorted(e.event_id for n in "ab" for e in batch(n))


def test_fenced_writer_acknowledges_nothing_where_wal_entries_were_collected(uri, options):
    old = claim(uri, options)
    old.submit(batch("a")).result()
    new = claim(uri, options)
    new.submit(batch("b")).result()
    new.close()
    storage = LogStorage(uri, options)
    for file in storage.list_files(layout.wal_folder(SHARD)):
        storage.delete(f"{layout.wal_folder(SHARD)}/{file.name}")
    with pytest.raises(WriterFencedError):
        old.submit(batch("lost")).result()
    old.close()


def test_runs_are_ordered_and_claim_everything(uri, options):
    def begin(run_id: str):
        return begin_run(
            uri,
            run_id,
            pipeline_tree=None,
            fingerprint="f",
            storage_options=options,
            origin="here",
        )

    owner = claim(uri, options)
    owner.submit(batch("a")).result()
    first, second = begin("one"), begin("two")
    assert latest_run(uri, options) == second
    with pytest.raises(RunSupersededError, match="'two'"):
        check_not_superseded(uri, first, options)
    check_not_superseded(uri, second, options)
    assert [claim.shard_id for claim in claim_all_shards(uri, options)] == [SHARD]
    with pytest.raises(WriterFencedError):
        owner.submit(batch("lost")).result()
    owner.close()


def test_racing_creators_all_get_the_same_log(uri, options):
    racing = uri.replace("log.lance", "racing.lance")
    with ThreadPoolExecutor(6) as pool:
        datasets = list(pool.map(lambda _: create_log(racing, options), range(6)))
    assert all(dataset.mem_wal_index_details() is not None for dataset in datasets)
    with claim(racing, options) as owner:
        owner.submit(batch("a")).result()
    assert len(stored_ids(racing, options)) == 3


def test_what_is_not_there_is_not_found(uri, options):
    with pytest.raises(LogNotFoundError):
        open_log(uri.replace("log.lance", "other.lance"), options)
    storage = LogStorage(uri, options)
    assert storage.get("missing") is None
    assert not storage.exists("missing")
    assert storage.put_if_absent("x/y", b"1")
    assert not storage.put_if_absent("x/y", b"2")
    assert storage.exists("x/y")
    assert storage.get("x/y") == b"1"
    assert storage.list_folders("x") == []
    assert "x" in storage.list_folders()
