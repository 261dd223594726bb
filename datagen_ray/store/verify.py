"""Verifying a log: every row and every item looked at, whatever its size.

Flow of :func:`verify_snapshot`:

1. one pass over the ids of all rows on all levels, 8 bytes of memory each: which are repeated;
2. the repeated rows, compared in full: copies are normal while generations are merged, copies
   with other content are not;
3. passes over the rows, each holding the items of one part of the roots, so that what is in
   memory is bounded by ``rows_per_pass``: each row by itself, each item, each tree;
4. when asked for, one pass over the bytes of all blobs, a few rows at a time.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import DamagedLogError
from datagen_ray.log.events import DatagenEvent, DatagenEventType, DatagenItemStatus
from datagen_ray.log.fold import fold_datagen_events, group_by_item
from datagen_ray.log.schema import BLOB_COLUMN, EVENT_COLUMNS, decode_batch
from datagen_ray.log.values import DatagenBlobValue, blob_checksum
from datagen_ray.log.violations import (
    LogViolation,
    LogViolationKind,
    item_violations,
    row_violation,
    tree_violations,
)
from datagen_ray.store.levels import Level
from datagen_ray.store.snapshot import Snapshot, repeated_ids, verified_blob

ROWS_PER_PASS = 200_000
"""Rows held as events at once; some 200 MB."""

MAX_LISTED = 10_000
"""Violations that a report lists one by one; all are counted."""

_BLOB_COLUMNS = ("event_id", "item_id", BLOB_COLUMN, "payload_size", "payload_checksum")
_BLOB_ROWS = 32


@dataclass(frozen=True)
class ShardReport:
    """One shard: who may write, and what waits to be merged into the base table."""

    shard_id: str
    epoch: int
    sstables: int


@dataclass(frozen=True)
class LogReport:
    """What a log holds and what is wrong with it.

    ``rows`` counts rows by level (base, sstable, tail); ``copies`` those of them that repeat an
    event identically, which is normal while generations are merged. ``statuses`` counts the items
    that started. ``violations`` lists up to :data:`MAX_LISTED`; ``violation_counts`` counts all.
    """

    events: int
    items: int
    roots: int
    statuses: dict[str, int]
    rows: dict[str, int]
    copies: int
    shards: tuple[ShardReport, ...]
    violations: tuple[LogViolation, ...]
    violation_counts: dict[str, int]
    blobs: int | None = None
    """Blobs whose bytes were verified; None when that was not asked for."""

    @property
    def is_clean(self) -> bool:
        return not self.violation_counts

    def to_dict(self) -> dict[str, Any]:
        return {
            "clean": self.is_clean,
            "events": self.events,
            "items": self.items,
            "roots": self.roots,
            "statuses": dict(self.statuses),
            "rows": dict(self.rows),
            "copies": self.copies,
            "blobs": self.blobs,
            "shards": [
                {"shard_id": each.shard_id, "epoch": each.epoch, "sstables": each.sstables}
                for each in self.shards
            ],
            "violation_counts": dict(self.violation_counts),
            "violations": [violation.to_dict() for violation in self.violations],
        }


@dataclass
class _Findings:
    """Violations as they are found, each once."""

    listed: list[LogViolation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    known: set[tuple[LogViolationKind, str, tuple[str, ...]]] = field(default_factory=set)

    def add(self, found: Iterable[LogViolation]) -> None:
        for violation in found:
            key = (violation.kind, violation.item_id, violation.event_ids)
            if key in self.known:
                continue
            self.counts[violation.kind.value] += 1
            if len(self.listed) < MAX_LISTED:
                self.known.add(key)
                self.listed.append(violation)


def verify_snapshot(
    snapshot: Snapshot, *, blobs: bool = False, rows_per_pass: int = ROWS_PER_PASS
) -> LogReport:
    """Look at everything that a snapshot holds. Raises what reading raises, and nothing else."""
    findings = _Findings()
    rows = {level.value: 0 for level in Level}
    for level, piece in snapshot.pieces(["item_seq"], None):
        rows[level.value] += piece.num_rows
    total = sum(rows.values())
    repeated = repeated_ids(lambda: (piece for _, piece in snapshot.pieces(["event_id"], None)))
    copies = _compare_copies(snapshot, repeated, findings) if repeated else 0
    counted: Counter[str] = Counter()
    passes = max(1, -(-total // rows_per_pass))
    for number in range(passes):
        _verify_part(_part(snapshot, number, passes), findings, counted)
    checked = _verify_blobs(snapshot, set(repeated), findings) if blobs else None
    order = {kind: position for position, kind in enumerate(LogViolationKind)}
    return LogReport(
        events=total - copies,
        items=counted["items"],
        roots=counted["roots"],
        statuses={status.value: counted[status.value] for status in _LIFECYCLE},
        rows=rows,
        copies=copies,
        shards=tuple(
            ShardReport(each.shard_id, each.writer_epoch, len(each.sstables))
            for each in snapshot.manifests
        ),
        violations=tuple(
            sorted(findings.listed, key=lambda v: (v.item_id, order[v.kind], v.event_ids))
        ),
        violation_counts=dict(sorted(findings.counts.items())),
        blobs=checked,
    )


_LIFECYCLE = tuple(status for status in DatagenItemStatus if status.value != "failed")


def _compare_copies(snapshot: Snapshot, repeated: list[str], findings: _Findings) -> int:
    """How many rows repeat another, whatever their content; differing ones are violations."""
    copies = 0
    for start in range(0, len(repeated), ROWS_PER_PASS // 4):
        wanted = pa.array(repeated[start : start + ROWS_PER_PASS // 4], pa.string())
        first: dict[str, DatagenEvent] = {}
        for _, piece in snapshot.pieces(EVENT_COLUMNS, None):
            for event in decode_batch(
                piece.filter(pc.is_in(piece.column("event_id"), value_set=wanted))
            ):
                oldest = first.setdefault(event.event_id, event)
                if oldest is event:
                    continue
                copies += 1
                if oldest.content() != event.content():
                    findings.add([_reused(oldest, event)])
    return copies


def _reused(oldest: DatagenEvent, other: DatagenEvent) -> LogViolation:
    where = "" if oldest.item_id == other.item_id else f", the other of item {other.item_id!r}"
    return LogViolation(
        LogViolationKind.EVENT_ID_REUSED,
        oldest.item_id,
        (oldest.event_id,),
        f"item {oldest.item_id!r}: event {oldest.event_id} has two different contents{where}",
    )


def _part(snapshot: Snapshot, number: int, passes: int) -> list[DatagenEvent]:
    """The events, copies included, of one part of the roots."""
    events: list[DatagenEvent] = []
    for _, piece in snapshot.pieces(EVENT_COLUMNS, None):
        if passes > 1:
            ids = piece.column("item_id").combine_chunks().dictionary_encode()
            # By the path, not by root_item_id, which is among what may be wrong.
            chosen = [
                position
                for position, item_id in enumerate(ids.dictionary.to_pylist())
                if zlib.crc32(item_id.partition("/")[0].encode()) % passes == number
            ]
            piece = piece.filter(pc.is_in(ids.indices, value_set=pa.array(chosen, pa.int32())))
        events.extend(decode_batch(piece))
    return events


def _verify_part(events: list[DatagenEvent], findings: _Findings, counted: Counter[str]) -> None:
    trees: dict[str, dict[str, list[DatagenEvent]]] = {}
    for item_id, stream in group_by_item(events).items():
        counted["items"] += 1
        counted["roots"] += "/" not in item_id
        trees.setdefault(item_id.partition("/")[0], {})[item_id] = stream
        findings.add(bad for event in stream if (bad := row_violation(event)) is not None)
        broken = item_violations(stream)
        findings.add(broken)
        status = _status(stream, broken)
        if status is not None:
            counted[status.value] += 1
    for items in trees.values():
        if len(items) > 1 or any("/" in item_id for item_id in items):
            findings.add(tree_violations(items))


def _status(stream: list[DatagenEvent], broken: list[LogViolation]) -> DatagenItemStatus | None:
    if not broken:
        # The usual item: well formed, so its last lifecycle event decides.
        for event in stream:
            if event.event_type is DatagenEventType.TERMINAL:
                return event.status
        return DatagenItemStatus.RUNNING
    try:
        folded = fold_datagen_events(stream)
    except DamagedLogError:
        return None  # it is listed
    return None if folded is None else folded.status


def _verify_blobs(snapshot: Snapshot, repeated: set[str], findings: _Findings) -> int:
    """Check the bytes of every blob, and that the copies of one event have the same ones."""
    checked = 0
    digests: dict[str, str] = {}
    is_blob = pc.field("value_kind") == "blob"
    for _, piece in snapshot.pieces(_BLOB_COLUMNS, is_blob, batch_rows=_BLOB_ROWS):
        for event_id, item_id, content, size, checksum in _rows(piece):
            checked += 1
            try:
                verified_blob(content, DatagenBlobValue(content, size, checksum), event_id)
            except DamagedLogError as error:
                findings.add([_blob_mismatch(item_id, event_id, str(error))])
                continue
            if event_id in repeated:
                digest = blob_checksum(content)
                if digests.setdefault(event_id, digest) != digest:
                    text = f"event {event_id} has copies with other bytes"
                    findings.add([_blob_mismatch(item_id, event_id, text)])
    return checked


def _blob_mismatch(item_id: str, event_id: str, text: str) -> LogViolation:
    return LogViolation(
        LogViolationKind.BLOB_MISMATCH, item_id, (event_id,), f"item {item_id!r}: {text}"
    )


def _rows(piece: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in piece.select(list(_BLOB_COLUMNS)).to_batches(max_chunksize=_BLOB_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
