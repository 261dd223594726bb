from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.errors import LeaseLostError, LogNotFoundError, RunSupersededError, StorageError
from datagen_ray.store import layout, maintenance
from datagen_ray.store.compaction import uncovered_rows
from datagen_ray.store.creation import open_log
from datagen_ray.store.lease import MaintenanceLease
from datagen_ray.store.maintenance import (
    MaintenanceOptions,
    MaintenanceReport,
    finish_log,
    maintain_once,
    maintain_until,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner
from tests.store.maintenance_support import (
    SLOT,
    add_generation,
    add_generations,
    append,
    base_ids,
    generations,
    ids_of,
    log_with_generations,
    manifest_of,
    visible_ids,
)
from tests.store.writer_support import event, new_log

EAGER = MaintenanceOptions(
    small_fragments=2, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)


def log_of_two_slots(folder: Path) -> str:
    uri = log_with_generations(folder, "a", "b", slot="one")
    add_generations(uri, "c", "d", slot="two")
    return uri


def test_a_pass_merges_compacts_indexes_and_cleans(tmp_path):
    uri = log_of_two_slots(tmp_path)
    report = maintain_once(uri, options=EAGER)
    assert report.failures == []
    assert len(report.merged) == 4
    assert report.compaction.fragments_removed == 4
    assert set(report.indexes.created) == {"event_id", "item_id", "root_item_id"}
    assert report.versions.versions > 0
    assert report.collection.count("sstable") == 4
    assert report.pending_generations == 0
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of(*"abcd")
    assert len(open_log(uri).get_fragments()) == 1
    assert set(uncovered_rows(LogStorage(uri)).values()) == {0}
    again = maintain_once(uri, options=EAGER)
    assert (again.merged, again.compaction, again.collection.removed) == ([], None, ())


def test_a_pass_claims_no_shard_and_leaves_the_tail_of_a_writer(tmp_path):
    uri = log_with_generations(tmp_path, "a")
    with ShardOwner.claim(uri, SLOT) as owner:
        append(owner, "b")
        before = manifest_of(uri)
        maintain_once(uri, options=EAGER)
        after = manifest_of(uri)
        assert (after.writer_epoch, after.replay_after) == (
            before.writer_epoch,
            before.replay_after,
        )
        append(owner, "c")
        assert visible_ids(uri) == ids_of(*"abc")
    assert visible_ids(uri) == ids_of(*"abc")


def test_shards_that_their_workers_merge_are_skipped(tmp_path):
    uri = log_of_two_slots(tmp_path)
    report = maintain_once(uri, skip_slots=["one"], options=EAGER)
    assert {done.shard_id for done in report.merged} == {layout.shard_uuid("two")}
    assert generations(uri, "one") == [1, 2]
    assert report.pending_generations == 2
    assert visible_ids(uri) == ids_of(*"abcd")


def test_a_compaction_that_is_not_due_is_left(tmp_path):
    uri = log_of_two_slots(tmp_path)
    assert maintain_once(uri).compaction is None
    assert len(open_log(uri).get_fragments()) == 4


def test_a_part_that_fails_is_reported_and_the_others_run(tmp_path, monkeypatch):
    uri = log_of_two_slots(tmp_path)
    real = maintenance.ShardMerger

    def merger(storage: LogStorage, shard: str, **options: Any) -> Any:
        if shard == layout.shard_uuid("one"):
            raise StorageError("that shard is away")
        return real(storage, shard, **options)

    monkeypatch.setattr(maintenance, "ShardMerger", merger)
    report = maintain_once(uri, options=EAGER)
    assert [str(failure.error) for failure in report.failures] == ["that shard is away"]
    assert layout.shard_uuid("one") in report.failures[0].part
    assert len(report.merged) == 2
    assert report.indexes is not None
    with pytest.raises(StorageError, match="that shard is away"):
        report.raise_first_failure()


def test_losing_the_lease_ends_a_pass_at_once(tmp_path):
    uri = log_of_two_slots(tmp_path)
    version = open_log(uri).version

    def lost() -> None:
        raise LeaseLostError("another was elected")

    with pytest.raises(LeaseLostError):
        maintain_once(uri, options=EAGER, check_still_leader=lost)
    assert open_log(uri).version == version


def test_where_there_is_no_log_there_is_nothing_to_maintain(tmp_path):
    with pytest.raises(LogNotFoundError):
        maintain_once(str(tmp_path / "log.lance"))
    assert list(tmp_path.iterdir()) == []


def test_conflicting_events_are_in_the_report(tmp_path):
    uri = new_log(tmp_path)
    add_generation(uri, [event("x", text="one")], [event("x", text="two")])
    report = maintain_once(uri, options=EAGER)
    assert report.conflicting_event_ids == ("x",)
    assert report.held_back == {layout.shard_uuid(SLOT): [1]}
    assert report.failures == []
    assert json.loads(json.dumps(report.to_dict()))["conflicting_event_ids"] == ["x"]


def test_the_end_of_a_run_leaves_everything_in_the_base_table(tmp_path):
    uri = log_of_two_slots(tmp_path)
    lost = ShardOwner.claim(uri, "lost worker")
    append(lost, "e", "f")
    done = ShardOwner.claim(uri, "one")
    append(done, "g")
    done.close()
    idle = manifest_of(uri, "two").writer_epoch
    report = finish_log(uri, options=EAGER)
    report.raise_first_failure()
    assert report.pending_generations == 0
    assert sorted(base_ids(uri)) == visible_ids(uri) == ids_of(*"abcdefg")
    assert manifest_of(uri, "two").writer_epoch == idle, "a shard without a tail is not claimed"
    lost._appender._writer = None  # its process is gone


def test_the_end_of_a_superseded_run_claims_nothing(tmp_path):
    uri = new_log(tmp_path)
    other = ShardOwner.claim(uri, SLOT)
    append(other, "a")

    def superseded() -> None:
        raise RunSupersededError("a later run took over")

    with pytest.raises(RunSupersededError):
        finish_log(uri, check_not_superseded=superseded)
    append(other, "b")
    other.close()


class Passes:
    """Counts the passes of a maintainer and stops it after some."""

    def __init__(self, wanted: int) -> None:
        self.stop = threading.Event()
        self.reports: list[MaintenanceReport] = []
        self._wanted = wanted

    def __call__(self, report: MaintenanceReport) -> None:
        self.reports.append(report)
        if len(self.reports) == self._wanted:
            self.stop.set()


def test_an_elected_maintainer_makes_passes_until_it_is_stopped(tmp_path):
    uri = log_of_two_slots(tmp_path)
    passes = Passes(3)
    lease = MaintenanceLease(uri, "maintainer")
    maintain_until(passes.stop, uri, lease, interval_s=0.001, options=EAGER, on_report=passes)
    assert [len(report.merged) for report in passes.reports] == [4, 0, 0]
    assert MaintenanceLease(uri, "next").try_acquire(), "the lease was given back"


def test_a_candidate_waits_while_another_maintains(tmp_path):
    uri = log_of_two_slots(tmp_path)
    holder = MaintenanceLease(uri, "holder", lease_s=0.02)
    assert holder.try_acquire()
    passes = Passes(1)
    candidate = MaintenanceLease(uri, "candidate", lease_s=0.02, monotonic=lambda: 0.0)
    asked = threading.Event()
    real = candidate.try_acquire

    def try_acquire() -> bool:
        asked.set()
        return real()

    candidate.try_acquire = try_acquire  # type: ignore[method-assign]
    thread = threading.Thread(
        target=maintain_until,
        args=(passes.stop, uri, candidate),
        kwargs={"interval_s": 0.001, "options": EAGER, "on_report": passes},
    )
    thread.start()
    assert asked.wait(30)
    assert passes.reports == []
    assert generations(uri, "one") == [1, 2]
    holder.release()
    thread.join()
    assert len(passes.reports) == 1
    assert candidate.term is None


def test_the_command_makes_one_pass(tmp_path, capsys):
    uri = log_of_two_slots(tmp_path)
    assert status_of(["maintain", uri, "--once", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["generations_merged"], report["events_merged"]) == (4, 12)
    assert status_of(["maintain", uri, "--once", "--grace-s", "0", "--small-fragments", "1"]) == 0
    out = capsys.readouterr().out
    assert "compacted   4 fragments into 1" in out
    assert "4 SSTables" in out
    assert visible_ids(uri) == ids_of(*"abcd")


def test_the_command_tells_of_conflicts_by_its_exit_status(tmp_path, capsys):
    uri = new_log(tmp_path)
    add_generation(uri, [event("x", text="one")], [event("x", text="two")])
    assert status_of(["maintain", uri, "--once"]) == 1
    assert "held back" in capsys.readouterr().out
    assert status_of(["maintain", str(tmp_path / "none.lance"), "--once"]) == 2
    assert "Traceback" not in capsys.readouterr().err
