"""Readers run all the while a log is appended to and maintained: all there, exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from datagen_ray.store.cleanup import CleanupOptions
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import cleanup_old_versions, compact, refresh_indexes
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from tests.store.maintenance_support import base_ids, ids_of, repeated, visible_ids
from tests.store.writer_support import batch, new_log

SLOTS = ("one", "two")
BATCHES = 60
BATCHES_A_FLUSH = 5


class Crew:
    """Threads whose first error stops them all and fails the test."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None], *, again: bool = False) -> threading.Thread:
        def run() -> None:
            try:
                work()
                while again and not self.stop.is_set():
                    work()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.errors.append(error)
                self.stop.set()

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()
        return thread

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


class Acknowledged:
    """The names of the batches that were acknowledged so far."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, name: str) -> None:
        self._names.append(name)

    def ids(self) -> set[str]:
        return set(ids_of(*list(self._names)))


def check_read(
    store: DatagenStore, acknowledged: Acknowledged, ids: Callable[[], list[str]]
) -> None:
    before = acknowledged.ids()
    seen = ids()
    assert repeated(seen) == []
    missing = before - set(seen)
    assert not missing, f"{len(missing)} acknowledged events were not seen: {sorted(missing)[:3]}"


@pytest.mark.slow
def test_every_reader_sees_every_acknowledged_event_exactly_once(tmp_path: Path) -> None:
    uri = new_log(tmp_path)
    storage = LogStorage(uri)
    acknowledged = Acknowledged()
    crew = Crew()

    def write(slot: str) -> None:
        with DatagenStore.open(uri, shard_id=slot) as store:
            store.spawn_periodic_cleanup(
                0.02, options=CleanupOptions(max_generations=2, slow_generations=8)
            )
            for number in range(BATCHES):
                if crew.stop.is_set():
                    return
                name = f"{slot}{number}"
                store._writer().submit(batch(name)).result()
                acknowledged.add(name)
                if number % BATCHES_A_FLUSH == BATCHES_A_FLUSH - 1:
                    store.flush()

    def read(store: DatagenStore) -> Callable[[], None]:
        def by_item() -> list[str]:
            return [event.event_id for event in store.events_for_item("item")]

        def by_pass() -> list[str]:
            batches = store.events(columns=["event_id", "item_seq"])
            return [each for batch in batches for each in batch.column("event_id").to_pylist()]

        def both() -> None:
            check_read(store, acknowledged, by_item)
            check_read(store, acknowledged, by_pass)

        return both

    def read_anew() -> None:
        check_read_at(uri, acknowledged)

    writers = [crew.start(lambda slot=slot: write(slot)) for slot in SLOTS]
    held_open = DatagenStore.open(uri, read_only=True)
    crew.start(read(held_open), again=True)
    crew.start(read_anew, again=True)
    for work in (
        lambda: compact(storage),
        lambda: refresh_indexes(storage),
        lambda: cleanup_old_versions(storage, retention_s=1),
        lambda: collect_garbage(storage, grace_s=0, wal_retention_s=0),
    ):
        crew.start(work, again=True)
    for writer in writers:
        writer.join()
    crew.end()
    expected = ids_of(*(f"{slot}{number}" for slot in SLOTS for number in range(BATCHES)))
    assert visible_ids(uri) == expected
    finish_log(uri, options=MaintenanceOptions(small_fragments=1)).raise_first_failure()
    assert sorted(base_ids(uri)) == expected


def check_read_at(uri: str, acknowledged: Acknowledged) -> None:
    store = DatagenStore.open(uri, read_only=True)
    check_read(
        store,
        acknowledged,
        lambda: [event.event_id for event in store.events_for_root("item")],
    )
