"""A compaction whose rewriting is done by others: planned once, rewritten anywhere, committed once.

Lance splits a compaction into tasks that only read the table and write new files beside it. They
can run in any process that reaches the storage, and be lost and repeated at will: until the commit
nothing names what they wrote, and a rewrite that is never committed is collected like any other
leftover. The commit is one, made by whoever planned, and takes in what the tasks report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lance.optimize import Compaction, CompactionOptions, CompactionTask, RewriteResult

from datagen_ray.crashpoints import crash_point
from datagen_ray.store.commits import CommitSync, commit_with_retries, unchecked
from datagen_ray.store.compaction import (
    BATCH_ROWS,
    ROWS_PER_FRAGMENT,
    CompactionReport,
    join_index_parts,
)
from datagen_ray.store.creation import open_log
from datagen_ray.store.lance_errors import LANCE_ERRORS, translate
from datagen_ray.store.storage import LogStorage


@dataclass(frozen=True)
class RewriteTask:
    """One task of a plan. It pickles, and can be run by any process that reaches the storage."""

    log_uri: str
    task: str
    storage_options: Mapping[str, str] | None = None


Rewriter = Callable[[Sequence[RewriteTask]], Sequence[str]]
"""Runs the tasks, wherever; what the ones that succeeded returned, in any order."""


def rewrite(task: RewriteTask) -> str:
    """Write the fragments of one task anew. Returns what the commit wants to know.

    Raises StorageError for what may be tried again.
    """
    doing = f"rewriting fragments of {task.log_uri}"
    try:
        dataset = open_log(task.log_uri, task.storage_options)
        result: str = CompactionTask.from_json(task.task).execute(dataset).json()
    except LANCE_ERRORS as error:
        raise translate(error, doing) from error
    return result


def compact_by(
    rewriter: Rewriter, storage: LogStorage, *, before_commit: Callable[[], None] = unchecked
) -> CompactionReport:
    """Join small fragments, the rewriting done by ``rewriter``.

    ``before_commit`` is called before each commit, and stops the work by raising. Raises
    CommitConflictError when another compaction came first; then nothing was changed.
    """
    # Lance joins only fragments that the same parts of all indexes cover
    join_index_parts(storage, before_commit=before_commit)
    tasks = _plan(storage)
    if not tasks:
        return CompactionReport()
    rewritten = [RewriteResult.from_json(text) for text in rewriter(tasks)]
    if not rewritten:
        return CompactionReport()

    def commit() -> tuple[int, int]:
        before_commit()
        crash_point("before_compaction")
        dataset = open_log(storage.uri, storage.storage_options or None)
        metrics = Compaction.commit(dataset, rewritten)
        return metrics.fragments_removed, metrics.fragments_added

    with CommitSync(storage) as sync:
        removed, added = commit_with_retries(commit, f"compacting in {storage.uri}")
        crash_point("after_compaction")
        sync.sync()
    return CompactionReport(removed, added)


def _plan(storage: LogStorage) -> list[RewriteTask]:
    options = CompactionOptions(target_rows_per_fragment=ROWS_PER_FRAGMENT, batch_size=BATCH_ROWS)
    try:
        dataset = open_log(storage.uri, storage.storage_options or None)
        plan = Compaction.plan(dataset, options)
        return [
            RewriteTask(storage.uri, task.json(), storage.storage_options or None)
            for task in plan.tasks
        ]
    except LANCE_ERRORS as error:
        raise translate(error, f"planning a compaction of {storage.uri}") from error
