"""Which sources a read of an item opens; numbering the ids of bulk reads; pieces in parallel."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from datagen_ray import DatagenStore
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store import columns, levels, parallel, snapshot
from datagen_ray.store.columns import ItemIds
from datagen_ray.store.levels import Entry, Keys
from datagen_ray.store.parallel import in_parallel
from tests.log.builders import completed, created, field_set

SSTABLES = 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatagenStore]:
    """Roots ``<n>`` and sub-items ``<n>/x:0``, each n in an SSTable of its own; ``tail`` in none.

    The root ``spread`` has an event in each.
    """
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as opened:
        for number in range(SSTABLES):
            opened.append([created(1, str(number)), created(1, f"{number}/x:0")])
            first = number == 0
            opened.append([created(1, "spread") if first else completed(number + 1, "spread")])
            opened.flush()
        opened.append([created(1, "tail")])
        yield opened


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URI of each dataset that is scanned for whole rows, as reads of items do."""
    uris: list[str] = []
    real = levels.scan

    def noting(dataset: Any, names: Sequence[str], where: Any, **options: Any) -> pa.Table:
        uris.append(dataset.uri)
        return real(dataset, names, where, **options)

    monkeypatch.setattr(snapshot, "scan", noting)
    return uris


READS: dict[str, tuple[Callable[[DatagenStore], Any], int]] = {
    "an item": (lambda store: store.events_for_item("3"), 1),
    "a sub-item": (lambda store: store.events_for_item("3/x:0"), 1),
    "a root": (lambda store: store.events_for_root("3"), 1),
    "in all": (lambda store: store.events_for_item("spread"), SSTABLES),
    "in the tail": (lambda store: store.events_for_item("tail"), 0),
    "nowhere": (lambda store: store.events_for_item("none"), 0),
}


@pytest.mark.parametrize(("read", "sstables"), READS.values(), ids=READS)
def test_a_read_of_an_item_opens_only_the_sstables_that_hold_it(
    store: DatagenStore,
    scanned: list[str],
    read: Callable[[DatagenStore], Any],
    sstables: int,
) -> None:
    read(store)
    assert len(scanned) == 1 + sstables, "the base table, and what holds it"


def test_an_item_that_is_in_every_level_is_read_whole(store: DatagenStore) -> None:
    events = store.events_for_item("spread")
    assert [event.item_seq for event in events] == list(range(1, SSTABLES + 1))
    store.append([field_set(SSTABLES + 1, 1, "spread")])
    assert len(store.events_for_item("spread")) == SSTABLES + 1
    store.flush()
    store.cleanup_own_shard()
    assert len(store.events_for_item("spread")) == SSTABLES + 1


def test_keys_are_found_whichever_side_is_the_longer() -> None:
    rng = random.Random(20240103)
    ids = [f"item-{number}" for number in range(3000)]
    for _ in range(200):
        held = rng.sample(ids, rng.choice([1, 5, 500]))
        asked = rng.sample(ids, rng.choice([1, 5, 500]))
        entry = Entry(pa.table({"item_id": held, "root_item_id": held}))
        assert entry.may_hold(Keys("item_id", tuple(asked))) == bool(set(held) & set(asked))
    assert not Entry(DATAGEN_SCHEMA.empty_table()).may_hold(Keys("item_id", ("a",)))


def test_ids_are_numbered_in_order_of_first_sight_however_often_they_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ItemIds, "_UNNUMBERED_RUNS", 4)
    rng = random.Random(20240104)
    texts = [f"item-{rng.randrange(40)}" for _ in range(3000)]
    items = ItemIds()
    start = 0
    while start < len(texts):
        end = start + rng.randrange(7, 60)
        chunks = [texts[start : start + 7], [], texts[start + 7 : end]]
        items.add(columns._Runs.of(pa.chunked_array(chunks, pa.string())))
        start = end
    ids, numbers = items.numbered()
    assert ids.to_pylist() == list(dict.fromkeys(texts))
    assert [ids[number].as_py() for number in numbers.tolist()] == texts


def test_pieces_come_in_order_and_few_are_held_at_once() -> None:
    taken = 0

    def pieces() -> Iterator[int]:
        nonlocal taken
        for number in range(200):
            taken += 1
            yield number

    names = set()

    def make(number: int) -> int:
        names.add(threading.current_thread().name)
        return number * 2

    made = in_parallel(make, pieces())
    assert next(made) == 0
    assert taken <= 2 * parallel.MAX_THREADS + 2
    assert list(made) == [number * 2 for number in range(1, 200)]
    assert names
    assert all(name.startswith("log-bulk") for name in names)


def test_an_error_of_one_piece_is_raised() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        list(in_parallel(make, range(10)))
