from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datagen_ray.errors import (
    ConfigError,
    DamagedLogError,
    RunSupersededError,
    WriterFencedError,
)
from datagen_ray.store import layout
from datagen_ray.store.runs import (
    RunTerm,
    begin_run,
    check_not_superseded,
    check_roots_by,
    claim_all_shards,
    latest_run,
    list_runs,
    roots_by,
)
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import NOON, batch, new_log, stored_ids


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_log(tmp_path)


def begin(uri: str, run_id: str) -> RunTerm:
    return begin_run(
        uri,
        run_id,
        pipeline_tree={"kind": "leaf", "name": "solve"},
        fingerprint="f1",
        origin="host:1",
        now=lambda: NOON,
    )


def test_runs_take_terms_in_order_and_stand_beside_the_log(uri):
    assert latest_run(uri) is None
    assert list_runs(uri) == []
    first, second = begin(uri, "one"), begin(uri, "two")
    assert (first.term, second.term) == (1, 2)
    assert latest_run(uri) == second
    assert list_runs(uri) == [first, second]
    assert second.pipeline_tree == {"kind": "leaf", "name": "solve"}
    assert second.started_at == "2026-01-02T12:00:00+00:00"
    assert (Path(uri).parent / "runs" / "2.json").is_file()


def test_runs_that_begin_at_once_get_different_terms(uri):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda number: begin(uri, f"run-{number}"), range(16)))
    assert sorted(run.term for run in runs) == list(range(1, 17))
    assert sorted(list_runs(uri), key=lambda run: run.run_id) == sorted(
        runs, key=lambda run: run.run_id
    )


def test_a_put_whose_answer_was_lost_is_recognised(uri, monkeypatch):
    real = LogStorage.put_if_absent

    def answer_lost(self: LogStorage, key: str, data: bytes) -> bool:
        real(self, key, data)
        return real(self, key, data)

    monkeypatch.setattr(LogStorage, "put_if_absent", answer_lost)
    assert begin(uri, "one").term == 1
    assert begin(uri, "two").term == 2


def test_a_superseded_run_is_told_by_whom(uri):
    first = begin(uri, "one")
    check_not_superseded(uri, first)
    begin(uri, "two")
    last = begin(uri, "three")
    with pytest.raises(RunSupersededError, match=r"'three' from host:1"):
        check_not_superseded(uri, first)
    with pytest.raises(RunSupersededError):
        check_not_superseded(uri, first.term)
    check_not_superseded(uri, last)


def test_other_files_among_the_runs_are_ignored(uri):
    begin(uri, "one")
    folder = Path(uri).parent / "runs"
    (folder / "9.json#1").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    assert begin(uri, "two").term == 2


def test_a_run_that_cannot_be_read_is_damage(uri):
    begin(uri, "one")
    (Path(uri).parent / layout.run_key(1)).write_bytes(b"{")
    with pytest.raises(DamagedLogError, match=r"runs/1\.json"):
        latest_run(uri)


def test_claiming_all_shards_fences_every_writer_and_flushes_its_tail(uri):
    owners = {name: ShardOwner.claim(uri, name) for name in ("w0", "w1", "w2")}
    for name, owner in owners.items():
        owner.submit(batch(name)).result()
    claims = claim_all_shards(uri)
    assert sorted(claim.shard_id for claim in claims) == sorted(map(layout.shard_uuid, owners))
    for name, owner in owners.items():
        with pytest.raises(WriterFencedError):
            owner.submit(batch(f"{name} lost")).result()
        owner.close()
        manifest = read_latest_manifest(LogStorage(uri), layout.shard_uuid(name))
        assert (len(manifest.sstables), manifest.writer_epoch) == (1, 2)
    assert sorted(stored_ids(uri)) == sorted(e.event_id for n in owners for e in batch(n))


def test_a_log_without_shards_has_none_to_claim(uri):
    assert claim_all_shards(uri) == []


def test_runs_that_name_roots_by_other_means_are_refused(uri):
    check_roots_by(None, "id")
    begin(uri, "unknown")
    check_roots_by(latest_run(uri), "id")
    for number, (named, refused) in enumerate([("id", (None, "url")), (None, ("id",))]):
        begin_run(
            uri,
            str(number),
            pipeline_tree=None,
            fingerprint="",
            origin="",
            roots_by=roots_by(named),
        )
        previous = latest_run(uri)
        check_roots_by(previous, named)
        for other in refused:
            with pytest.raises(ConfigError, match="another experiment"):
                check_roots_by(previous, other)
