"""Reading a large log: one item, many roots, all statuses, beside bare Lance on the same table.

The log has ``--roots`` roots of five events in an indexed base table, 20 pending SSTables and WAL
tails. The limits: an indexed point read of the base table alone for a fold; a filtered scan that
returns the same rows for many roots; a scan of three columns (item_id, event_type, status) for the
statuses. None of them sees the upper levels, dedupes, or checks anything.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.biglog import add_upper_levels, make_log, root_id
from benchmarks.report import Report, median_of, options_of, parser_of
from datagen_ray import DatagenStore
from datagen_ray.log.schema import EVENT_COLUMNS

SSTABLES = 20
SSTABLE_ROOTS = 100
TAIL_ROOTS = 2_000
POINT_READS = 60
MANY_ROOTS = 10_000


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def p50_ms(read: Callable[[str], object], ids: list[str]) -> float:
    return statistics.median(timed(lambda one=one: read(one)) for one in ids) * 1000  # type: ignore[misc]


def measure(uri: str, roots: int, runs: int) -> Report:
    report = Report(f"reads: {roots:,} roots, {SSTABLES} SSTables, {TAIL_ROOTS} roots in WAL tails")
    dataset = lance.dataset(uri)
    columns = list(EVENT_COLUMNS)
    draw = random.Random(7)
    ids = [root_id(draw.randrange(roots)) for _ in range(POINT_READS)]
    some = [root_id(number) for number in draw.sample(range(roots), min(MANY_ROOTS, roots))]
    wanted = pa.array(some)

    def bare_point(item: str) -> object:
        return dataset.scanner(columns=columns, filter=pc.field("item_id") == item).to_table()

    def bare_many() -> object:
        pieces = dataset.scanner(columns=columns).to_batches()
        return [b.filter(pc.is_in(b.column("root_item_id"), value_set=wanted)) for b in pieces]

    def bare_statuses() -> object:
        scanner = dataset.scanner(columns=["item_id", "event_type", "status"])
        return sum(batch.num_rows for batch in scanner.to_batches())

    with DatagenStore.open(uri, read_only=True) as store:
        store.fold_item("none")  # opens the SSTables, as any reader does once
        pairs: list[tuple[str, str, Callable[[], float], Callable[[], float]]] = [
            (
                "fold_item, p50",
                "ms",
                lambda: p50_ms(store.fold_item, ids),
                lambda: p50_ms(bare_point, ids),
            ),
            (
                f"fold_roots of {len(some):,}",
                "s",
                lambda: timed(lambda: store.fold_roots(some)),
                lambda: timed(bare_many),
            ),
            (
                "root_item_statuses",
                "s",
                lambda: timed(store.root_item_statuses),
                lambda: timed(bare_statuses),
            ),
            ("overview", "s", lambda: timed(store.overview), lambda: timed(bare_statuses)),
        ]
        for what, unit, ours, limit in pairs:
            found = median_of(runs, lambda _, ours=ours: ours())  # type: ignore[misc]
            bare = median_of(runs, lambda _, limit=limit: limit())  # type: ignore[misc]
            report.add(what, found, unit)
            report.add("  bare Lance", bare, unit, against=what, ratio=found / bare)
    return report


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--roots", type=int, default=100_000, help="roots in the base table")
    options = options_of(parser)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        uri = make_log(Path(scratch), options.roots)
        add_upper_levels(
            uri,
            options.roots,
            sstables=SSTABLES,
            sstable_roots=SSTABLE_ROOTS,
            tail_roots=TAIL_ROOTS,
        )
        measure(uri, options.roots, options.runs).show(options.json)


if __name__ == "__main__":
    main()
