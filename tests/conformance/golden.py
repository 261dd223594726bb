"""Runs the golden cases against the real store.

A case is a list of calls with what the reference implementation gave. Where a call is odd
(``quirk``) the decision table of the format says what we do; ``DECISIONS`` holds the refusals that
follow from it. A batch that our append refuses by such a decision is put past the checks, so that
the reads behind it still show how tolerantly such rows are read.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datagen_ray import (
    DatagenError,
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenItemId,
    DatagenStore,
    DatagenStreamPosition,
    DatagenStreamWriter,
    InputError,
    datagen_event_id,
)
from datagen_ray.log.events import format_timestamp
from datagen_ray.log.fold import positions_to_list
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store.writer import ShardOwner

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))

# What our append or stream writer refuses though the reference takes it: code -> decision.
DECISIONS = {
    "status_mismatch": "Q04",
    "unknown_key": "Q05",
    "schema_version": "Q06",
    "json_too_deep": "Q10",
    "stray_field_column": "Q17",
    "step_kind_not_started": "Q18",
    "step_kind_not_completed": "Q18",
    "negative_step_index": "Q20",
    "event_id_reused": "Q21",
    "conflicting_retry": "Q21",
    "root_mismatch": "Q24",
    "parent_mismatch": "Q24",
    "item_id_not_canonical": "Q25",
    "item_id_malformed_segment": "Q26",
    "item_id_bad_branch_index": "Q27",
    "item_id_empty_root": "Q26",
    "nul_in_id": "Q29",
    "item_terminated": "Q02",
    "item_created_twice": "Q03",
    "item_exists": "Q36",
    "empty_column": "Q33",
    "out_of_range": "Q34",
    "mixed_set_append": "Q14",
    "field_kind_change": "Q15",
}


def untag(value: Any) -> Any:
    """The Python value of a case's JSON: tagged scalars decoded."""
    if isinstance(value, list):
        return [untag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "$bytes":
            return base64.b64decode(inner)
        if key == "$int":
            return int(inner)
        if key == "$float":
            return float(inner)
        if key == "$utf16":
            units = b"".join(unit.to_bytes(2, "little") for unit in inner)
            return units.decode("utf-16-le", "surrogatepass")
    return {key: untag(item) for key, item in value.items()}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


_SETS = ("started", "completed", "open_frames")


def same(expected: Any, found: Any, key: str = "") -> bool:
    """Equality of results: exact in type and value, sets as sets, ``<now>`` any time."""
    if expected == "<now>":
        return isinstance(found, str)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and expected.keys() == found.keys()
            and all(same(value, found[name], name) for name, value in expected.items())
        )
    if isinstance(expected, list):
        if not isinstance(found, list) or len(expected) != len(found):
            return False
        if key in _SETS:
            expected, found = (
                sorted(v, key=lambda p: json.dumps(p, sort_keys=True)) for v in (expected, found)
            )
        return all(same(a, b) for a, b in zip(expected, found, strict=True))
    if type(expected) is not type(found):
        return False
    return (
        expected == found
        or (expected != expected and found != found)
        or repr(expected) == repr(found)
    )


def replace_parent(event: DatagenEvent, parent: str | None) -> DatagenEvent:
    names = tuple(DatagenEvent.__dataclass_fields__)
    row = [parent if name == "parent_item_id" else getattr(event, name) for name in names]
    return DatagenEvent.as_stored(names, row)


@dataclass
class Outcome:
    """What one of our calls gave."""

    result: Any = None
    error: Exception | None = None

    @property
    def code(self) -> str | None:
        return (
            None if self.error is None else getattr(self.error, "code", type(self.error).__name__)
        )


@dataclass
class Case:
    """One case being run: the store, the named stream writers, what each call gave."""

    uri: str
    data: dict[str, Any]
    store: DatagenStore = field(init=False)
    writers: dict[str, DatagenStreamWriter] = field(default_factory=dict)
    emitted: list[list[DatagenEvent]] = field(default_factory=list)
    bypassed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = DatagenStore.open(self.uri)

    def call(self, call: dict[str, Any]) -> Outcome:
        args = untag(call["args"])
        name = call["method"].replace(".", "_")
        emitted = len(self.emitted)
        try:
            result = getattr(self, f"do_{name}")(**args)
            outcome = Outcome(result=result)
        except (DatagenError, KeyError) as error:
            outcome = Outcome(error=error)
        if len(self.emitted) == emitted:
            self.emitted.append([])
        return outcome

    # -- writes --------------------------------------------------------------------------------

    def _events(self, events: list[int] | None, from_calls: list[int] | None) -> list[DatagenEvent]:
        if from_calls is not None:
            return [event for index in from_calls for event in self.emitted[index]]
        return [DatagenEvent.from_dict(untag(self.data["events"][i])) for i in events or ()]

    def do_append(self, events: Any = None, from_calls: Any = None) -> str:
        self.store.append(self._events(events, from_calls))
        return "ok"

    def do_append_checkpoint(self, events: Any = None, from_calls: Any = None) -> str:
        self.store.append_checkpoint(self._events(events, from_calls))
        return "ok"

    def do_append_other_shard(self, shard: str, events: list[int]) -> str:
        owner = ShardOwner.claim(self.uri, shard)
        try:
            owner.submit(self._events(events, None)).result()
        finally:
            owner.close()
        return "ok"

    def put_unchecked(self, events: list[int]) -> None:
        """Store rows that our append refuses, as another program might have."""
        known = set(DatagenEvent.__dataclass_fields__) | {"query_tags"}
        rows = []
        for index in events:
            raw = untag(self.data["events"][index])
            event = DatagenEvent.from_dict({k: v for k, v in raw.items() if k in known})
            # Derived on construction; another program may have left it out.
            rows.append(replace_parent(event, raw.get("parent_item_id")))
        self.store._writer().submit(rows).result()

    def do_reopen(self) -> str:
        self.store.close()
        self.store = DatagenStore.open(self.uri)
        return "ok"

    # -- streams -------------------------------------------------------------------------------

    def do_open_stream(self, writer: str, item_id: str, **options: Any) -> dict[str, Any]:
        stream = self.store.open_stream(item_id, **options)
        self.writers[writer] = stream
        return {"item_id": stream.item_id, "attempt": stream.attempt}

    def do_resume_stream(self, writer: str, item_id: str, **options: Any) -> Any:
        stream = self.store.resume_stream(item_id, **options)
        if stream is None:
            return None
        self.writers[writer] = stream
        return {"item_id": stream.item_id, "attempt": stream.attempt}

    def do_writer_step_started(self, writer: str, position: Any) -> Any:
        return self._emit(
            self.writers[writer].step_started(DatagenStreamPosition.from_dict(position))
        )

    def do_writer_step_completed(self, writer: str, position: Any, fields: Any) -> Any:
        return self._emit(
            self.writers[writer].step_completed(
                DatagenStreamPosition.from_dict(position),
                [DatagenFieldUpdate.from_dict(update) for update in fields],
            )
        )

    def do_writer_item_failed(self, writer: str, position: Any, **error: Any) -> Any:
        return self._emit(
            self.writers[writer].item_failed(DatagenStreamPosition.from_dict(position), **error)
        )

    def do_writer_item_terminal(self, writer: str, terminal: str) -> Any:
        return self._emit(self.writers[writer].item_terminal(terminal))

    def _emit(self, events: DatagenEvent | list[DatagenEvent]) -> Any:
        if isinstance(events, DatagenEvent):
            self.emitted.append([events])
            return events.to_dict()
        self.emitted.append(events)
        return [event.to_dict() for event in events]

    # -- reads ---------------------------------------------------------------------------------

    def do_fold_item(self, item_id: str, load_blobs: bool = False) -> Any:
        folded = self.store.fold_item(item_id, load_blobs=load_blobs).folded()
        return None if folded is None else folded.to_dict()

    def do_item_events(self, item_id: str) -> Any:
        return [event.to_dict() for event in self.store.events_for_item(item_id)]

    def do_root_events(self, root_item_id: str) -> Any:
        return [event.to_dict() for event in self.store.events_for_root(root_item_id)]

    def do_item_failures(self, item_id: str) -> Any:
        return [failure.to_dict() for failure in self.store.item_failures(item_id)]

    def do_open_frames(self, item_id: str) -> Any:
        trajectory = self.store.trajectory(item_id)
        return None if trajectory is None else positions_to_list(trajectory.open_frames)

    def do_item_tree(self, root_item_id: str) -> Any:
        return self.store.item_tree(root_item_id).to_dict()

    def do_root_item_statuses(self, root_item_ids: list[str]) -> Any:
        return self.store.root_item_statuses(root_item_ids).to_dict()

    def do_overview(self) -> Any:
        return self.store.overview().to_dict()

    def do_get_blob(self, event_id: str) -> Any:
        return self.store.get_blob(event_id)

    def do_load_blob(self, item_id: str, field_name: str) -> Any:
        return self.store.load_blob(item_id, field_name)

    def do_raw_rows(self) -> Any:
        batches = self.store.events(columns=DATAGEN_SCHEMA.names)
        rows = [row for batch in batches for row in batch.to_pylist()]
        for row in rows:
            row["event_ts"] = format_timestamp(row["event_ts"])
        return sorted(rows, key=lambda row: (row["item_id"], row["item_seq"], row["event_id"]))

    # -- pure ----------------------------------------------------------------------------------

    def do_datagen_event_id(self, **args: Any) -> str:
        return datagen_event_id(**args)

    def _described(self, item: DatagenItemId) -> dict[str, Any]:
        return {
            "path": str(item),
            "is_root": item.is_root,
            "root": str(item.root),
            "parent": None if item.parent is None else str(item.parent),
            "origin_step": item.origin_step,
            "branch_idx": item.branch_idx,
        }

    def do_item_id_parse(self, path: str) -> Any:
        return self._described(DatagenItemId.parse(path))

    def _compose(self, key: str, segments: list[Any]) -> DatagenItemId:
        item = DatagenItemId.from_source_key(key)
        for step, index in segments:
            item = item.child(step, index)
        return item

    def do_item_id_compose(self, key: str, segments: list[Any]) -> Any:
        return self._described(self._compose(key, segments))

    def do_item_id_compose_then_parse(self, key: str, segments: list[Any]) -> Any:
        item = self._compose(key, segments)
        parsed = DatagenItemId.parse(str(item))
        return {"equal": parsed == item, "parsed": self._described(parsed)}

    def do_item_id_equal(self, left: str, right: str) -> bool:
        return DatagenItemId.parse(left) == DatagenItemId.parse(right)


__all__ = ["CASES", "DECISIONS", "Case", "InputError", "Outcome", "load", "same", "untag"]
