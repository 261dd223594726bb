"""A writer is killed at every durable boundary; what it acknowledged must still be there."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from datagen_ray.crashpoints import ENVIRONMENT_VARIABLE, WRITER_POINTS
from datagen_ray.store import layout
from datagen_ray.store.creation import MAX_MEMTABLE_BATCHES
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.writer_support import batch, new_log, stored_ids

PROGRAM = Path(__file__).with_name("append_until_killed.py")
PACKAGE_ROOT = Path(__file__).parents[2]

# how often each point is passed before the process dies there, so that it dies early and late
COUNTS = {"after_claim": (1, 2), "after_claim_sync": (1, 2)}
REOPENING = ("before_reopen", "after_reopen")


def cases() -> list[tuple[str, int]]:
    listed = []
    for name in WRITER_POINTS:
        default = (1,) if name in (*REOPENING, "before_flush", "after_flush") else (1, 9)
        listed += [(name, count) for count in COUNTS.get(name, default)]
    return listed


def run(uri: str, prefix: str, point: str, broken_wal: str) -> tuple[int, dict[str, int]]:
    """The exit code, and the acknowledged batches with their numbers of rows."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), uri, prefix, broken_wal],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), ENVIRONMENT_VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    return done.returncode, {name: int(rows) for name, rows in lines}


def check_nothing_is_lost_or_torn(uri: str, acknowledged: dict[str, int]) -> None:
    rows = Counter(event_id.rpartition(".")[0] for event_id in set(stored_ids(uri)))
    for name, count in acknowledged.items():
        assert rows[name] == count, f"{name} was acknowledged with {count} rows"
    for name, count in rows.items():
        assert count == 1 + int(name.lstrip("ab")) % 5, f"{name} is torn"


@pytest.mark.slow
@pytest.mark.parametrize(("point", "count"), cases())
def test_what_was_acknowledged_survives_a_kill_at(point, count, tmp_path):
    uri = new_log(tmp_path)
    broken = "break" if point in REOPENING else "whole"
    code, acknowledged = run(uri, "a", f"{point}:{count}", broken)
    assert code == -signal.SIGKILL, "the point was not reached"
    wal = Path(uri) / layout.wal_folder(layout.shard_uuid("slot"))
    if wal.is_file():
        wal.unlink()
        wal.with_name("wal-aside").rename(wal)
    check_nothing_is_lost_or_torn(uri, acknowledged)
    # the next incarnation of the slot goes on where this one was killed
    code, again = run(uri, "b", "", "whole")
    assert code == 0
    assert len(again) == 60
    check_nothing_is_lost_or_torn(uri, {**acknowledged, **again})


@pytest.mark.slow
def test_a_process_that_was_stopped_acknowledges_nothing_after_a_takeover(tmp_path):
    uri = new_log(tmp_path)
    stalled = subprocess.Popen(
        [sys.executable, str(PROGRAM), uri, "a", "for ever"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert stalled.stdout is not None
    acknowledged = [stalled.stdout.readline() for _ in range(50)]
    stalled.send_signal(signal.SIGSTOP)
    with ShardOwner.claim(uri, "slot") as heir:
        seen = set(stored_ids(uri))
        heir.submit(batch("heir")).result()
        stalled.send_signal(signal.SIGCONT)
        rest, errors = stalled.communicate(timeout=60)
        heir.submit(batch("heir again")).result()
    assert stalled.returncode == 1
    assert "WriterFencedError" in errors
    names = [line.split(" ")[0] for line in (*acknowledged, *rest.splitlines())]
    # whatever it said was durable, before or after the pause, its heir has read after the claim
    assert {f"{name}.0" for name in names} <= seen
    assert len(names) >= 50


class Disk:
    """What of a folder a lost machine would find again: names and content that were synced.

    Files and folders are told by their inodes, since a folder is renamed after it was synced.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.files: set[int] = set()
        self.names: set[tuple[int, str, int]] = set()
        real = os.fsync

        def recorded(descriptor: int) -> None:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(descriptor) as entries:
                    self.names.update((status.st_ino, e.name, e.inode()) for e in entries)
            else:
                self.files.add(status.st_ino)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", recorded)

    def after_power_loss(self, target: Path) -> None:
        """Copy the folder without names that were not synced, and empty what was not."""
        self._copy(self.root, target)

    def _copy(self, source: Path, target: Path) -> None:
        target.mkdir()
        folder = source.stat().st_ino
        for entry in os.scandir(source):
            if (folder, entry.name, entry.inode()) not in self.names:
                continue
            if entry.is_dir():
                self._copy(source / entry.name, target / entry.name)
            elif entry.inode() in self.files:
                shutil.copy(entry.path, target / entry.name)
            else:
                (target / entry.name).touch()


@pytest.mark.parametrize("moment", ["tail", "after a flush", "after a flush in the background"])
def test_what_was_acknowledged_survives_power_loss(moment, tmp_path, monkeypatch):
    disk = Disk(tmp_path / "disk", monkeypatch)
    (tmp_path / "disk").mkdir()
    uri = new_log(tmp_path / "disk")
    owner = ShardOwner.claim(uri, "slot")
    names = ["a", "b", "c"]
    for name in names:
        owner.submit(batch(name)).result()
    if moment == "after a flush":
        owner.flush()
    elif moment == "after a flush in the background":
        names += [str(number) for number in range(MAX_MEMTABLE_BATCHES)]
        for name in names[3:]:
            owner.submit(batch(name)).result()
        shard, storage = layout.shard_uuid("slot"), LogStorage(uri)
        while not read_latest_manifest(storage, shard).sstables:
            names.append(f"more {len(names)}")
            owner.submit(batch(names[-1])).result()
    owner.submit(batch("last")).result()
    disk.after_power_loss(tmp_path / "copy")
    lost_uri = uri.replace(str(disk.root), str(tmp_path / "copy"))
    expected = {e.event_id for name in (*names, "last") for e in batch(name)}
    assert set(stored_ids(lost_uri)) == expected
    with ShardOwner.claim(lost_uri, "slot") as heir:
        heir.submit(batch("heir")).result()
    assert set(stored_ids(lost_uri)) == expected | {e.event_id for e in batch("heir")}
    owner.close()


def test_without_fsync_nothing_is_synced(tmp_path, monkeypatch):
    uri = new_log(tmp_path)
    disk = Disk(tmp_path, monkeypatch)
    with ShardOwner.claim(uri, "slot", fsync=False) as owner:
        owner.submit(batch("a")).result()
    assert (disk.files, disk.names) == (set(), set())
