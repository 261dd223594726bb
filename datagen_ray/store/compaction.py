"""Keeping the base table small and quick: fragments joined, indexes covering, old versions gone.

Every function opens the table anew, may run beside merges and readers, and beside itself in
another process; a commit that others overtook is tried again.

Order in one maintenance: compact, then index what merges and compaction added, then remove old
versions. Each commit is synced before anything that it replaced is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from datagen_ray.crashpoints import crash_point
from datagen_ray.store.bounds import check_seconds
from datagen_ray.store.commits import CommitSync, commit_with_retries, unchecked
from datagen_ray.store.creation import open_log
from datagen_ray.store.lance_errors import (
    LANCE_ERRORS,
    REFUSED_PHRASE,
    is_cut_off,
    is_vanished,
    translate,
)
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.wholeness import lost_indexes

INDEXED_COLUMNS = ("event_id", "item_id", "root_item_id")
ROWS_PER_FRAGMENT = 1 << 17
"""Reading one row decodes a page of each column, and larger files have larger pages: with a million
rows a file, a point read of five million events took 36 ms rather than 6."""
SMALL_FRAGMENTS = 16
"""Fragments below full size that make a compaction due."""
VERSION_RETENTION_S = 24 * 3600.0
"""How long an old version stays; an export or another long read must be done by then."""

_BYTES_A_COMMIT = 4 << 30
BATCH_ROWS = 4096
_MAX_INDEX_PARTS = 8
_INDEXABLE = tuple([column] for column in INDEXED_COLUMNS)


@dataclass(frozen=True)
class CompactionReport:
    """Fragments that were joined, and what they became."""

    fragments_removed: int = 0
    fragments_added: int = 0


@dataclass(frozen=True)
class IndexReport:
    """Indexes that were made, those that were extended, and the rows that none covers yet.

    The last is not 0 only if merges added rows meanwhile.
    """

    created: tuple[str, ...] = ()
    extended: tuple[str, ...] = ()
    uncovered_rows: int = 0


@dataclass(frozen=True)
class VersionCleanupReport:
    """Versions of the base table that were removed, and the bytes that this freed."""

    versions: int = 0
    bytes: int = 0


def is_compaction_due(storage: LogStorage, *, small_fragments: int = SMALL_FRAGMENTS) -> bool:
    """Whether the base table has so many small fragments that joining them pays."""
    fragments = _open(storage).get_fragments()
    small = [fragment for fragment in fragments if fragment.count_rows() < ROWS_PER_FRAGMENT]
    return len(small) >= small_fragments


def compact(
    storage: LogStorage, *, before_commit: Callable[[], None] = unchecked
) -> CompactionReport:
    """Join fragments of less than about a million rows. Rewrites a few gigabytes a commit.

    ``before_commit`` is called before each commit, and stops the work by raising.
    """
    # Lance joins only fragments that the same parts of all indexes cover
    join_index_parts(storage, before_commit=before_commit)
    removed = added = 0
    most_bytes: int | None = _BYTES_A_COMMIT
    while True:
        metrics = _committed(storage, _compacting(most_bytes), before_commit, "compacting")
        crash_point("after_compaction")
        removed += metrics.fragments_removed
        added += metrics.fragments_added
        if metrics.fragments_removed > metrics.fragments_added:
            continue
        if most_bytes is None:
            return CompactionReport(removed, added)
        # Lance passes over whatever makes one full fragment of more bytes than that
        most_bytes = None


def join_index_parts(storage: LogStorage, *, before_commit: Callable[[], None] = unchecked) -> None:
    """Have each index cover all rows in one part."""
    for name in _index_names(_open(storage)).values():
        _committed(storage, _joining(name), before_commit, f"joining the parts of {name}")


def refresh_indexes(
    storage: LogStorage, *, before_commit: Callable[[], None] = unchecked
) -> IndexReport:
    """Make the indexes that look-ups use, and have them cover rows that were added since.

    A small addition becomes a part of its own; when there are several parts, they are joined. An
    index that is damaged, or whose files are gone, is made anew.
    """
    dataset = _open(storage)
    if dataset.count_rows() == 0:
        return IndexReport()
    created = list(rebuild_lost_indexes(storage, before_commit=before_commit))
    dataset = _open(storage)
    names = _index_names(dataset)
    extended = []
    for column in INDEXED_COLUMNS:
        if column not in names:
            work = _creating(column, f"{column}_idx")
            _committed(storage, work, before_commit, f"indexing {column}")
            created.append(column)
        elif _uncovered(dataset, names[column]):
            _committed(storage, _extending(names[column]), before_commit, f"indexing {column}")
            extended.append(column)
        crash_point("after_index_refresh")
    return IndexReport(tuple(created), tuple(extended), max(uncovered_rows(storage).values()))


def rebuild_lost_indexes(
    storage: LogStorage, *, before_commit: Callable[[], None] = unchecked
) -> tuple[str, ...]:
    """Make the indexes anew that cannot be read any more; the columns that they are of."""
    dataset = _open(storage)
    cut_off = lost_indexes(storage)
    rebuilt = []
    for column, name in _index_names(dataset).items():
        if name in cut_off or not _is_readable(dataset, name):
            work = _creating(column, name)
            _committed(storage, work, before_commit, f"indexing {column} anew")
            rebuilt.append(column)
    return tuple(rebuilt)


def uncovered_rows(storage: LogStorage) -> dict[str, int]:
    """For each column to be indexed, the rows that a look-up has to scan for."""
    dataset = _open(storage)
    names = _index_names(dataset)
    return {
        column: _uncovered(dataset, names[column]) if column in names else dataset.count_rows()
        for column in INDEXED_COLUMNS
    }


def cleanup_old_versions(
    storage: LogStorage,
    *,
    retention_s: float = VERSION_RETENTION_S,
    before_commit: Callable[[], None] = unchecked,
) -> VersionCleanupReport:
    """Remove versions of the base table that are older than the retention, and their files.

    A read that began on such a version fails or starts again, so keep the retention longer than
    the longest export. Files that no version names yet stay: a merge may be about to name them.
    """
    check_seconds("retention_s", retention_s)

    def remove() -> Any:
        # Lance keeps the version of the handle and all later ones. So that one must be durable,
        # or a power loss takes it and what it replaced: it may have been committed a moment ago.
        with CommitSync(storage) as newest:
            dataset = _open(storage)
            newest.sync()
        before_commit()
        return dataset.cleanup_old_versions(
            older_than=timedelta(seconds=retention_s), error_if_tagged_old_versions=False
        )

    stats = commit_with_retries(remove, f"removing old versions of {storage.uri}")
    crash_point("after_version_cleanup")
    return VersionCleanupReport(stats.old_versions, stats.bytes_removed)


def _open(storage: LogStorage) -> Any:
    return open_log(storage.uri, storage.storage_options or None)


def _committed(
    storage: LogStorage,
    work: Callable[[Any], Any],
    before_commit: Callable[[], None],
    doing: str,
) -> Any:
    """``work`` on the table opened anew, committed, and synced."""

    def attempt() -> Any:
        before_commit()
        return work(_open(storage))

    with CommitSync(storage) as commit:
        done = commit_with_retries(attempt, f"{doing} in {storage.uri}")
        commit.sync()
    return done


def _compacting(most_bytes: int | None) -> Callable[[Any], Any]:
    def compact_some(dataset: Any) -> Any:
        crash_point("before_compaction")
        return dataset.optimize.compact_files(
            target_rows_per_fragment=ROWS_PER_FRAGMENT,
            max_source_bytes=most_bytes,
            batch_size=BATCH_ROWS,
        )

    return compact_some


def _creating(column: str, name: str) -> Callable[[Any], Any]:
    return lambda dataset: dataset.create_scalar_index(column, "BTREE", name=name, replace=True)


def _extending(name: str) -> Callable[[Any], Any]:
    def extend(dataset: Any) -> None:
        parts = _statistics(dataset, name)["num_indices"]
        joined = parts if parts >= _MAX_INDEX_PARTS else 0
        dataset.optimize.optimize_indices(index_names=[name], num_indices_to_merge=joined)

    return extend


def _joining(name: str) -> Callable[[Any], Any]:
    def join(dataset: Any) -> None:
        parts = _statistics(dataset, name)["num_indices"]
        if parts > 1 or _uncovered(dataset, name):
            dataset.optimize.optimize_indices(index_names=[name], num_indices_to_merge=parts)

    return join


def _index_names(dataset: Any) -> dict[str, str]:
    """The names of the BTREE indexes that serve look-ups, by column, whoever made them."""
    return {
        index.field_names[0]: index.name
        for index in dataset.describe_indices()
        if index.index_type == "BTree" and list(index.field_names) in _INDEXABLE
    }


def _uncovered(dataset: Any, name: str) -> int:
    return int(_statistics(dataset, name)["num_unindexed_rows"])


def _statistics(dataset: Any, name: str) -> Any:
    try:
        return dataset.stats.index_stats(name)
    except LANCE_ERRORS as error:
        raise translate(error, f"looking at index {name} of {dataset.uri}") from error


def _is_readable(dataset: Any, name: str) -> bool:
    try:
        dataset.stats.index_stats(name)
    except LANCE_ERRORS as error:
        # The name is one that Lance has listed, so what it refuses is what it finds in the file
        if is_vanished(error) or is_cut_off(error) or REFUSED_PHRASE in str(error):
            return False
        raise translate(error, f"looking at index {name} of {dataset.uri}") from error
    return True
