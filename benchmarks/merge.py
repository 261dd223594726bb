"""Merging 10,000 events into a large base table, beside the bare ``merge_insert``; its upkeep.

Four questions, each on a log made for it:

- time: one generation merged, synced and drained by `ShardMerger`, and the same number of rows by
  Lance's ``merge_insert`` alone (the same index, the same mark, no sync, no drain);
- appends: the p99 of lone appends while another shard's backlog is merged and the table
  compacted, and without;
- memory: the peak above idle while a backlog is merged, beside the largest generation;
- upkeep: the files and bytes left after checkpoints, a pass of maintenance and collection, beside
  one compacted table of the same rows.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from benchmarks.append import POSITION, checkpoints
from benchmarks.report import Report
from datagen_ray import (
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenStore,
    DatagenStreamWriter,
    DatagenValue,
)
from datagen_ray.log.schema import DATAGEN_SCHEMA, encode_events
from datagen_ray.store.compaction import INDEXED_COLUMNS, compact, refresh_indexes
from datagen_ray.store.creation import create_log, open_log
from datagen_ray.store.layout import shard_folder, shard_uuid
from datagen_ray.store.maintenance import MaintenanceOptions, finish_log, maintain_once
from datagen_ray.store.merge import ShardMerger
from datagen_ray.store.storage import LogStorage

ROWS_A_MERGE = 10_000
ROWS_A_WRITE = 100_000
BACKLOG = 40
"""Generations that are merged while appends are timed."""
SLOT = "bench"
NOTHING_STAYS = MaintenanceOptions(
    small_fragments=1, version_retention_s=0, grace_s=0, wal_retention_s=0, leftover_age_s=0
)


def main() -> None:
    options = parse()
    if options.measure_memory is not None:
        merge_backlog(options.measure_memory)
        return
    report = Report("merge: generations into the base table")
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        if options.backlog_gb is not None:
            memory_of_a_merge(report, folder / "memory", int(options.backlog_gb * 1024))
            report.show(options.json)
            return
        time_of_a_merge(report, folder / "time", options.rows, options.runs)
        appends_beside_a_merge(report, folder / "appends", options.appends)
        memory_of_a_merge(report, folder / "memory", options.backlog_mb)
        upkeep(report, folder / "upkeep", options.checkpoints)
    report.show(options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of the base table")
    parser.add_argument("--backlog-mb", type=int, default=256, help="bytes to merge for memory")
    parser.add_argument(
        "--backlog-gb", type=float, default=None, help="measure memory alone, with so much to merge"
    )
    parser.add_argument("--checkpoints", type=int, default=20_000, help="appended for the upkeep")
    parser.add_argument("--appends", type=int, default=2000, help="lone appends to take a p99 of")
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each figure; the median counts"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the logs")
    parser.add_argument("--measure-memory", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def time_of_a_merge(report: Report, folder: Path, base_rows: int, runs: int) -> None:
    uri = new_log(folder, base_rows)
    ours, bare = [], []
    first = base_rows
    for run in range(runs):
        write_generation(uri, rows_of(first, ROWS_A_MERGE))
        merger = ShardMerger(LogStorage(uri), shard_uuid(SLOT))
        ours.append(seconds(lambda merger=merger: merger.run()))
        first += ROWS_A_MERGE
        more = rows_of(first, ROWS_A_MERGE)
        bare.append(seconds(lambda run=run, more=more: bare_merge(uri, more, run + 1)))
        first += ROWS_A_MERGE
    assert open_log(uri).count_rows() == first
    one, other = statistics.median(ours), statistics.median(bare)
    report.add(f"merge of {ROWS_A_MERGE:,} rows into {base_rows:,}", one * 1000, "ms")
    report.add("  bare merge_insert", other * 1000, "ms", against="ours", ratio=one / other)


def bare_merge(uri: str, rows: pa.Table, generation: int) -> None:
    builder = open_log(uri).merge_insert("event_id").when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([CompactedSsTable(shard_uuid("bare"), generation)])
    builder.execute(rows)


def appends_beside_a_merge(report: Report, folder: Path, appends: int) -> None:
    uri = new_log(folder, ROWS_A_WRITE)
    for number in range(BACKLOG):
        write_generation(uri, rows_of(ROWS_A_WRITE + number * ROWS_A_MERGE, ROWS_A_MERGE))
    batches = iter(checkpoints("lone", 2 * appends))
    with DatagenStore.open(uri, shard_id="appending") as store:

        def p99(busy: Callable[[], bool]) -> float:
            times = []
            while len(times) < appends and busy():
                start = time.perf_counter()
                store.append_checkpoint(next(batches))
                times.append(time.perf_counter() - start)
            return statistics.quantiles(times, n=100)[98] * 1000

        alone = p99(lambda: True)
        merging = threading.Thread(target=merge_and_compact, args=(uri,))
        merging.start()
        beside = p99(merging.is_alive)
        merging.join()
    report.add("append p99 while merge and compaction run", beside, "ms")
    report.add("  without", alone, "ms", against="while", ratio=beside / alone)


def merge_and_compact(uri: str) -> None:
    storage = LogStorage(uri)
    ShardMerger(storage, shard_uuid(SLOT)).run(at_most=BACKLOG // 2)
    compact(storage)
    ShardMerger(storage, shard_uuid(SLOT)).run()
    compact(storage)


def memory_of_a_merge(report: Report, folder: Path, backlog_mb: int) -> None:
    uri = new_log(folder, ROWS_A_WRITE)
    largest, first, written = 0, ROWS_A_WRITE, 0
    while written < backlog_mb << 20:
        rows = rows_of(first, 50_000, characters=1000)
        write_generation(uri, rows)
        first += rows.num_rows
        written += rows.nbytes
        largest = max(largest, rows.nbytes)
    program = [sys.executable, "-m", "benchmarks.merge", "--measure-memory", uri]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    above_idle = float(printed.split()[-1])
    report.add(f"peak memory above idle, {written >> 20} MB backlog", above_idle / 2**20, "MB")
    report.add(
        "  largest generation", largest / 2**20, "MB", against="peak", ratio=above_idle / largest
    )


def merge_backlog(uri: str) -> None:
    """In a process of its own: merge all there is, and print the peak above idle in bytes."""
    write_generation(uri, rows_of(0, 100), slot="warm-up")
    ShardMerger(LogStorage(uri), shard_uuid("warm-up")).run()
    idle, peak, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    maintain_once(uri, options=MaintenanceOptions(small_fragments=1 << 30)).raise_first_failure()
    done.set()
    watcher.join()
    print(peak[0] - idle)


def upkeep(report: Report, folder: Path, count: int) -> None:
    uri = new_log(folder, 0)
    with DatagenStore.open(uri, shard_id=SLOT) as store:
        store.spawn_periodic_cleanup(1.0)
        owner = store._writer()
        waiting = [owner.submit(batch) for batch in varied_checkpoints(count)]
        for future in waiting:
            future.result()
    finish_log(uri, options=NOTHING_STAYS).raise_first_failure()
    files, size = tree(Path(uri))
    one_table = folder / "one.lance"
    lance.write_dataset(open_log(uri).to_table(), str(one_table))
    _, rows_only = tree(one_table)
    for column in INDEXED_COLUMNS:
        lance.dataset(str(one_table)).create_scalar_index(column, "BTREE")
    lance.dataset(str(one_table)).cleanup_old_versions(older_than=timedelta(0))
    _, indexed = tree(one_table)
    report.add(f"files after {count:,} checkpoints", files, "files")
    each = files / count * 1000
    report.add("  a thousand checkpoints", each, "files", against="5", ratio=each / 5)
    report.add("bytes after maintenance", size / 2**20, "MB")
    for what, least in (("indexed, ", indexed), ("", rows_only)):
        report.add(
            f"  one table of the rows, {what}compacted",
            least / 2**20,
            "MB",
            against="bytes",
            ratio=size / least,
        )
    left = list((Path(uri) / shard_folder(shard_uuid(SLOT))).glob("*_gen_*"))
    report.add("  SSTables left", len(left), "folders")


def varied_checkpoints(count: int) -> Iterator[list[DatagenEvent]]:
    """Checkpoints with two fields of 120 random characters, 50 of an item."""
    letters = random.Random(count)
    for first in range(0, count, 50):
        stream = DatagenStreamWriter.open(f"item-{first}", run_id="bench", writer_epoch="bench:1")
        for _ in range(min(50, count - first)):
            fields = [
                DatagenFieldUpdate(name, "set", DatagenValue.of(letters.randbytes(60).hex()), "str")
                for name in "xy"
            ]
            yield stream.step_completed(POSITION, fields)


def new_log(folder: Path, rows: int) -> str:
    """A log with so many rows in its base table, indexed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    uri = str(folder / "log.lance")
    create_log(uri)
    for first in range(0, rows, ROWS_A_WRITE):
        count = min(ROWS_A_WRITE, rows - first)
        lance.write_dataset(rows_of(first, count), uri, mode="append")
    storage = LogStorage(uri)
    compact(storage)
    refresh_indexes(storage)
    return uri


def rows_of(first: int, count: int, characters: int = 120) -> pa.Table:
    """Rows with random ids, as those of events are, and random text."""
    event = checkpoints("template", 1)[0][0]
    template = pa.Table.from_batches([encode_events([event])])
    rows = template.take(pa.array([0] * count))
    ids = pa.array(
        [f"{random.Random(n).getrandbits(64):016x}" for n in range(first, first + count)]
    )
    items = pa.array([f"item-{n // 5}" for n in range(first, first + count)])
    text = random.Random(first).randbytes(count * characters // 2).hex()
    starts = range(0, count * characters, characters)
    values = pa.array([text[at : at + characters] for at in starts], pa.large_string())
    for name, column in (
        ("event_id", ids),
        ("item_id", items),
        ("root_item_id", items),
        ("value_str", values),
    ):
        at = DATAGEN_SCHEMA.get_field_index(name)
        rows = rows.set_column(at, DATAGEN_SCHEMA.field(name), column)
    return rows.cast(DATAGEN_SCHEMA)


def write_generation(uri: str, rows: pa.Table, slot: str = SLOT) -> None:
    writer: Any = open_log(uri).mem_wal_writer(
        shard_uuid(slot), max_wal_flush_interval_ms=1, max_memtable_size=512 << 20
    )
    with writer:
        writer.put(rows.combine_chunks().to_batches()[0])


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tree(folder: Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    main()
