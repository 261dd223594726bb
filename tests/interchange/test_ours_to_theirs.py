"""Logs that we wrote, at every stage of their life, read by the reference implementation."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest

from datagen_ray import DatagenStore
from tests.interchange.logs import ROOTS, assert_same_answers, first_half, second_half

STAGES = ("flushed", "flushed often", "merged", "merged in part", "compacted", "collected")
EVENTS = 163
ANSWERS = 86


def write_log(uri: str, stage: str) -> None:
    """Three shards in turn, so that items move between them, then the upkeep of the stage."""
    for number, root in enumerate(ROOTS):
        with DatagenStore.open(uri, shard_id=f"worker-{number % 2}", fsync=False) as store:
            first_half(
                number,
                root,
                lambda item, store=store: store.open_stream(item, run_id="run-1"),  # type: ignore[misc]
                store.append,
            )
            if stage == "flushed often":
                store.flush()
            if stage in ("merged in part", "compacted", "collected"):
                store.flush()
                store.cleanup_own_shard()
    with DatagenStore.open(uri, shard_id="worker-9", fsync=False) as store:
        for number, root in enumerate(ROOTS):
            writer = store.resume_stream(root, run_id="run-2")
            assert writer is not None
            second_half(number, writer, store.append)
            if stage == "flushed often":
                store.flush()
    if stage in ("merged", "compacted", "collected"):
        for shard in ("worker-0", "worker-1", "worker-9"):
            with DatagenStore.open(uri, shard_id=shard, fsync=False) as store:
                store.cleanup_own_shard()
    if stage in ("compacted", "collected"):
        with DatagenStore.open(uri, fsync=False) as store:
            store.compact()
            store.refresh_indexes()
            if stage == "collected":
                store.collect_garbage(grace_s=0.0, wal_retention_s=0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_reads_our_log_as_we_do(tmp_path: Path, stage: str) -> None:
    uri = str(tmp_path / "log.lance")
    write_log(uri, stage)
    with DatagenStore.open(uri, read_only=True) as store:
        report = store.verify()
    assert report.is_clean
    assert (report.events, report.items, report.roots) == (EVENTS, 9, 3)
    merged = lance.dataset(uri).count_rows()
    assert (merged == report.events) is (stage in ("merged", "compacted", "collected"))
    assert (merged > 0) is ("merged" in stage or stage in ("compacted", "collected"))
    assert assert_same_answers(uri) == ANSWERS
