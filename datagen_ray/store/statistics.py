"""What a store has done and what waits, as one immutable snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from datagen_ray.store.cleanup import CleanupStatistics
from datagen_ray.store.shard import ShardManifest
from datagen_ray.store.writer import WriterStatistics


@dataclass(frozen=True)
class StoreStatistics:
    """``writer`` is None when nothing was claimed, ``cleanup`` when none runs in the background.

    ``pending_generations`` and ``pending_bytes`` (as Lance estimates them in memory) tell by shard
    id what is flushed and not yet merged.
    """

    writer: WriterStatistics | None
    cleanup: CleanupStatistics | None
    pending_generations: Mapping[str, int]
    pending_bytes: Mapping[str, int]
    base_version: int

    @classmethod
    def of(
        cls,
        manifests: Iterable[ShardManifest],
        *,
        writer: WriterStatistics | None,
        cleanup: CleanupStatistics | None,
        base_version: int,
    ) -> StoreStatistics:
        tables = {manifest.shard_id: manifest.sstables for manifest in manifests}
        return cls(
            writer=writer,
            cleanup=cleanup,
            pending_generations={shard: len(found) for shard, found in tables.items()},
            pending_bytes={
                shard: sum(table.in_memory_bytes for table in found)
                for shard, found in tables.items()
            },
            base_version=base_version,
        )
