"""What a power loss leaves is noticed before anything is built on it, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from datagen_ray.errors import DamagedLogError
from datagen_ray.store import lance_errors, layout
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import compact, refresh_indexes
from datagen_ray.store.creation import open_log
from datagen_ray.store.maintenance import maintain_once
from datagen_ray.store.marks import merged_generations
from datagen_ray.store.repair import repair_log
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import base_versions, check_whole
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SHARD,
    add_generations,
    append,
    generations,
    ids_of,
    log_with_generations,
    manifest_of,
    merger,
    visible_ids,
)
from tests.store.writer_support import new_log, wal_positions

OTHER = "other"
CURE = "run `datagen-ray repair`"


def newest_manifest(uri: str) -> Path:
    folder = Path(uri) / layout.VERSIONS_FOLDER
    named = {layout.parse_version_name(path.name): path for path in folder.glob("*.manifest")}
    return named[base_versions(LogStorage(uri))[0]]


def sstable(uri: str, generation: int) -> Path:
    (path,) = (t.path for t in manifest_of(uri).sstables if t.generation == generation)
    return Path(uri) / layout.sstable_key(SHARD, path)


def test_a_version_says_which_generations_it_took_in(tmp_path):
    uri = new_log(tmp_path)
    assert merged_generations(newest_manifest(uri).read_bytes()) == {}
    add_generations(uri, "a", "b")
    add_generations(uri, "c", slot=OTHER)
    merger(uri).run()
    merger(uri, OTHER).run()
    marks = {SHARD: 2, layout.shard_uuid(OTHER): 1}
    assert merged_generations(newest_manifest(uri).read_bytes()) == marks
    refresh_indexes(LogStorage(uri))
    compact(LogStorage(uri))
    assert merged_generations(newest_manifest(uri).read_bytes()) == marks
    counted = open_log(uri).stats.index_stats("__lance_mem_wal")["num_compacted_sstables"]
    assert counted == len(marks)


@pytest.mark.parametrize("data", [b"", b"no index", b"/lance.table.MemWalIndexDetails\x12\xff"])
def test_a_manifest_without_marks_is_damage(data):
    with pytest.raises(DamagedLogError):
        merged_generations(data)


def test_a_whole_log_is_whole_whatever_was_done_with_it(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b", "c")
    merger(uri).run(at_most=2)
    refresh_indexes(LogStorage(uri))
    compact(LogStorage(uri))
    with ShardOwner.claim(uri, "slot") as owner:
        append(owner, "d")
        check_whole(LogStorage(uri))
    check_whole(LogStorage(uri))
    assert repair_log(LogStorage(uri)) == []


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("manifest", "emptied"),
        ("manifest", "shortened"),
        ("data", "emptied"),
        ("data", "shortened"),
        ("data", "gone"),
        ("index", "emptied"),
        ("index", "shortened"),
        ("index", "gone"),
    ],
)
def test_nothing_is_built_on_a_version_that_is_not_whole(what, how, tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    merger(uri).run(at_most=1)
    refresh_indexes(LogStorage(uri))
    before = base_versions(LogStorage(uri))[0]
    if what == "index":
        merger(uri).run()
    old = set(Path(uri).rglob("*"))
    if what == "index":
        refresh_indexes(LogStorage(uri))
    else:
        compact(LogStorage(uri))
        merger(uri).run()
    newest = [path for path in Path(uri).rglob("*") if path not in old and path.is_file()]
    if what == "manifest":
        lost = newest_manifest(uri)
    else:
        folder = "data" if what == "data" else "_indices"
        lost = next(path for path in newest if f"/{folder}/" in str(path))
    if what != "index":
        before_drain(uri)
    damage(lost, how)
    works = [lambda: ShardOwner.claim(uri, "slot"), lambda: check_whole(LogStorage(uri))]
    if what != "index":  # which is made anew
        works.append(lambda: maintain_once(uri))
    for work in works:
        with pytest.raises(DamagedLogError, match=CURE):
            work()
    assert {repair.kind for repair in repair_log(LogStorage(uri))} == {"base version"}
    assert base_versions(LogStorage(uri))[0] >= before
    with ShardOwner.claim(uri, "slot") as owner:
        append(owner, "c")
    maintain_once(uri).raise_first_failure()
    assert visible_ids(uri) == ids_of("a", "b", "c")


def before_drain(uri: str) -> None:
    """Take back the newest drain, which never comes before the sync of its commit."""
    (Path(uri) / layout.manifest_key(SHARD, manifest_of(uri).version)).unlink()


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "emptied" else path.read_bytes()[:-50])


def test_a_version_whose_merge_was_drained_must_be_restored(tmp_path):
    uri = log_with_generations(tmp_path, "a", "b")
    merger(uri).run()
    newest_manifest(uri).write_bytes(b"")
    with pytest.raises(DamagedLogError, match=r"lacks generation 2 of shard .* restore"):
        repair_log(LogStorage(uri))
    assert newest_manifest(uri).exists()


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A log with the generations 1 to 3 and a tail, all of it in the WAL too."""
    uri = new_log(tmp_path)
    with ShardOwner.claim(uri, "slot") as owner:
        for name in "abc":
            append(owner, name)
            owner.flush()
        append(owner, "d")
    assert generations(uri) == [1, 2, 3, 4]
    return uri


@pytest.mark.parametrize("generation", [1, 2, 4])
def test_the_rows_of_a_lost_sstable_come_back_from_the_wal(generation, written):
    shutil.rmtree(sstable(written, generation))
    for work in (
        lambda: ShardOwner.claim(written, "slot"),
        lambda: check_whole(LogStorage(written)),
        lambda: collect_garbage(LogStorage(written), grace_s=0, wal_retention_s=0),
    ):
        with pytest.raises(DamagedLogError, match=f"generation {generation} of .*{CURE}"):
            work()
    (planned,) = repair_log(LogStorage(written), dry_run=True)
    assert (planned.kind, planned.number) == ("sstable", generation)
    assert repair_log(LogStorage(written)) == [planned]
    assert visible_ids(written) == ids_of(*"abcd")
    with ShardOwner.claim(written, "slot") as owner:
        append(owner, "e")
    assert visible_ids(written) == ids_of(*"abcde")
    merger(written).run()
    collect_garbage(LogStorage(written), grace_s=0, wal_retention_s=0)
    assert visible_ids(written) == ids_of(*"abcde")


def test_a_lost_sstable_that_was_merged_is_drained(written, monkeypatch):
    monkeypatch.setattr("datagen_ray.store.merge.drain_generation", lambda *_: manifest_of(written))
    once = merger(written)
    monkeypatch.setattr(once, "pending", iter([once.pending(), ()]).__next__)
    once.run()
    shutil.rmtree(sstable(written, 1))
    assert len(repair_log(LogStorage(written))) == 1
    assert generations(written) == [2, 3, 4]
    assert visible_ids(written) == ids_of(*"abcd")


def test_a_lost_sstable_whose_wal_was_collected_must_be_restored(written):
    collect_garbage(LogStorage(written), grace_s=0, wal_retention_s=0)
    assert len(wal_positions(written, "slot")) <= 2
    shutil.rmtree(sstable(written, 2))
    before = manifest_of(written)
    with pytest.raises(DamagedLogError, match=r"so is entry .* restore one of them"):
        repair_log(LogStorage(written))
    assert manifest_of(written) == before


def test_readers_name_the_cure_of_a_lost_sstable(written):
    shutil.rmtree(sstable(written, 3))
    with pytest.raises(DamagedLogError, match=CURE):
        visible_ids(written)


def test_the_texts_of_files_that_are_cut_off(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    merger(uri).run()
    manifest = newest_manifest(uri)
    whole = manifest.read_bytes()
    for content in (b"", whole[:10], whole[:400], whole[:-100], whole[:-3]):
        manifest.write_bytes(content)
        with pytest.raises(DamagedLogError, match=CURE):
            open_log(uri)
    manifest.write_bytes(whole)
    dataset = open_log(uri)
    for path in (Path(uri) / "data").iterdir():
        path.write_bytes(b"")
    with pytest.raises(lance_errors.LANCE_ERRORS) as raised:
        dataset.to_table()
    assert lance_errors.is_cut_off(raised.value), str(raised.value)
