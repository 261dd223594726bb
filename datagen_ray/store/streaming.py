"""One pass over all rows of a log, in pieces, that outlives what maintenance does meanwhile.

Flow: what lies above the base table is read into memory first, since it can be merged and collected
at any time. The base table is then handed on piece by piece. Rows that stand more than once, in the
base or above it, come last, each content once.

When the files of the base version that is read are removed (an old version is cleaned up after its
retention), the pass goes on with the newest one and leaves out what it has handed on. Compaction
puts rows in another order, so that takes the ids: 8 bytes a row, their hashes. Every row that was
handed on is in the newer version, so their numbers must agree; if two ids had one hash they do not,
and the read fails rather than leave out a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import StorageError
from datagen_ray.store.levels import SourceVanishedError, Where, are_among, batches, hashes_of
from datagen_ray.store.snapshot import MAX_RESTARTS, Snapshot, dedupe, empty_table, with_id


def stream_rows(
    take: Callable[[], Snapshot], columns: Sequence[str], where: Where
) -> Iterator[pa.Table]:
    """The matching rows, each once, in pieces; ``take`` gives a new snapshot.

    Everything that was acknowledged before the first piece is in it. Raises SourceVanishedError
    when files vanish again and again.
    """
    rows = _Pass(columns, where)
    for restart in range(MAX_RESTARTS):
        try:
            yield from rows.over(take())
            return
        except SourceVanishedError:
            if restart == MAX_RESTARTS - 1:
                raise


class _Pass:
    """What a pass has handed on, and what it still holds."""

    def __init__(self, columns: Sequence[str], where: Where) -> None:
        self._columns = list(columns)
        self._names = with_id(columns)
        self._where = where
        self._handed_on: list[npt.NDArray[np.int64]] = []
        self._held = [empty_table(self._names)]

    def over(self, snapshot: Snapshot) -> Iterator[pa.Table]:
        """The rows that were not handed on yet. After SourceVanishedError, call it once more."""
        self._held.append(snapshot.upper(self._names, self._where))
        above = [chunk for table in self._held for chunk in table.column("event_id").chunks]
        held_ids = pa.chunked_array([snapshot.repeated_in_base(), *above], pa.string())
        before = np.sort(np.concatenate([np.zeros(0, np.int64), *self._handed_on]))
        left_out = 0
        for batch in batches(snapshot.base, self._names, self._where):
            piece = pa.Table.from_batches([batch])
            hashes = hashes_of(piece.column("event_id").to_pylist())
            if len(before):
                is_new = ~are_among(before, hashes)
                piece, hashes = piece.filter(pa.array(is_new)), hashes[is_new]
                left_out += len(is_new) - len(hashes)
            if len(held_ids):
                is_held = pc.is_in(piece.column("event_id"), value_set=held_ids)
                if pc.any(is_held).as_py():
                    self._held.append(piece.filter(is_held))
                    is_free = pc.invert(is_held)
                    hashes = hashes[is_free.to_numpy()]
                    piece = piece.filter(is_free)
            if piece.num_rows:
                # Noted first: what a consumer was given must never come again.
                self._handed_on.append(hashes)
                yield piece.select(self._columns)
        if left_out != len(before):
            raise StorageError(
                f"the files of {snapshot.base.uri} were removed while they were read, and the rows "
                f"that were handed on ({len(before)}) are not those that are there now "
                f"({left_out}); read again"
            )
        last = dedupe(pa.concat_tables(self._held, promote_options="permissive"))
        if last.num_rows:
            yield last.select(self._columns)
