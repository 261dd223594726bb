"""A read that has already handed on rows goes on when maintenance removes the files under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from datagen_ray.errors import StorageError
from datagen_ray.log.schema import encode_events
from datagen_ray.store import streaming
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import cleanup_old_versions, compact
from datagen_ray.store.levels import SourceVanishedError
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from tests.store.maintenance_support import add_generations, ids_of, merger
from tests.store.writer_support import batch, new_log

BATCHES = 400
ROWS_A_FRAGMENT = 3


def test_a_stream_goes_on_though_its_base_version_and_sstables_are_removed(tmp_path: Path) -> None:
    uri = new_log(tmp_path)
    storage = LogStorage(uri)
    names = [f"base{number}" for number in range(BATCHES)]
    rows = pa.Table.from_batches([encode_events(batch(name)) for name in names])
    # so many files that the first piece is handed on long before the last one is opened
    lance.write_dataset(rows, uri, mode="append", max_rows_per_file=ROWS_A_FRAGMENT)
    add_generations(uri, "upper", "more")
    store = DatagenStore.open(uri, read_only=True)
    stream = store.events(columns=["event_id", "value_str"])
    seen = next(stream).column("event_id").to_pylist()

    merger(uri).run()
    compact(storage)
    cleanup_old_versions(storage, retention_s=0)
    collect_garbage(storage, grace_s=0, wal_retention_s=0)

    seen += [each for piece in stream for each in piece.column("event_id").to_pylist()]
    assert sorted(seen) == ids_of(*names, "upper", "more"), "each event exactly once"


class Vanishing:
    """Has the base table's files vanish after so many of its batches, time and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, times: int) -> None:
        self.vanished = 0
        real = streaming.batches

        def failing(dataset: Any, names: Any, where: Any) -> Iterator[pa.RecordBatch]:
            for number, each in enumerate(real(dataset, names, where, 7)):
                if number == after and self.vanished < times:
                    self.vanished += 1
                    raise SourceVanishedError("cleaned up")
                yield each

        monkeypatch.setattr(streaming, "batches", failing)


@pytest.mark.parametrize("where", [None, pc.field("event_id") != "none"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_was_handed_on_is_left_out_however_often_files_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, where: pc.Expression | None
) -> None:
    uri = new_log(tmp_path)
    names = [f"base{number}" for number in range(40)]
    rows = pa.Table.from_batches([encode_events(batch(name)) for name in names])
    # Twice, as a foreign writer may leave them: they are held back and come once.
    twice = pa.concat_tables([rows, rows.slice(3, 20)])
    lance.write_dataset(twice, uri, mode="append", max_rows_per_file=ROWS_A_FRAGMENT)
    add_generations(uri, "upper")
    vanishing = Vanishing(monkeypatch, after, times=4)
    store = DatagenStore.open(uri, read_only=True)
    seen: list[str] = []
    for piece in store.events(where, columns=["event_id"]):
        seen += piece.column("event_id").to_pylist()
        merger(uri).run()
        compact(LogStorage(uri))
    assert vanishing.vanished == 4
    assert sorted(seen) == ids_of(*names, "upper")


def test_a_stream_fails_rather_than_leave_out_a_row_whose_hash_another_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_log(tmp_path)
    names = [f"base{number}" for number in range(10)]
    rows = pa.Table.from_batches([encode_events(batch(name)) for name in names])
    lance.write_dataset(rows, uri, mode="append")
    Vanishing(monkeypatch, 1, times=1)
    monkeypatch.setattr(streaming, "hashes_of", lambda ids: np.arange(len(ids), dtype=np.int64) % 3)
    store = DatagenStore.open(uri, read_only=True)
    with pytest.raises(StorageError, match="read again"):
        list(store.events(columns=["event_id"]))


def test_a_stream_whose_files_are_gone_for_good_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_log(tmp_path)
    add_generations(uri, "upper")
    merger(uri).run()
    Vanishing(monkeypatch, 0, times=1000)
    store = DatagenStore.open(uri, read_only=True)
    with pytest.raises(StorageError, match="restore it"):
        list(store.events())
