"""Reading a log: one item, one root, many of them, all of it.

Every method takes its own consistent snapshot, so it sees all that was acknowledged before the
call, whoever wrote it and however far it was flushed, merged or compacted. Blobs stay lazy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datagen_ray.errors import (
    ConfigError,
    DamagedLogError,
    InvalidItemIdError,
    ItemViolationError,
    StorageError,
)
from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.fold import (
    DatagenFailure,
    DatagenItemTree,
    DatagenTrajectory,
    FoldedDatagenItem,
    failure_of,
    fold_datagen_events,
    fold_tree,
    item_failures,
)
from datagen_ray.log.ids import DatagenItemId, id_text
from datagen_ray.log.schema import DATAGEN_SCHEMA, EVENT_COLUMNS, decode_batch
from datagen_ray.log.values import DatagenBlobValue, DatagenValue
from datagen_ray.store.bulk import (
    OVERVIEW_COLUMNS,
    STATUS_COLUMNS,
    Exact,
    Overview,
    RootStatuses,
    overview,
    root_statuses,
)
from datagen_ray.store.columns import LIFECYCLE_COLUMNS
from datagen_ray.store.gc_pause import collection_paused
from datagen_ray.store.levels import KeyColumn, Keys, SourceVanishedError, Where
from datagen_ray.store.lookup import Damaged, DatagenItemLookup, Found, NeverStarted, look_up
from datagen_ray.store.snapshot import (
    MAX_RESTARTS,
    LogReader,
    Snapshot,
    dedupe,
    empty_table,
    verified_blob,
)
from datagen_ray.store.streaming import stream_rows
from datagen_ray.store.verify import LogReport, verify_snapshot

_Read = TypeVar("_Read")
_Made = TypeVar("_Made")

MAX_INDEXED_IDS = 500
"""Ids that are always looked up through the index, whatever the size of the log."""

_EVENTS_AT_ONCE = 4096

ROWS_PER_LOOKUP = 100
"""Rows of the base table that a pass takes in while an index finds one id; measured, 65 to 100."""


def _keys(item_ids: Iterable[str | DatagenItemId]) -> list[str]:
    if isinstance(item_ids, str | bytes | DatagenItemId) or not isinstance(item_ids, Iterable):
        raise InvalidItemIdError(
            f"{item_ids!r} is not a list of item ids; pass one, such as ['5']", code="wrong_type"
        )
    return list(map(id_text, item_ids))


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not _is_utf8(value):
        raise ConfigError(f"{what} is {value!r}; it must be text that UTF-8 can hold")
    return value


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


def _event_order(event: DatagenEvent) -> tuple[str, int, str]:
    return (event.item_id, event.item_seq, event.event_id)


class LogReads:
    """The read half of a store."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    # -- one item ------------------------------------------------------------------------------

    def events_for_item(self, item_id: str | DatagenItemId) -> list[DatagenEvent]:
        """All events of one item by ``(item_seq, event_id)``; empty when there are none."""
        return self._events(Keys("item_id", (id_text(item_id),)))

    def fold_item(
        self, item_id: str | DatagenItemId, *, load_blobs: bool = False
    ) -> DatagenItemLookup:
        """The current state of one item.

        With ``load_blobs`` the bytes of blob fields are read too. A damaged item gives a lookup
        whose ``folded()`` raises :class:`ItemViolationError`.
        """
        found = look_up(self.events_for_item(item_id))
        if load_blobs and isinstance(found, Found):
            return Found(self._with_blobs(found.item))
        return found

    def state_at(self, item_id: str | DatagenItemId, item_seq: int) -> FoldedDatagenItem | None:
        """The state of an item as of one of its events; None before it was created."""
        if not isinstance(item_seq, int):
            raise ConfigError(f"item_seq is {item_seq!r}; it must be a whole number")
        events = self.events_for_item(item_id)
        return fold_datagen_events(event for event in events if event.item_seq <= item_seq)

    def trajectory(self, item_id: str | DatagenItemId) -> DatagenTrajectory | None:
        """The steps an item went through; None when it never started."""
        folded = self.fold_item(item_id).folded()
        return None if folded is None else folded.trajectory

    def item_failures(self, item_id: str | DatagenItemId) -> list[DatagenFailure]:
        """The failure lens: 0..N failures of one item, over all attempts, in order."""
        return item_failures(self.events_for_item(item_id))

    # -- one root ------------------------------------------------------------------------------

    def events_for_root(self, root_id: str | DatagenItemId) -> list[DatagenEvent]:
        """The events of a root and all its sub-items by ``(item_id, item_seq, event_id)``."""
        return self._events(Keys("root_item_id", (id_text(root_id),)))

    def item_tree(self, root_id: str | DatagenItemId) -> DatagenItemTree:
        """A root and all its sub-items, each at its latest state."""
        return fold_tree(self.events_for_root(root_id))

    # -- many ----------------------------------------------------------------------------------

    def events_for_roots(
        self, root_ids: Iterable[str | DatagenItemId]
    ) -> dict[str, list[DatagenEvent]]:
        """As :meth:`events_for_root` for many roots in one pass; every id asked for is a key."""
        grouped: dict[str, list[DatagenEvent]] = {key: [] for key in _keys(root_ids)}
        return {**grouped, **self._made_of("root_item_id", list(grouped), lambda events: events)}

    def fold_items(self, item_ids: Iterable[str | DatagenItemId]) -> dict[str, DatagenItemLookup]:
        """As :meth:`fold_item` for many items in one pass; every id asked for is a key."""
        lookups: dict[str, DatagenItemLookup] = {key: NeverStarted() for key in _keys(item_ids)}
        return {**lookups, **self._made_of("item_id", list(lookups), look_up)}

    def fold_roots(self, root_ids: Iterable[str | DatagenItemId]) -> dict[str, DatagenItemTree]:
        """As :meth:`item_tree` for many roots in one pass; every id asked for is a key."""
        trees = dict.fromkeys(_keys(root_ids), fold_tree(()))
        return {**trees, **self._made_of("root_item_id", list(trees), fold_tree)}

    def root_item_statuses(
        self,
        root_ids: Iterable[str | DatagenItemId] | None = None,
        *,
        lifecycle_only: bool = False,
    ) -> RootStatuses:
        """The lifecycle status of every root, or of those named, in one pass.

        Sub-items and roots that never started are not in the result. A damaged root is listed
        under ``violations``; it fails nothing else.

        With ``lifecycle_only`` five columns are read rather than twelve, which takes less than
        half the time. Damage to a root's steps or fields then goes unnoticed: such a root is
        listed with the status that its events say, and what folds it later finds the damage.
        """
        ids = None if root_ids is None else sorted(set(_keys(root_ids)))
        exact = Exact(self._exact_rows, self._violations)
        columns = LIFECYCLE_COLUMNS if lifecycle_only else STATUS_COLUMNS

        def read(snapshot: Snapshot) -> RootStatuses:
            if ids is not None:
                found = _pieces_in(snapshot, columns, "item_id", ids)
                return root_statuses(found, exact, columns)
            pieces = snapshot.pieces(columns, pc.field("parent_item_id").is_null())
            return root_statuses((piece for _, piece in pieces), exact, columns)

        return self._retried(read)

    # -- all -----------------------------------------------------------------------------------

    def overview(self) -> Overview:
        """Roots by status, completed steps and failures over the whole log."""
        exact = Exact(self._exact_rows, self._violations)

        def read(snapshot: Snapshot) -> Overview:
            pieces = (piece for _, piece in snapshot.pieces(OVERVIEW_COLUMNS, None))
            return overview(pieces, exact)

        return self._retried(read)

    def failures(self, run_id: str | None = None) -> list[DatagenFailure]:
        """Every failure of the log, or of one run, by item and ``item_seq``."""
        where = pc.field("event_type") == DatagenEventType.FAILED.value
        if run_id is not None:
            where = where & (pc.field("run_id") == _text(run_id, "run_id"))
        return [failure_of(event) for event in self._events(where)]

    def events(
        self,
        where: pc.Expression | None = None,
        columns: Sequence[str] = EVENT_COLUMNS,
    ) -> Iterator[pa.RecordBatch]:
        """The log's rows as Arrow record batches, streaming, in no particular order.

        ``where`` is a pyarrow expression over the columns of the log, for example
        ``pyarrow.compute.field("step_name") == "draft"``. ``value_blob`` is read only when it is
        among ``columns``. Raises :class:`ConfigError` at once for columns and filters that the log
        cannot answer.
        """
        if isinstance(columns, str):
            raise ConfigError(f"columns is {columns!r}; pass a list of names")
        unknown = [name for name in columns if name not in DATAGEN_SCHEMA.names]
        if unknown:
            raise ConfigError(
                f"the log has no column {unknown[0]!r}; it has {', '.join(DATAGEN_SCHEMA.names)}"
            )
        twice = [name for name, count in Counter(columns).items() if count > 1]
        if twice:
            raise ConfigError(f"columns has {twice[0]!r} more than once; name each column once")
        if where is not None:
            _check_filter(where, columns)
        return self._streamed(columns, where)

    def _streamed(
        self, columns: Sequence[str], where: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        try:
            for piece in stream_rows(self._reader.snapshot, columns, where):
                yield from piece.to_batches()
        except SourceVanishedError as error:
            raise self._gone(error) from error

    def verify(self, *, blobs: bool = False) -> LogReport:
        """Look at every row and item of the log, and list all that is wrong with it.

        Memory is bounded whatever the size of the log. With ``blobs`` the bytes of every blob
        are read and checked too. Raises only what reading raises: a violation is a result.
        """
        self._reader.look_anew()
        return self._retried(lambda snapshot: verify_snapshot(snapshot, blobs=blobs))

    # -- blobs ---------------------------------------------------------------------------------

    def get_blob(self, event_id: str) -> bytes | None:
        """The bytes that an event holds; None when there is no such event or it holds none.

        Size and checksum are verified where the log has them; raises :class:`DamagedLogError`
        when they disagree.
        """
        _text(event_id, "event_id")
        found = self._retried(lambda snapshot: snapshot.blob(event_id))
        return None if found is None else verified_blob(found.bytes, found, event_id)

    def load_blob(
        self, item: FoldedDatagenItem | str | DatagenItemId, field_name: str, index: int = -1
    ) -> bytes | None:
        """The bytes of a blob field of a folded item, or of the item with that id.

        None when the item has no such field or it is not a blob. ``index`` picks one value of an
        appended field; raises :class:`ConfigError` where there is no such value. Size and checksum
        are verified where the log has them; raises :class:`DamagedLogError` when they disagree.
        """
        folded = item if isinstance(item, FoldedDatagenItem) else self.fold_item(item).folded()
        field = None if folded is None else folded.fields.get(field_name)
        if folded is None or field is None or field.kind != "blob":
            return None
        count = len(field.values)
        if not isinstance(index, int) or not -count <= index < count:
            raise ConfigError(
                f"index is {index!r}; field {field_name!r} of item {folded.item_id!r} has "
                f"{count} values, so it must be from {-count} to {count - 1}"
            )
        event_id, reference = field.event_ids[index], field.values[index].raw
        data = self.get_blob(event_id)
        if not isinstance(reference, DatagenBlobValue):
            raise DamagedLogError(f"event {event_id} of field {field_name!r} is not a blob")
        return verified_blob(data, reference, event_id)

    def _with_blobs(self, folded: FoldedDatagenItem) -> FoldedDatagenItem:
        fields = {}
        for name, field in folded.fields.items():
            if field.kind == "blob":
                values = []
                for index, value in enumerate(field.values):
                    raw = value.raw
                    data = self.load_blob(folded, name, index)
                    if isinstance(raw, DatagenBlobValue):
                        raw = DatagenBlobValue(data, raw.size, raw.checksum)
                    values.append(DatagenValue.as_stored("blob", raw))
                field = replace(field, values=tuple(values))
            fields[name] = field
        return replace(folded, fields=fields)

    # -- how -----------------------------------------------------------------------------------

    def _retried(self, read: Callable[[Snapshot], _Read]) -> _Read:
        """``read(snapshot)``, again on a new snapshot while sources vanish under it."""
        missing: SourceVanishedError | None = None
        for _ in range(MAX_RESTARTS):
            try:
                return read(self._reader.snapshot())
            except SourceVanishedError as error:
                missing = error
            except DamagedLogError as error:
                if type(error) is DamagedLogError:
                    # Names the file, and the cure that is right for it, if it is one cut off
                    self._reader.check_whole()
                raise
        raise self._gone(missing) from missing

    def _gone(self, missing: SourceVanishedError | None) -> StorageError:
        """What to raise when what the log lists was read anew each time: it was not collected."""
        self._reader.check_whole()
        return StorageError(
            f"a file that the log lists is gone ({missing}); if it is of an index, `datagen-ray "
            "maintain LOG --once` makes it anew, else restore it from a copy of the log"
        )

    def _events(self, where: Where) -> list[DatagenEvent]:
        rows = self._retried(lambda snapshot: snapshot.read(EVENT_COLUMNS, where))
        return sorted(decode_batch(rows), key=_event_order)

    def _made_of(
        self, column: KeyColumn, ids: list[str], make: Callable[[list[DatagenEvent]], _Made]
    ) -> dict[str, _Made]:
        """For each id what ``make`` makes of the events, in order, whose ``column`` it is.

        Ids without events are left out. Rows become events a few thousand at a time.
        """
        rows = self._table_in(EVENT_COLUMNS, column, ids)
        keys = rows.column(column).combine_chunks().dictionary_encode().indices.to_numpy()
        order = np.argsort(keys, kind="stable")
        rows, keys = rows.take(order), keys[order]
        ends = [*(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
        made: dict[str, _Made] = {}
        first = 0
        for end in ends:
            if end - first < _EVENTS_AT_ONCE and end != len(keys):
                continue
            with collection_paused():
                streams: dict[str, list[DatagenEvent]] = {}
                for event in decode_batch(rows.slice(first, end - first)):
                    streams.setdefault(getattr(event, column), []).append(event)
                for key, stream in streams.items():
                    made[key] = make(sorted(stream, key=_event_order))
            first = end
        return made

    def _table_in(self, columns: Sequence[str], column: KeyColumn, ids: list[str]) -> pa.Table:
        """The rows whose ``column`` is one of ``ids``, whatever their number, each content once."""
        names = list(dict.fromkeys([*columns, "event_id"]))

        def read(snapshot: Snapshot) -> pa.Table:
            pieces = _pieces_in(snapshot, names, column, ids)
            rows = pa.concat_tables([empty_table(names), *pieces], promote_options="permissive")
            return dedupe(rows).select(list(columns))

        return self._retried(read)

    def _exact_rows(self, item_ids: list[str], columns: tuple[str, ...]) -> pa.Table:
        # Compared on every column before any is left out: copies that differ must stay two.
        return self._table_in(EVENT_COLUMNS, "item_id", item_ids).select(list(columns))

    def _violations(self, item_ids: list[str]) -> Mapping[str, ItemViolationError]:
        found = self._made_of("item_id", item_ids, look_up)
        return {
            item_id: lookup.violation
            for item_id, lookup in found.items()
            if isinstance(lookup, Damaged)
        }


def _check_filter(where: pc.Expression, columns: Sequence[str]) -> None:
    """Refuse a filter that the log cannot answer; tried on a table of no rows."""
    if not isinstance(where, pc.Expression):
        raise ConfigError(
            f"where is {where!r}; pass a pyarrow expression, such as "
            'pyarrow.compute.field("step_name") == "draft"'
        )
    # What lies in memory is filtered without the bytes of blobs, unless they are asked for
    names = dict.fromkeys([*EVENT_COLUMNS, *columns])
    rows = empty_table(list(names))
    try:
        rows.filter(where)
        where.to_substrait(rows.schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"the filter {where} cannot be used: {reason}; compare columns of the log with values "
            "of their types"
        ) from error


def _pieces_in(
    snapshot: Snapshot, columns: Sequence[str], column: KeyColumn, ids: list[str]
) -> Iterator[pa.Table]:
    """The stored rows whose ``column`` is one of ``ids``, copies too.

    A few ids are looked up through the index; many are found in one pass over the column.
    """
    if not ids:
        return
    if len(ids) <= max(MAX_INDEXED_IDS, snapshot.base.count_rows() // ROWS_PER_LOOKUP):
        for _, piece in snapshot.pieces(columns, Keys(column, tuple(ids))):
            yield piece
        return
    wanted = pa.array(ids, pa.string())
    names = list(columns) if column in columns else [*columns, column]
    for _, piece in snapshot.pieces(names, None):
        rows = piece.filter(pc.is_in(piece.column(column), value_set=wanted))
        yield rows.select(list(columns))
