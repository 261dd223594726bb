"""What pylance's MemWAL leaves on disk and says in its errors, as this package relies on it.

MemWAL is experimental. When one of these fails with a new pylance, the message says what moved;
`store/layout.py`, `store/shard.py` and `store/lance_errors.py` are where it is known.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from datagen_ray.errors import (
    InternalError,
    LogNotFoundError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.store import lance_errors, layout
from datagen_ray.store.shard import decode_manifest

SHARD = layout.shard_uuid("slot")
SCHEMA = pa.schema(
    [
        pa.field(
            "event_id",
            pa.string(),
            nullable=False,
            metadata={"lance-schema:unenforced-primary-key": "true"},
        ),
        pa.field("number", pa.int64()),
    ]
)


def rows(*ids: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids), pa.array(range(len(ids)), pa.int64())], schema=SCHEMA)


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    uri = str(tmp_path / "log.lance")
    made = lance.write_dataset(pa.Table.from_batches([], schema=SCHEMA), uri, schema=SCHEMA)
    made.initialize_mem_wal(maintained_indexes=[], unsharded=True, max_memtable_batches=4)
    return made


def claim(dataset: Any, **limits: int) -> Any:
    return lance.dataset(dataset.uri).mem_wal_writer(SHARD, max_wal_flush_interval_ms=1, **limits)


def tree(dataset: Any) -> list[str]:
    root = Path(dataset.uri)
    shard = root / layout.shard_folder(SHARD)
    return sorted(str(path.relative_to(root)) for path in shard.rglob("*") if path.is_file())


def read(dataset: Any, key: str) -> bytes:
    return (Path(dataset.uri) / key).read_bytes()


def failure(call: Any, *arguments: Any) -> Exception:
    with pytest.raises(lance_errors.LANCE_ERRORS) as raised:
        call(*arguments)
    return raised.value


def test_files_of_a_writer_lie_where_the_layout_says(dataset):
    writer = claim(dataset)
    assert tree(dataset) == sorted(
        [layout.manifest_key(SHARD, 1), layout.version_hint_key(SHARD)]
    ), "an empty claim leaves other files than one manifest and the hint"
    writer.put(rows("a"))
    writer.put(rows("b", "c"))
    assert {layout.wal_key(SHARD, 1), layout.wal_key(SHARD, 2)} <= set(tree(dataset)), (
        "WAL entries have other names, or do not start at 1"
    )
    assert read(dataset, layout.version_hint_key(SHARD)) == b'{"version":1}'
    writer.close()


def test_manifest_fields_have_the_numbers_that_are_parsed(dataset):
    claim(dataset)
    first = decode_manifest(read(dataset, layout.manifest_key(SHARD, 1)), SHARD, 1)
    assert (first.writer_epoch, first.replay_after, first.last_seen) == (1, 0, 0)
    assert (first.current_generation, first.sstables) == (1, ())
    writer = claim(dataset)
    writer.put(rows("a", "b"))
    writer.close()
    versions = [
        layout.parse_manifest_name(name)
        for name in os.listdir(Path(dataset.uri) / layout.manifest_folder(SHARD))
    ]
    latest = max(version for version in versions if version)
    manifest = decode_manifest(read(dataset, layout.manifest_key(SHARD, latest)), SHARD, latest)
    assert manifest.writer_epoch == 2, "a claim does not count the epoch up by one"
    assert manifest.replay_after == manifest.last_seen
    assert manifest.replay_after in (1, 2), "the replay position is not where it was read"
    assert manifest.current_generation == 2
    (table,) = manifest.sstables
    assert (table.generation, table.physical_rows) == (1, 2)
    assert layout.parse_sstable_name(table.path) == 1, f"SSTable folders look like {table.path}"
    stored = lance.dataset(f"{dataset.uri}/{layout.sstable_key(SHARD, table.path)}").to_table()
    assert stored.column_names == ["event_id", "number", "_tombstone"]


def test_a_wal_entry_is_an_arrow_stream_with_the_writer_epoch(dataset):
    writer = claim(dataset)
    writer.put(rows("a", "b"))
    claim(dataset)
    with pa.ipc.open_stream(read(dataset, layout.wal_key(SHARD, 1))) as entry:
        assert entry.schema.metadata == {b"generation": b"1", b"writer_epoch": b"1"}
        assert entry.read_all().column_names == ["event_id", "number", "_tombstone"]
    with pa.ipc.open_stream(read(dataset, layout.wal_key(SHARD, 2))) as sentinel:
        assert sentinel.schema.metadata == {b"fence_sentinel": b"true", b"writer_epoch": b"2"}
        assert sentinel.schema.names == []


def test_one_put_is_one_entry_however_many_rows(dataset):
    writer = claim(dataset)
    writer.put(rows(*(str(number) for number in range(50_000))))
    with pa.ipc.open_stream(read(dataset, layout.wal_key(SHARD, 1))) as entry:
        assert entry.read_all().num_rows == 50_000
    assert layout.wal_key(SHARD, 2) not in tree(dataset)
    writer.close()


def test_stored_limits_are_kept_but_not_applied(dataset):
    stored = dataset.mem_wal_index_details()["writer_config_defaults"]
    assert stored["max_memtable_batches"] == "4"
    writer = claim(dataset)
    for number in range(12):
        writer.put(rows(str(number)))
    assert writer.memtable_stats()["generation"] == 1, (
        "Lance applies a log's stored limits now, so claims need not pass them any more"
    )
    writer.close()


def test_statistics_have_the_names_that_are_read(dataset):
    writer = claim(dataset)
    assert "memtable_flush_failures" in writer.stats()
    assert "frozen_count" in writer.memtable_stats()
    writer.close()


def test_the_text_of_a_fence(dataset):
    old = claim(dataset)
    old.put(rows("a"))
    claim(dataset)
    for call in (lambda: old.put(rows("b")), old.close):
        error = failure(call)
        assert "Writer fenced (peer claimed epoch)" in str(error)
        assert isinstance(lance_errors.translate(error, "testing"), WriterFencedError)


def test_the_text_of_a_persistence_failure(dataset):
    writer = claim(dataset)
    writer.put(rows("a"))
    wal = Path(dataset.uri) / layout.wal_folder(SHARD)
    wal.rename(wal.with_name("aside"))
    wal.touch()
    error = failure(writer.put, rows("b"))
    assert "Writer fenced (persistence failure)" in str(error)
    assert isinstance(lance_errors.translate(error, "testing"), WriterPoisonedError)


def test_the_texts_of_lost_claim_races(dataset):
    texts: list[Exception] = []
    claim(dataset).put(rows("a"))

    def race(opened: Any) -> None:
        try:
            opened.mem_wal_writer(SHARD, max_wal_flush_interval_ms=1)
        except lance_errors.LANCE_ERRORS as error:
            texts.append(error)

    for _ in range(10):
        opened = [lance.dataset(dataset.uri) for _ in range(4)]
        threads = [threading.Thread(target=race, args=(each,)) for each in opened]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts, "no claim lost against another in ten rounds of four"
    for error in texts:
        assert isinstance(lance_errors.translate(error, "testing"), WriterFencedError), str(error)


def test_the_text_of_a_tail_past_the_limits(dataset):
    writer = claim(dataset)
    for number in range(6):
        writer.put(rows(str(number)))
    error = failure(lambda: claim(dataset, max_memtable_batches=3))
    assert lance_errors.is_tail_too_long(error), str(error)


def test_the_texts_of_refused_and_closed(dataset):
    writer = claim(dataset, max_memtable_rows=10)
    error = failure(writer.put, rows(*(str(number) for number in range(11))))
    assert lance_errors.REFUSED_PHRASE in str(error)
    assert isinstance(lance_errors.translate(error, "testing"), InternalError)
    writer.put(rows("still alive"))
    writer.close()
    assert lance_errors.CLOSED_PHRASE in str(failure(writer.put, rows("a")))


def test_the_texts_of_creation_races_and_missing_datasets(dataset, tmp_path):
    empty = pa.Table.from_batches([], schema=SCHEMA)
    again = failure(lambda: lance.write_dataset(empty, dataset.uri, mode="create"))
    assert lance_errors.is_creation_race(again), str(again)
    second = failure(lambda: dataset.initialize_mem_wal(unsharded=True))
    assert lance_errors.is_creation_race(second), str(second)
    missing = failure(lance.dataset, str(tmp_path / "missing"))
    assert lance_errors.is_not_found(missing), str(missing)
    assert isinstance(lance_errors.translate(missing, "testing"), LogNotFoundError)


def test_an_unknown_text_is_a_storage_error_without_source_locations():
    error = OSError("LanceError(IO): disk on fire, /home/x/lance/rust/lance/src/io.rs:12:34")
    translated = lance_errors.translate(error, "testing")
    assert type(translated) is StorageError
    assert "disk on fire" in str(translated)
    assert ".rs" not in str(translated)
