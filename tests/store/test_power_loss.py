"""The power goes at every write of maintenance; what was acknowledged is there, each event once."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datagen_ray.errors import DatagenError
from datagen_ray.store import commits, creation, merge
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import cleanup_old_versions, compact, refresh_indexes
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log
from datagen_ray.store.repair import repair_log
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.writer import ShardOwner, WriterOptions
from tests.store.maintenance_support import (
    add_generations,
    append,
    base_ids,
    generations,
    ids_of,
    merger,
    repeated,
)
from tests.store.power_cuts import PowerCuts, State
from tests.store.writer_support import new_log

pytestmark = pytest.mark.slow

SEED = 20260
GONE_ON_WITH = [0.1, pytest.param(1.0, marks=pytest.mark.soak)]
"""The share of states that are written to and maintained afterwards, which takes a second each."""
EVERYTHING = MaintenanceOptions(
    small_fragments=1, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)
OTHER = "other slot"


class Machine:
    """A log on a disk that can lose its power, and what was acknowledged of it."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, gone_on_with: float = 0.5
    ) -> None:
        sys.stdout.write(f"seed {SEED}\n")
        self.acknowledged: list[str] = []
        self.in_flight: list[str] = []
        self.repaired: dict[str, int] = {}
        self.gone_on_with = 0
        self._share = gone_on_with
        self._choose = random.Random(SEED)
        self._lost = folder / "lost"
        root = folder / "disk"
        root.mkdir()
        self.uri = new_log(root)
        self.storage = LogStorage(self.uri)
        self.cuts = PowerCuts(root, folder / "kept", self._check, SEED)
        self.cuts.record(monkeypatch)

    def arm(self) -> None:
        self.cuts.assume_synced()
        self.cuts.armed = True

    def generations(self, *names: str, slot: str = "slot") -> None:
        add_generations(self.uri, *names, slot=slot)
        self.acknowledged += names

    def append(self, owner: ShardOwner, name: str) -> None:
        self.in_flight.append(name)
        append(owner, name)
        self.in_flight.remove(name)
        self.acknowledged.append(name)

    def tell(self, what: str) -> None:
        sys.stdout.write(
            f"{what}: {self.cuts.cuts} cuts, {self.cuts.states} states, of which "
            f"{self.gone_on_with} were gone on with; repaired {self.repaired}\n"
        )
        assert self.cuts.states > 1

    def _check(self, state: State) -> None:
        state.build(self._lost)
        uri = self.uri.replace(str(self.cuts.root), str(self._lost))
        try:
            self._check_lost(uri)
        except BaseException:
            self.cuts.armed = False
            sys.stdout.write(f"after a cut {state.cut}, with this found: {state.variant}\n")
            raise
        shutil.rmtree(self._lost)

    def _check_lost(self, uri: str) -> None:
        goes_on = self._choose.random() < self._share
        try:
            found = read(uri)
            if goes_on:
                go_on(uri)
        except DatagenError as error:
            self._repair(uri, error)
            found = read(uri)
            if goes_on:
                go_on(uri)
        self._check_ids(found)
        if goes_on:
            self.gone_on_with += 1
            finish_log(uri, options=EVERYTHING).raise_first_failure()
            self._check_ids(read(uri), "heir")
            self._check_ids(base_ids(uri), "heir")

    def _repair(self, uri: str, error: DatagenError) -> None:
        """Do what the error says."""
        assert "datagen-ray repair" in str(error), f"names no cure: {error!r}"
        planned = repair_log(LogStorage(uri), dry_run=True)
        assert planned, f"nothing to repair, but {error!r}"
        assert repair_log(LogStorage(uri)) == planned
        for repair in planned:
            self.repaired[repair.kind] = self.repaired.get(repair.kind, 0) + 1
        assert repair_log(LogStorage(uri)) == []

    def _check_ids(self, found: list[str], *more: str) -> None:
        assert repeated(found) == []
        expected = set(ids_of(*self.acknowledged, *more))
        assert expected <= set(found), f"lost: {sorted(expected - set(found))[:3]}"
        assert set(found) <= expected | set(ids_of(*self.in_flight))


def read(uri: str) -> list[str]:
    with DatagenStore.open(uri, read_only=True) as store:
        return [event.event_id for event in store.events_for_root("item")]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


def go_on(uri: str) -> None:
    with ShardOwner.claim(uri, "slot") as heir:
        append(heir, "heir")


def fragmented(machine: Machine, names: str) -> None:
    """One fragment a name in the base table, with indexes that cover all but the last."""
    for name in names[:-1]:
        machine.generations(name)
        merger(machine.uri).run()
        refresh_indexes(machine.storage)
    machine.generations(names[-1])
    merger(machine.uri).run()


def merging(machine: Machine) -> Iterator[Callable[[], object]]:
    machine.generations("a", "b", "c")
    machine.generations("d", slot=OTHER)
    yield merger(machine.uri).run
    yield merger(machine.uri, OTHER).run


def compacting(machine: Machine) -> Iterator[Callable[[], object]]:
    fragmented(machine, "abcd")
    yield lambda: compact(machine.storage)


def indexing(machine: Machine) -> Iterator[Callable[[], object]]:
    machine.generations("a")
    merger(machine.uri).run()
    yield lambda: refresh_indexes(machine.storage)
    machine.generations("b")
    merger(machine.uri).run()
    yield lambda: refresh_indexes(machine.storage)


def cleaning_up(machine: Machine) -> Iterator[Callable[[], object]]:
    fragmented(machine, "abc")
    compact(machine.storage)
    refresh_indexes(machine.storage)
    yield lambda: cleanup_old_versions(machine.storage, retention_s=0)


def collecting(machine: Machine) -> Iterator[Callable[[], object]]:
    with ShardOwner.claim(machine.uri, "slot") as owner:
        for name in "abcd":
            machine.append(owner, name)
            owner.flush()
        merger(machine.uri).run(at_most=2)
        machine.append(owner, "tail")
    yield lambda: collect_garbage(machine.storage, grace_s=0, wal_retention_s=0)


@pytest.mark.parametrize("gone_on_with", GONE_ON_WITH)
@pytest.mark.parametrize(
    "scenario",
    [
        merging,
        # Hundreds of cuts each, half a minute or more.
        pytest.param(compacting, marks=pytest.mark.soak),
        pytest.param(indexing, marks=pytest.mark.soak),
        cleaning_up,
        collecting,
    ],
)
def test_power_loss_at_every_write_of(scenario, gone_on_with, tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch, gone_on_with)
    for work in scenario(machine):
        machine.arm()
        work()
        machine.cuts.cut("at the end")
        machine.cuts.armed = False
    machine.tell(scenario.__name__)


@pytest.mark.soak
def test_power_loss_at_every_write_of_a_writer_and_the_maintenance_of_its_shard(
    tmp_path, monkeypatch
):
    machine = Machine(tmp_path, monkeypatch, 0.1)
    machine.cuts.at_most = 4
    machine.arm()
    owner = ShardOwner.claim(machine.uri, "slot")
    for number in range(2):
        for each in "ab":
            machine.append(owner, f"{each}{number}")
            owner.flush()
        machine.append(owner, f"tail{number}")
        merger(machine.uri).run(at_most=1 + number)
        compact(machine.storage)
        refresh_indexes(machine.storage)
        cleanup_old_versions(machine.storage, retention_s=0)
        collect_garbage(machine.storage, grace_s=0, wal_retention_s=0)
    owner.close()
    machine.tell("all")


def test_power_loss_after_a_flush_in_the_background(tmp_path, monkeypatch):
    """Nobody has synced yet what Lance flushed: the manifest may be found without its SSTable."""
    monkeypatch.setattr(creation, "MAX_MEMTABLE_BATCHES", 4)
    machine = Machine(tmp_path, monkeypatch)
    options = WriterOptions(idle_check_s=3600)
    with ShardOwner.claim(machine.uri, "slot", options=options) as owner:
        machine.arm()
        machine.cuts.armed = False
        number = 0
        for generation in range(1, 3):
            while generation not in generations(machine.uri):
                machine.append(owner, f"n{number}")
                number += 1
                # Not the next append, which syncs what was flushed: Lance alone.
                wait_for(lambda: not owner._appender.is_flushing())
            machine.cuts.armed = True
            machine.cuts.cut(f"after the flush of generation {generation}")
            machine.cuts.armed = False
    machine.tell("flushing")
    assert machine.repaired["sstable"] > 1


def test_old_versions_stay_until_what_replaced_them_is_durable(tmp_path, monkeypatch):
    """Another process commits between the sync and the removal, and the power goes."""
    machine = Machine(tmp_path, monkeypatch)
    fragmented(machine, "ab")
    machine.generations("c")
    real = commits.CommitSync.sync
    others: list[int] = []

    def sync(self: commits.CommitSync) -> None:
        real(self)
        if not others:
            others.append(1)
            machine.cuts.armed = False  # what the patches change would be in the way of looking
            with monkeypatch.context() as patch:
                patch.setattr(commits.CommitSync, "sync", lambda _: None)
                patch.setattr(merge, "drain_generation", lambda *_: None)
                once = merger(machine.uri)
                patch.setattr(once, "pending", iter([once.pending(), ()]).__next__)
                once.run()
            machine.cuts.armed = True

    monkeypatch.setattr(commits.CommitSync, "sync", sync)
    machine.arm()
    cleanup_old_versions(machine.storage, retention_s=0)
    machine.cuts.cut("after the removal")
    assert others
