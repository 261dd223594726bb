"""Whether the files of a log on a local disk are whole, and what to do when they are not.

A lost machine can leave files that were written but not synced yet empty, short or absent, while
what lists them is there: a version of the base table, or an SSTable. Nothing was ever relied on
that was not synced, so the cure is to go back to what was, which is what `repair` does. Building on
such a version instead, and syncing that, would make the loss final: hence the check before a shard
is claimed and before maintenance. An index holds nothing of its own, so on whole rows it can be
made anew.

Sizes are compared where they are recorded; where not, a file without content is taken as cut off.
Object stores have no such files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from datagen_ray.errors import DamagedLogError
from datagen_ray.store import layout
from datagen_ray.store.datasets import open_dataset
from datagen_ray.store.lance_errors import LANCE_ERRORS
from datagen_ray.store.shard import SsTable, list_shards, read_latest_manifest
from datagen_ray.store.storage import LogStorage

REPAIR = "if the machine lost power, run `datagen-ray repair`, else restore the file"
_MAKE_ANEW = (
    "if the machine lost power, run `datagen-ray repair`, else `datagen-ray maintain {} --once`, "
    "which makes the index anew"
)


def check_whole(storage: LogStorage) -> None:
    """Raise DamagedLogError, which names the cure, if the log lists a file that is cut off."""
    check_base(storage)
    for shard in list_shards(storage):
        check_sstables(storage, shard)


def check_base(storage: LogStorage) -> None:
    """Raise DamagedLogError if the newest version of the base table lists a cut-off file."""
    if not storage.is_local:
        return
    while (damage := base_damage(storage)) is not None:
        version, reason = damage
        newest = base_versions(storage)[0]
        if newest == version:
            cure = _MAKE_ANEW.format(storage.uri) if lost_indexes(storage) else REPAIR
            raise DamagedLogError(f"the base table of {storage.uri} is damaged: {reason}; {cure}")
        # it was replaced meanwhile, and its files may have been removed


def check_sstables(storage: LogStorage, shard: str) -> None:
    """Raise DamagedLogError if a shard's manifest lists an SSTable that is cut off or gone."""
    if not storage.is_local:
        return
    manifest = read_latest_manifest(storage, shard)
    for table in manifest.sstables if manifest else ():
        damage = sstable_damage(storage, shard, table)
        if damage is not None and _is_listed(storage, shard, table):
            raise DamagedLogError(
                f"generation {table.generation} of shard {shard} in {storage.uri} is damaged: "
                f"{damage}; {REPAIR}"
            )


def base_damage(storage: LogStorage, version: int | None = None) -> tuple[int, str] | None:
    """A version of the base table, by default the newest, and what of it is cut off; None if
    nothing is."""
    looked_at = base_versions(storage)[0] if version is None else version
    try:
        dataset = open_dataset(storage.path(), version=looked_at)
        found = _cut_off_file(dataset, storage.path()) or _cut_off_index(dataset, storage.path())
    except LANCE_ERRORS as error:
        return looked_at, f"version {looked_at} cannot be opened ({_first_line(error)})"
    return None if found is None else (looked_at, f"version {looked_at} lists {found}")


def lost_indexes(storage: LogStorage) -> list[str]:
    """The names of the base table's indexes of which files are gone or cut off.

    None if the rows are not whole either: then nothing may be built on that version.
    """
    if not storage.is_local:
        return []
    root = storage.path()
    try:
        dataset = open_dataset(root)
        if _cut_off_file(dataset, root) is not None:
            return []
        return [name for name, _ in _cut_off_indexes(dataset, root)]
    except LANCE_ERRORS:
        return []  # it cannot be opened, which is what `base_damage` reports


def sstable_damage(storage: LogStorage, shard: str, table: SsTable) -> str | None:
    """What of an SSTable is cut off or gone; None if nothing is."""
    path = storage.path(layout.sstable_key(shard, table.path))
    if not os.path.isdir(path):
        return f"{path} is gone"
    empty = next(_empty_files(path), None)
    if empty is not None:
        return f"{empty} is empty"
    try:
        found = _cut_off_file(open_dataset(path), path)
    except LANCE_ERRORS as error:
        return f"{path} cannot be opened ({_first_line(error)})"
    return None if found is None else f"it lists {found}"


def base_versions(storage: LogStorage) -> list[int]:
    """The versions of the base table for which there is a file, newest first."""
    names = (file.name for file in storage.list_files(layout.VERSIONS_FOLDER))
    return sorted((v for name in names if (v := layout.parse_version_name(name))), reverse=True)


def _cut_off_file(dataset: Any, root: str) -> str | None:
    for fragment in dataset.get_fragments():
        for file in fragment.metadata.files:
            path = os.path.join(root, "data", file.path)
            size = _size(path)
            if size is None:
                return f"{path}, which is gone"
            if not size or (file.file_size_bytes and size != file.file_size_bytes):
                return f"{path}, which has {size} of {file.file_size_bytes} bytes"
    return None


def _cut_off_index(dataset: Any, root: str) -> str | None:
    return next((found for _, found in _cut_off_indexes(dataset, root)), None)


def _cut_off_indexes(dataset: Any, root: str) -> Iterator[tuple[str, str]]:
    """The names of indexes that are cut off, and what of them is."""
    for index in dataset.describe_indices():
        if index.index_type == "MemWal":
            continue  # it has no files
        found = (_cut_off_segment(segment, root) for segment in index.segments)
        damage = next((each for each in found if each is not None), None)
        if damage is not None:
            yield index.name, damage


def _cut_off_segment(segment: Any, root: str) -> str | None:
    folder = os.path.join(root, "_indices", str(segment.uuid))
    if not os.path.isdir(folder) or not os.listdir(folder):
        return f"{folder}, which is gone"
    empty = next(_empty_files(folder), None)
    if empty is not None:
        return f"{empty}, which is empty"
    size = sum(entry.stat().st_size for entry in os.scandir(folder))
    if segment.size_bytes and size != segment.size_bytes:
        return f"{folder}, which has {size} of {segment.size_bytes} bytes"
    return None


def _is_listed(storage: LogStorage, shard: str, table: SsTable) -> bool:
    """Whether the newest manifest lists an SSTable: one that was merged meanwhile may be gone."""
    manifest = read_latest_manifest(storage, shard)
    return manifest is not None and any(listed.path == table.path for listed in manifest.sstables)


def _empty_files(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not _size(path):
                yield path


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(", /")[0]
