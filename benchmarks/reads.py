"""Reading a log: one item, many roots, all statuses, beside bare Lance on the same table.

The log has ``--roots`` roots of five events in an indexed base table, 20 pending SSTables and WAL
tails of 10,000 events. The limits: an indexed point read of the base table alone for a fold; one
filtered scan that returns the same rows, through the index, for many roots; a scan of three columns
(item_id, event_type, status) for the statuses. None of them sees the upper levels, dedupes, or
checks anything. With several sizes the figures of each are also compared with those of the first.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import lance_context
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.biglog import RUNNING_EVERY, add_upper_levels, make_log, root_id
from benchmarks.report import Report, options_of, parser_of
from datagen_ray import DatagenStore
from datagen_ray.log.schema import EVENT_COLUMNS

SSTABLES = 20
SSTABLE_ROOTS = 100
TAIL_ROOTS = 2_000
POINT_READS = 60
MANY_ROOTS = 10_000
RIVAL_ROOTS = 3
GROWN = "a root, beside the smallest log"
COLUMNS = list(EVENT_COLUMNS)


@dataclass(frozen=True)
class Question:
    """One figure: ours and the limit, each giving a number of ``unit`` at each call."""

    what: str
    unit: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    count: int
    """Roots that one call reads: what growth is measured by."""


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def p50_ms(read: Callable[[str], object], ids: list[str]) -> float:
    return statistics.median(timed(lambda one=one: read(one)) for one in ids) * 1000  # type: ignore[misc]


def questions(store: DatagenStore, dataset: Any, roots: int) -> list[Question]:
    draw = random.Random(7)
    running = draw.sample(range(0, roots, RUNNING_EVERY), min(MANY_ROOTS, roots // RUNNING_EVERY))
    some = [root_id(number) for number in running]
    wanted = pa.array(some)

    def cold_ids() -> list[str]:
        return [root_id(draw.randrange(roots)) for _ in range(POINT_READS)]

    def bare_point(item: str) -> object:
        return dataset.scanner(columns=COLUMNS, filter=pc.field("item_id") == item).to_table()

    def bare_many() -> object:
        where = pc.field("root_item_id").isin(wanted)
        return dataset.scanner(columns=COLUMNS, filter=where).to_table()

    def bare_statuses() -> object:
        scanner = dataset.scanner(columns=["item_id", "event_type", "status"])
        return sum(batch.num_rows for batch in scanner.to_batches())

    def limit() -> float:
        return timed(bare_statuses)

    return [
        Question(
            "fold_item, p50",
            "ms",
            lambda: p50_ms(store.fold_item, cold_ids()),
            lambda: p50_ms(bare_point, cold_ids()),
            1,
        ),
        Question(
            "fold_roots of running roots",
            "s",
            lambda: timed(lambda: store.fold_roots(some)),
            lambda: timed(bare_many),
            len(some),
        ),
        Question(
            "root_item_statuses, lifecycle_only",
            "s",
            lambda: timed(lambda: store.root_item_statuses(lifecycle_only=True)),
            limit,
            roots,
        ),
        Question("root_item_statuses", "s", lambda: timed(store.root_item_statuses), limit, roots),
        Question("overview", "s", lambda: timed(store.overview), limit, roots),
    ]


def measure(uri: str, roots: int, runs: int, first: dict[str, float]) -> Report:
    """The figures of one log; ``first`` has those of the first one, a root for bulk reads."""
    report = Report(f"reads: {roots:,} roots, {SSTABLES} SSTables, {TAIL_ROOTS} roots in WAL tails")
    with DatagenStore.open(uri, read_only=True) as store:
        store.fold_item("none")  # opens the SSTables, as any reader does once
        for asked in questions(store, lance.dataset(uri), roots):
            # Side by side, so that what else the machine does falls on both sides.
            pairs = [(asked.ours(), asked.limit()) for _ in range(runs)]
            found = statistics.median(ours for ours, _ in pairs)
            limit = statistics.median(bare for _, bare in pairs)
            ratio = statistics.median(ours / bare for ours, bare in pairs)
            report.add(asked.what, found, asked.unit)
            report.add("  bare Lance", limit, asked.unit, against=asked.what, ratio=ratio)
            one = found / asked.count
            if asked.what in first:
                report.add(f"  {GROWN}", found, asked.unit, ratio=one / first[asked.what])
            first.setdefault(asked.what, one)
        ours = timed(store.root_item_statuses) / roots
    theirs = rival_s_a_root(uri)
    report.add("a root of root_item_statuses", ours * 1e6, "us")
    report.add("  lance-context", theirs * 1e6, "us", against="a root", ratio=theirs / ours)
    return report


def rival_s_a_root(uri: str) -> float:
    """Seconds a root of lance-context's statuses, which it looks up one by one, on a copy."""
    with tempfile.TemporaryDirectory(dir=Path(uri).parent) as scratch:
        copy = shutil.copytree(uri, Path(scratch) / "log.lance")
        store: Any = lance_context.DatagenStore.open(str(copy))
        ids = [root_id(number) for number in range(RIVAL_ROOTS)]
        return timed(lambda: store.root_item_statuses(ids)) / RIVAL_ROOTS


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument(
        "--roots", type=int, nargs="+", default=[10_000, 100_000], help="roots in the base table"
    )
    options = options_of(parser)
    first: dict[str, float] = {}
    reports = []
    for roots in options.roots:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            uri = make_log(Path(scratch), roots)
            add_upper_levels(
                uri, roots, sstables=SSTABLES, sstable_roots=SSTABLE_ROOTS, tail_roots=TAIL_ROOTS
            )
            reports.append(measure(uri, roots, options.runs, first))
            reports[-1].show(None)
    if options.json is not None:
        Report("reads", [row for report in reports for row in report.rows]).write(options.json)


if __name__ == "__main__":
    main()
