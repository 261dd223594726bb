"""Files that were removed, cut or altered: one error that says so, at reads and at claims."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from datagen_ray import DatagenStore
from datagen_ray.errors import CorruptWalError, DamagedLogError, DatagenError, WriterFencedError
from datagen_ray.store import layout
from datagen_ray.store.compaction import refresh_indexes
from datagen_ray.store.creation import open_log
from datagen_ray.store.repair import repair_log
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.log.builders import completed, created
from tests.store.maintenance_support import SHARD, SLOT, add_generations, merger, visible_ids
from tests.store.writer_support import batch, new_log, wal_path

ENTRIES = 6


def log_with_tail(folder: Path) -> str:
    """A log whose writer was killed: its WAL has :data:`ENTRIES` entries of rows."""
    uri = new_log(folder)
    owner = ShardOwner.claim(uri, SLOT)
    for number in range(ENTRIES):
        item = str(number)
        owner.submit([created(1, item), completed(2, item)]).result()
    return uri


LOOKS: dict[str, Callable[[str], object]] = {
    "a read": lambda uri: DatagenStore.open(uri, read_only=True).overview(),
    "verify": lambda uri: DatagenStore.open(uri, read_only=True).verify(),
    "a claim": lambda uri: ShardOwner.claim(uri, SLOT),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_missing_wal_entry_that_others_follow_is_damage(
    tmp_path: Path, look: Callable[[str], object]
) -> None:
    uri = log_with_tail(tmp_path)
    os.remove(wal_path(uri, SLOT, 3))
    with pytest.raises(CorruptWalError, match=r"WAL entry 3 .* is missing") as caught:
        look(uri)
    assert (caught.value.position, caught.value.last) == (3, False)


def test_verify_finds_an_entry_that_went_missing_since_the_store_was_opened(
    tmp_path: Path,
) -> None:
    uri = log_with_tail(tmp_path)
    with DatagenStore.open(uri, read_only=True) as store:
        assert store.verify().is_clean
        os.remove(wal_path(uri, SLOT, 2))
        with pytest.raises(CorruptWalError, match="WAL entry 2 "):
            store.verify()


def test_the_newest_entry_missing_is_no_hole(tmp_path: Path) -> None:
    uri = log_with_tail(tmp_path)
    os.remove(wal_path(uri, SLOT, ENTRIES))
    assert len(visible_ids(uri)) == 2 * (ENTRIES - 1)


def test_an_altered_wal_entry_never_raises_anything_but_our_errors(tmp_path: Path) -> None:
    uri = log_with_tail(tmp_path)
    path = wal_path(uri, SLOT, 2)
    sound = path.read_bytes()
    rng = random.Random(20240105)
    refused = 0
    for _ in range(250):
        altered = bytearray(sound)
        altered[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
        path.write_bytes(altered)
        try:
            with DatagenStore.open(uri, read_only=True) as store:
                store.overview()
                store.fold_items(["0", "1", "5"])
        except DatagenError:
            refused += 1
    assert refused > 0


def test_a_base_manifest_cut_in_the_middle_is_named_and_repaired(tmp_path: Path) -> None:
    uri = new_log(tmp_path)
    add_generations(uri, "a", "b")
    before = visible_ids(uri)
    merger(uri).run()
    # Nothing was drained since, so that the version before it holds all there is.
    refresh_indexes(LogStorage(uri))
    versions = Path(uri) / layout.VERSIONS_FOLDER
    newest = min(versions.glob("*.manifest"), key=lambda path: int(path.stem))
    os.truncate(newest, newest.stat().st_size // 2)
    for look in LOOKS.values():
        with pytest.raises(DamagedLogError, match="datagen-ray repair"):
            look(uri)
    repair_log(LogStorage(uri))
    assert visible_ids(uri) == before


@pytest.mark.parametrize("round_", range(5))
def test_of_two_that_claim_at_once_in_one_process_one_has_the_shard(
    tmp_path: Path, round_: int
) -> None:
    uri = new_log(tmp_path)
    open_log(uri)
    both = threading.Barrier(2)
    outcomes: list[str] = []

    def claim(name: str) -> None:
        both.wait()
        try:
            owner = ShardOwner.claim(uri, SLOT)
            owner.submit(batch(name)).result()
        except WriterFencedError:
            outcomes.append("fenced")
        else:
            outcomes.append("acknowledged")

    threads = [threading.Thread(target=claim, args=(f"{round_}-{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "acknowledged" in outcomes
    assert ShardOwner.claim(uri, SLOT).shard_id == SHARD
