"""Opening SSTables, and the rows that Lance hides in them.

When an event id was put more than once between two flushes, the flush writes all copies and hides
all but the newest behind a deletion file. Identical copies are what a retry leaves; copies with
other content are a violation that must be seen, so the hidden rows count here like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store.datasets import open_dataset
from datagen_ray.store.storage import LogStorage


def open_sstable(storage: LogStorage, key: str) -> Any:
    """The ``lance.LanceDataset`` of one SSTable, by its key in the log. Raises Lance's errors."""
    uri = storage.path(key) if storage.is_local else f"{storage.uri.rstrip('/')}/{key}"
    return open_dataset(uri, storage_options=storage.storage_options or None)


def has_hidden_rows(dataset: Any) -> bool:
    """Whether some id was put more than once."""
    return any(fragment.num_deletions for fragment in dataset.get_fragments())


def read_with_hidden_rows(dataset: Any, columns: Sequence[str]) -> pa.Table:
    """All rows of an SSTable in the order in which they were put."""
    names = list(columns)
    scanner = dataset.scanner(columns=names, include_deleted_rows=True, with_row_id=True)
    return scanner.to_table().select(names)


def hidden_rows(dataset: Any) -> pa.Table:
    """Only the hidden rows, with every column of the log."""
    scanner = dataset.scanner(
        columns=DATAGEN_SCHEMA.names, include_deleted_rows=True, with_row_id=True, batch_size=4096
    )
    pieces = (pa.Table.from_batches([batch]) for batch in scanner.to_batches())
    # a deleted row has no row id any more
    hidden = [piece.filter(piece.column("_rowid").is_null()) for piece in pieces]
    rows = [piece.select(DATAGEN_SCHEMA.names) for piece in hidden]
    return pa.concat_tables([DATAGEN_SCHEMA.empty_table(), *rows], promote_options="permissive")
