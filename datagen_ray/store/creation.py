"""Making the dataset of a log, and opening one that is there.

Creation is idempotent and tolerates racing creators: whoever loses opens what the winner made.
Opening creates nothing, so a mistyped path is an error and never an empty log.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lance
import pyarrow as pa

from datagen_ray.errors import ConfigError, LogNotFoundError, StorageError
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store import layout
from datagen_ray.store.datasets import open_dataset
from datagen_ray.store.forks import check_may_write, note_use
from datagen_ray.store.lance_errors import (
    LANCE_ERRORS,
    is_creation_race,
    is_not_found,
    translate,
)
from datagen_ray.store.storage import LogStorage

MAX_MEMTABLE_BATCHES = 500
"""WAL entries of one generation, and so the files that a reader of the tail must fetch."""
MAX_MEMTABLE_ROWS = 200_000
MAX_MEMTABLE_BYTES = 64 << 20
"""Content of one generation; a merge holds one generation in memory."""

_MAX_INIT_RACES = 10


def create_log(
    uri: str, storage_options: Mapping[str, str] | None = None, *, fsync: bool = True
) -> Any:
    """Open a log, making it first where there is none. Returns the ``lance.LanceDataset``.

    Raises ConfigError, with nothing written, when the place cannot hold a log or holds something
    else. With ``fsync`` a new log on a local disk survives power loss.
    """
    storage = LogStorage(uri, storage_options, fsync=fsync)
    dataset = _open(storage)
    if dataset is None:
        check_may_write(uri)
        if storage.is_local:
            _check_local_place(storage)
            _create_local(storage)
        else:
            _create_remote(storage)
        dataset = _open(storage)
    if dataset is None:
        raise StorageError(f"{storage.uri} was made and is gone again; try again")
    _check_schema(dataset, uri)
    if dataset.mem_wal_index_details() is None:
        dataset = _initialize(dataset, storage)
        storage.sync_tree(skip=(layout.MEM_WAL_FOLDER,))
    return dataset


def open_log(
    uri: str, storage_options: Mapping[str, str] | None = None, *, session: Any = None
) -> Any:
    """Open an existing log as a ``lance.LanceDataset``; creates and claims nothing.

    ``session``: a ``lance.Session``, whose caches bound what the handle keeps in memory.
    Raises LogNotFoundError when there is none, ConfigError when something else is there.
    """
    storage = LogStorage(uri, storage_options)
    dataset = _open(storage, session)
    if dataset is None:
        raise LogNotFoundError(
            f"there is no log at {uri}; check the path, or create it by running a pipeline there"
        )
    _check_schema(dataset, uri)
    return dataset


def log_exists(uri: str, storage_options: Mapping[str, str] | None = None) -> bool:
    """Whether a Lance dataset is at that place."""
    return _open(LogStorage(uri, storage_options)) is not None


@dataclass(frozen=True)
class MemTableLimits:
    """When a MemTable is flushed: after so many rows, WAL entries, or bytes."""

    rows: int
    batches: int
    size_bytes: int


# what Lance takes for a log that names no limits of its own
_LANCE_LIMITS = MemTableLimits(rows=100_000, batches=8_000, size_bytes=256 << 20)


def memtable_limits(dataset: Any) -> MemTableLimits:
    """The limits that a log was created with.

    Lance keeps them with the log, but its writers do not take them from there (pylance 14), so
    each claim has to pass them. They are the same at each, so that a claim can hold any tail
    that another writer of this package left.
    """
    stored = (dataset.mem_wal_index_details() or {}).get("writer_config_defaults", {})
    return MemTableLimits(
        rows=int(stored.get("max_memtable_rows", _LANCE_LIMITS.rows)),
        batches=int(stored.get("max_memtable_batches", _LANCE_LIMITS.batches)),
        size_bytes=int(stored.get("max_memtable_size", _LANCE_LIMITS.size_bytes)),
    )


def _open(storage: LogStorage, session: Any = None) -> Any | None:
    if storage.is_local and not os.path.isdir(storage.path(layout.VERSIONS_FOLDER)):
        if os.path.exists(storage.path()) and not os.path.isdir(storage.path()):
            raise ConfigError(f"{storage.uri} is a file; a log is a folder, pass another path")
        return None
    try:
        return open_dataset(
            _lance_uri(storage),
            storage_options=storage.storage_options or None,
            session=session,
        )
    except LANCE_ERRORS as error:
        if is_not_found(error):
            return None
        raise translate(error, f"opening {storage.uri}") from error


def _create_local(storage: LogStorage) -> None:
    """Make a whole log under another name and rename it, so that it is there whole or not."""
    target = storage.path()
    parent, name = os.path.split(target)
    number = f"{os.getpid()}-{threading.get_ident()}"
    draft = LogStorage(os.path.join(parent, f".{name}.{number}"), fsync=storage.fsync)
    try:
        os.makedirs(parent, exist_ok=True)
        shutil.rmtree(draft.path(), ignore_errors=True)
        _initialize(_write_empty(draft), draft)
        draft.sync_tree()
        try:
            os.rename(draft.path(), target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # somebody else was faster; theirs is opened
        storage.sync_ancestors()
    except OSError as error:
        raise ConfigError(
            f"{storage.uri} cannot be made ({error.strerror}); check the path and its permissions"
        ) from error
    finally:
        shutil.rmtree(draft.path(), ignore_errors=True)


def _create_remote(storage: LogStorage) -> None:
    try:
        dataset = _write_empty(storage)
    except StorageError as error:
        if error.__cause__ is None or not is_creation_race(error.__cause__):
            raise
        return
    if dataset.version > 1:
        # Lance checks that nothing is there some time before it commits, and then commits on top
        # of whatever has come in between. Bring that back.
        try:
            dataset.checkout_version(dataset.version - 1).restore()
        except LANCE_ERRORS as error:
            raise translate(error, f"bringing back {storage.uri}") from error


def _write_empty(storage: LogStorage) -> Any:
    note_use()
    try:
        return lance.write_dataset(
            pa.Table.from_batches([], schema=DATAGEN_SCHEMA),
            _lance_uri(storage),
            schema=DATAGEN_SCHEMA,
            mode="create",
            storage_options=storage.storage_options or None,
        )
    except LANCE_ERRORS as error:
        raise StorageError(str(translate(error, f"creating {storage.uri}"))) from error


def _initialize(dataset: Any, storage: LogStorage) -> Any:
    for _ in range(_MAX_INIT_RACES):
        try:
            dataset.initialize_mem_wal(
                maintained_indexes=[],
                unsharded=True,
                max_memtable_batches=MAX_MEMTABLE_BATCHES,
                max_memtable_rows=MAX_MEMTABLE_ROWS,
                max_memtable_size=MAX_MEMTABLE_BYTES,
            )
        except LANCE_ERRORS as error:
            if not is_creation_race(error):
                raise translate(error, f"initialising the MemWAL of {storage.uri}") from error
        dataset = _open(storage)
        if dataset is None:
            break
        if dataset.mem_wal_index_details() is not None:
            return dataset
    raise StorageError(f"others keep changing {storage.uri} while it is created; try again")


def _check_schema(dataset: Any, uri: str) -> None:
    found = {field.name: field.type for field in dataset.schema}
    wanted = {field.name: field.type for field in DATAGEN_SCHEMA}
    if found == wanted:
        return
    if not set(wanted) & set(found):
        raise ConfigError(f"{uri} is a Lance dataset but not a datagen log; pass another path")
    different = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    raise ConfigError(
        f"{uri} has other columns than this version knows ({', '.join(different)}); upgrade "
        "datagen-ray, or pass another path"
    )


def _check_local_place(storage: LogStorage) -> None:
    """Refuse a place that cannot hold a log before anything is written there."""
    path = storage.path()
    if os.path.isdir(path) and os.listdir(path) and not log_exists(storage.uri):
        raise ConfigError(
            f"{storage.uri} is a folder with other content, not a log; pass a path that is free"
        )
    existing = path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ConfigError(f"{existing} is not a folder, so {storage.uri} cannot be below it")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{existing} is not writable, so {storage.uri} cannot be made; change its permissions"
        )
    _check_hard_links(existing)


def _check_hard_links(folder: str) -> None:
    # Fencing rests on names that are taken exactly once, which Lance does with hard links.
    probe = os.path.join(folder, f".link-probe-{os.getpid()}-{threading.get_ident()}")
    linked = f"{probe}-linked"
    try:
        with open(probe, "wb"):
            os.link(probe, linked)
    except OSError as error:
        raise ConfigError(
            f"{folder} is on a file system that cannot keep a log ({error.strerror}); use one "
            "with hard links, or an object store"
        ) from error
    finally:
        for path in (probe, linked):
            if os.path.lexists(path):
                os.unlink(path)


def _lance_uri(storage: LogStorage) -> str:
    return storage.path() if storage.is_local else storage.uri
