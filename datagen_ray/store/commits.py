"""Commits to the base table: tried again while others come first, and made durable.

Merges of all shards, compaction and index refreshes commit to one table. Lance refuses a commit
that another one overtook and that it cannot rebase; on a fresh handle it can be tried again.

A commit builds on files of earlier commits, which others may have made a moment ago: a merge on
top of a compaction is lost with it. So all that was written to the file system is synced, in one
call where the system has it, else file by file.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from datagen_ray.errors import StorageError
from datagen_ray.store import layout
from datagen_ray.store.lance_errors import LANCE_ERRORS, is_commit_conflict, translate
from datagen_ray.store.storage import LogStorage

_MAX_CONFLICTS = 40
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 2.0

Result = TypeVar("Result")


def unchecked() -> None:
    """What is called before a commit where nobody else can have been elected."""


class CommitConflictError(StorageError):
    """Others kept committing first; nothing of the commit is in the table. Try again later."""


def commit_with_retries(attempt: Callable[[], Result], doing: str) -> Result:
    """``attempt()``, again after a random wait while other commits overtake it.

    It must open the table anew each time. Lance's errors come out as the package's, and
    CommitConflictError when others do not stop.
    """

    def once() -> Result:
        try:
            return attempt()
        except LANCE_ERRORS as error:
            if is_commit_conflict(error):
                raise CommitConflictError(
                    f"others kept committing to the base table while {doing}; it is tried again "
                    "at the next maintenance"
                ) from error
            raise translate(error, doing) from error

    retrying = Retrying(
        stop=stop_after_attempt(_MAX_CONFLICTS),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        retry=retry_if_exception_type(CommitConflictError),
        reraise=True,
    )
    return retrying(once)


class CommitSync:
    """Syncs what was committed to a log since this was made. A context manager.

    Make it *before* the commit: the system tells a descriptor only of writes that fail after it
    was opened. Does nothing on object stores, and nothing without fsync.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._descriptor: int | None = None
        if storage.fsync and _syncfs is not None:
            self._descriptor = os.open(storage.path(), os.O_RDONLY)

    def sync(self) -> None:
        """Make everything written so far durable.

        Raises StorageError when it could not be. Then what was written may be lost whatever a
        second attempt says, so whoever meant to delete on its strength must not.
        """
        if self._descriptor is None or _syncfs is None:
            self._storage.sync_tree(skip=(layout.MEM_WAL_FOLDER,))
        elif _syncfs(self._descriptor) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise StorageError(
                f"cannot sync the file system of {self._storage.uri}: {reason}; check the disk"
            )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> CommitSync:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _find_syncfs() -> Any | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_syncfs = _find_syncfs()
