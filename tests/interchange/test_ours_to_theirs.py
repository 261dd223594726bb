"""Logs that we wrote, at every stage of their life, read by the reference implementation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lance
import lance_context
import pytest

from datagen_ray import DatagenStore
from tests.conformance.golden import same
from tests.interchange.logs import ROOTS, assert_same_answers, first_half, second_half
from tests.log.builders import created, field_set

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


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        ({"n": 2**70}, {"n": float(2**70)}),
        ({"n": 2**64 - 1}, {"n": 2**64 - 1}),
        ({"n": 1e22}, {"n": 1e22}),
        (nested(127), nested(127)),
        ("\0 \U0010ffff", "\0 \U0010ffff"),
    ],
    ids=["nan", "inf", "-inf", "huge", "u64", "exponent", "deep", "text"],
)
def test_values_that_the_reference_would_not_write_keep_it_from_reading_nothing(
    tmp_path: Path, value: Any, shown: Any
) -> None:
    uri = str(tmp_path / "log.lance")
    with DatagenStore.open(uri, fsync=False) as store:
        store.append([created(), field_set(2, value)])
    theirs = lance_context.DatagenStore.open(uri)
    assert same(shown, theirs.fold_item("5")["fields"]["score"]["value"]["value"])
    assert len(theirs.item_events("5")) == 2
    assert theirs.overview()["items"] == 1
    with DatagenStore.open(uri, read_only=True) as store:
        folded = store.fold_item("5").folded()
        assert folded is not None
        assert same(value, folded.fields["score"].value.value)
