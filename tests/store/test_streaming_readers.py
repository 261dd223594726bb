"""A read that has already handed on rows goes on when maintenance removes the files under it."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from datagen_ray.log.schema import encode_events
from datagen_ray.store.collect import collect_garbage
from datagen_ray.store.compaction import cleanup_old_versions, compact
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.store import DatagenStore
from tests.store.maintenance_support import add_generations, ids_of, merger
from tests.store.writer_support import batch, new_log

BATCHES = 400
ROWS_A_FRAGMENT = 3


@pytest.mark.xfail(
    strict=True,
    reason="events() reads one version of the base table to its end and fails when its files go",
)
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
