"""Logs that the reference implementation wrote: opened, read, resumed and continued by us."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance_context
import pytest

from datagen_ray import DatagenEvent, DatagenItemStatus, DatagenStore, DatagenStreamWriter
from tests.interchange.logs import (
    NEVER,
    ROOTS,
    assert_same_answers,
    every_item,
    first_half,
    second_half,
)


class ReferenceStream:
    """A stream writer of the reference, with the calls of ours."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def step_started(self, position: Any) -> DatagenEvent:
        return self._writer.step_started(_position(position))

    def step_completed(self, position: Any, fields: Sequence[Any] = ()) -> list[DatagenEvent]:
        return self._writer.step_completed(
            _position(position),
            [
                {
                    "name": field.name,
                    "op": field.op,
                    "value": field.value.to_dict(),
                    "field_type": field.field_type,
                    "codec_version": field.codec_version,
                }
                for field in fields
            ],
        )

    def item_failed(self, position: Any, error_type: str, **more: Any) -> DatagenEvent:
        return self._writer.item_failed(_position(position), error_type, **more)

    def item_terminal(self, status: str) -> DatagenEvent:
        return self._writer.item_terminal(status)


def _position(position: Any) -> dict[str, Any]:
    return {
        "step_name": position.step_name,
        "step_kind": position.step_kind.value,
        "index": position.step_index,
        "enclosing": position.enclosing_step,
        "selector": position.selector_step,
    }


def reference_writer(store: Any) -> Any:
    def open_stream(item_id: str) -> DatagenStreamWriter:
        parent = item_id.rpartition("/")[0] or None
        writer = store.open_stream(
            item_id, run_id="run-1", writer_epoch="theirs", parent_item_id=parent
        )
        return ReferenceStream(writer)  # type: ignore[return-value]

    return open_stream


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A log in which the reference wrote the first half of every item."""
    uri = str(tmp_path / "log.lance")
    store = lance_context.DatagenStore.open(uri)
    for number, root in enumerate(ROOTS):
        events: list[Any] = []  # one append, since the reference never merges what it appends
        first_half(number, root, reference_writer(store), events.extend)
        store.append(events)
    return uri


def test_we_read_the_log_of_the_reference_as_it_does(uri: str) -> None:
    assert assert_same_answers(uri) > 60
    with DatagenStore.open(uri, read_only=True) as store:
        report = store.verify(blobs=True)
    assert report.is_clean
    assert (report.items, report.roots) == (9, 3)


def test_opening_a_log_of_the_reference_to_read_changes_nothing(uri: str) -> None:
    def files() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in Path(uri).rglob("*") if p.is_file()}

    before = files()
    with DatagenStore.open(uri, read_only=True) as store:
        assert len(store.root_item_statuses()) == len(ROOTS)
        assert store.verify().is_clean
    assert files() == before


@pytest.mark.parametrize(
    ("shard", "upkeep"),
    [
        ("default", "none"),
        pytest.param("worker-3", "none", marks=pytest.mark.soak),
        ("worker-3", "merged"),
        ("default", "compacted"),
    ],
)
def test_we_resume_and_continue_what_the_reference_began(uri: str, shard: str, upkeep: str) -> None:
    with DatagenStore.open(uri, shard_id=shard, fsync=False) as store:
        for number, root in enumerate(ROOTS):
            writer = store.resume_stream(root, run_id="run-2")
            assert writer is not None
            assert writer.attempt == 1
            second_half(number, writer, store.append)
        assert store.resume_stream(NEVER, run_id="run-2") is None
        if upkeep != "none":
            store.flush()
            store.cleanup_own_shard()
        if upkeep == "compacted":
            store.compact()
            store.refresh_indexes()
        statuses = [store.root_item_statuses()[root] for root in ROOTS]
    assert statuses == ["completed", "filtered", "running"]
    assert assert_same_answers(uri) > 80


def test_the_reference_goes_on_with_what_we_continued(uri: str) -> None:
    with DatagenStore.open(uri, fsync=False) as store:
        for number, root in enumerate(ROOTS):
            writer = store.resume_stream(root, run_id="run-2")
            assert writer is not None
            second_half(number, writer, store.append)
    theirs = lance_context.DatagenStore.open(uri)
    last = theirs.resume_stream(ROOTS[-1], run_id="run-3", writer_epoch="theirs")
    assert last.attempt == 2
    theirs.append([last.item_terminal("completed")])
    with DatagenStore.open(uri, read_only=True) as store:
        folded = store.fold_item(ROOTS[-1]).folded()
        assert folded is not None
        assert folded.status is DatagenItemStatus.COMPLETED
        assert store.verify().is_clean
    assert assert_same_answers(uri) > 80


def test_the_same_stream_has_the_same_ids_on_both_sides(tmp_path: Path) -> None:
    ids = []
    for side in ("ours", "theirs"):
        uri = str(tmp_path / side / "log.lance")
        if side == "ours":
            with DatagenStore.open(uri, fsync=False) as store:
                first_half(
                    0, ROOTS[0], lambda item: store.open_stream(item, run_id="r"), store.append
                )
        else:
            theirs = lance_context.DatagenStore.open(uri)
            first_half(0, ROOTS[0], reference_writer(theirs), theirs.append)
        with DatagenStore.open(uri, read_only=True) as reader:
            ids.append(
                [
                    (event.event_id, event.checkpoint_id, event.item_seq)
                    for item in every_item(ROOTS[:1])
                    for event in reader.events_for_item(item)
                ]
            )
    assert ids[0] == ids[1]
    assert len(ids[0]) > 30
