"""Rows of a Lance dataset that is somebody's data, not a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lance

from datagen_ray.errors import SourceError

_BATCH_ROWS = 1024


def open_rows(
    uri: str, columns: list[str] | None, storage_options: Mapping[str, str] | None
) -> Iterator[dict[str, Any]]:
    """The rows of the dataset in its own order; ``columns=[]`` counts them with empty rows.

    Raises :class:`SourceError` when there is no dataset or a column is missing.
    """
    try:
        dataset = lance.dataset(uri, storage_options=dict(storage_options or {}) or None)
    except (OSError, ValueError) as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise SourceError(f"{uri}: cannot be read as a Lance dataset: {text}") from error
    names = dataset.schema.names
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise SourceError(
            f"{uri}: no column {missing[0]!r} for the key; it has {', '.join(map(repr, names))}"
        )
    if columns == []:
        yield from ({} for _ in range(dataset.count_rows()))
        return
    for batch in dataset.to_batches(columns=columns, batch_size=_BATCH_ROWS, scan_in_order=True):
        yield from batch.to_pylist()
