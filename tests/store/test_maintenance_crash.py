"""Maintenance is killed at every durable boundary; then the log is read, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from datagen_ray.crashpoints import ENVIRONMENT_VARIABLE, MAINTENANCE_POINTS
from datagen_ray.store import layout
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log
from datagen_ray.store.snapshot import LogReader
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SHARD,
    append,
    base_ids,
    manifest_of,
    merger,
    repeated,
    visible_ids,
)
from tests.store.writer_support import batch, new_log, stored_ids, wal_positions

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("maintain_until_killed.py")
APPENDING_PROGRAM = Path(__file__).with_name("append_until_killed.py")
PACKAGE_ROOT = Path(__file__).parents[2]
EVERYTHING = MaintenanceOptions(
    small_fragments=1, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)
# where dying late leaves other things behind than dying early does
TWICE = {"before_merge_commit", "after_merge_commit", "after_drain", "after_wal_removal"}


def cases() -> list[tuple[str, int]]:
    return [(p, n) for p in MAINTENANCE_POINTS for n in ((1, 4) if p in TWICE else (1,))]


def run(uri: str, prefix: str, point: str) -> tuple[int, dict[str, int]]:
    """The exit code, and the acknowledged batches with their numbers of rows."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), uri, prefix],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), ENVIRONMENT_VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    return done.returncode, {name: int(rows) for name, rows in lines}


def check_against(uri: str, acknowledged: dict[str, int]) -> None:
    """Every acknowledged event is seen exactly once, whole batches only, and no other content."""
    rows = LogReader(LogStorage(uri)).snapshot().read(["event_id", "value_str"], None)
    ids = rows["event_id"].to_pylist()
    assert repeated(ids) == []
    assert set(rows["value_str"].to_pylist()) <= {"x"}
    counts = Counter(event_id.rpartition(".")[0] for event_id in ids)
    for name, count in acknowledged.items():
        assert counts[name] == count, f"{name} was acknowledged with {count} rows"
    for name, count in counts.items():
        assert count == 1 + int(name[1:]) % 5, f"{name} is torn"
    assert repeated(base_ids(uri)) == [], "a physical duplicate"


def sstable_folders(uri: str) -> list[str]:
    names = os.listdir(Path(uri) / layout.shard_folder(SHARD))
    return [name for name in names if layout.parse_sstable_name(name)]


@pytest.mark.parametrize(("point", "count"), cases())
def test_nothing_is_lost_or_doubled_when_maintenance_is_killed_at(point, count, tmp_path):
    uri = new_log(tmp_path)
    code, acknowledged = run(uri, "a", f"{point}:{count}")
    assert code == -signal.SIGKILL, "the point was not reached"
    check_against(uri, acknowledged)
    code, again = run(uri, "b", "")
    assert code == 0
    check_against(uri, {**acknowledged, **again})
    finish_log(uri, options=EVERYTHING).raise_first_failure()
    check_against(uri, {**acknowledged, **again})
    assert sorted(base_ids(uri)) == visible_ids(uri)
    assert manifest_of(uri).sstables == ()
    assert sstable_folders(uri) == []
    assert len(wal_positions(uri, "slot")) <= 2, "more than the last covered entry and a sentinel"
    with DatagenStore.open(uri, read_only=True) as store:
        assert store.verify().copies == 0


def test_a_process_that_was_stopped_is_silent_though_its_wal_was_collected(tmp_path):
    uri = new_log(tmp_path)
    stalled = subprocess.Popen(
        [sys.executable, str(APPENDING_PROGRAM), uri, "a", "for ever"],
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
        append(heir, *(f"h{number}" for number in range(20)))
        heir.flush()
        append(heir, "i0")
    finish_log(uri, options=EVERYTHING).raise_first_failure()
    assert len(wal_positions(uri, "slot")) == 1
    stalled.send_signal(signal.SIGCONT)
    rest, errors = stalled.communicate(timeout=60)
    assert stalled.returncode == 1
    assert "WriterFencedError" in errors
    names = [line.split(" ")[0] for line in (*acknowledged, *rest.splitlines())]
    assert {f"{name}.0" for name in names} <= seen
    assert {f"{name}.0" for name in names} <= set(visible_ids(uri))
    with ShardOwner.claim(uri, "slot") as heir:
        append(heir, "j0")
    expected = {event.event_id for event in batch("j0")}
    assert expected <= set(visible_ids(uri))


def test_a_merger_that_was_stopped_in_its_commit_and_goes_on_doubles_nothing(tmp_path):
    uri = new_log(tmp_path)
    with ShardOwner.claim(uri, "slot") as owner:
        for number in range(8):
            append(owner, f"n{number}")
            owner.flush()
    program = (
        "import sys\n"
        "from datagen_ray.store.merge import ShardMerger\n"
        "from datagen_ray.store.storage import LogStorage\n"
        "sys.stdout.write('go\\n'); sys.stdout.flush()\n"
        "print(len(ShardMerger(LogStorage(sys.argv[1]), sys.argv[2]).run().generations))\n"
    )
    stalled = subprocess.Popen(
        [sys.executable, "-c", program, uri, SHARD],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert stalled.stdout is not None
    assert stalled.stdout.readline() == "go\n"
    first = manifest_of(uri)
    while manifest_of(uri) == first and stalled.poll() is None:
        pass  # until it has drained one and is at the next
    stalled.send_signal(signal.SIGSTOP)
    merger(uri).run()
    finish_log(uri, options=EVERYTHING).raise_first_failure()
    stalled.send_signal(signal.SIGCONT)
    _, errors = stalled.communicate(timeout=60)
    assert stalled.returncode == 0, errors
    expected = sorted(e.event_id for number in range(8) for e in batch(f"n{number}"))
    assert sorted(base_ids(uri)) == visible_ids(uri) == expected
