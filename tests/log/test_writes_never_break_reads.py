"""Whatever append takes, every read of every item works, and says what a second fold says.

Random stream writers and raw appends, valid and not, from two shards, with flushes and merges in
between. After each batch that was taken, each item is read in each way and compared with the
model. The seed is printed; ``pytest --hypothesis-seed=<seed>`` repeats a run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, event, given, seed, settings
from hypothesis import strategies as st

from datagen_ray import (
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenItemId,
    DatagenStepKind,
    DatagenStore,
    DatagenStreamPosition,
    DatagenStreamWriter,
    DatagenValue,
    InputError,
    ItemViolationError,
    datagen_event_id,
)
from tests.conformance.golden import same
from tests.log import model
from tests.log.builders import NOW

EXAMPLES = int(os.environ.get("DATAGEN_RAY_PROPERTY_EXAMPLES", "30"))
SEED = int(os.environ.get("DATAGEN_RAY_PROPERTY_SEED", "20240102"))

ITEMS = ("5", "6", "5/x:0", "5/x:0/y:10", "a%2Fb")
ODD_ITEMS = ("", "5/x", "5/x:01", "/x:0", "5\0", "5/x:y", "\ud800")
KINDS = [kind.value for kind in DatagenStepKind]
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.none(),
    st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
# Mostly of one kind, so that fields live for longer than one event.
FEW_VALUES = st.one_of(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), VALUES)

POSITIONS = st.builds(
    DatagenStreamPosition,
    st.sampled_from(["s", "t", "s", "t", ""]),
    st.sampled_from([*DatagenStepKind, DatagenStepKind.LEAF, DatagenStepKind.SEQUENCE]),
    st.sampled_from([0, 1, 0, 1, -1, 2**63]),
    st.sampled_from([None, "e", ""]),
    st.sampled_from([None, "c"]),
)
UPDATES = st.builds(
    DatagenFieldUpdate,
    st.sampled_from(["f", "g", "f", "g", ""]),
    st.sampled_from(["set", "append", "set", "append", "add"]),
    FEW_VALUES.map(DatagenValue.of),
    st.sampled_from(["int", "int", "other"]),
    st.sampled_from([1, 1, 2]),
)
STREAM_CALLS = st.one_of(
    st.tuples(st.just("step_started"), POSITIONS),
    st.tuples(st.just("step_completed"), POSITIONS, st.lists(UPDATES, max_size=3)),
    st.tuples(st.just("item_failed"), POSITIONS, st.sampled_from(["E", "", "\ud800"])),
    st.tuples(st.just("item_terminal"), st.sampled_from(["completed", "filtered", "failed"])),
)


JSON_VALUES = st.one_of(
    st.none(),
    st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
NEXT = "next"
EVENT_TYPES = ("ITEM_CREATED", "STEP_STARTED", "FAILED", "TERMINAL")
EVENT_TYPES += ("FIELD_SET", "FIELD_APPEND", "STEP_COMPLETED") * 3
SPOILS: dict[str, tuple[Any, ...]] = {
    "item_id": ODD_ITEMS,
    "event_id": ("", "shared"),
    "root_item_id": ("6", ""),
    "parent_item_id": ("6",),
    "item_seq": (-1, 2**63 - 1, 2**63, "1"),
    "checkpoint_id": ("", "other"),
    "event_type": ("MERGED", *EVENT_TYPES),
    "run_id": ("", "r2"),
    "attempt": (1, 2, -1, 2**31 - 1, 2**31),
    "event_ts": ("2024-01-02T03:04:05.5Z", "never"),
    "schema_version": (1, 3),
    "step_name": ("t", "", None),
    "step_kind": tuple(KINDS),
    "step_index": (1, -1, 2**63, None),
    "field_name": ("", None, "g"),
    "field_type": ("other", None),
    "codec_version": (2, 2**31, None),
    "value": (None, {"kind": "blob", "size": 3}, {"kind": "blob", "bytes": b"x", "size": 2}),
    "status": ("running", "failed", "completed", "filtered", None),
    "colour": ("red",),
}


@st.composite
def raw_events(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """An exchange form that is mostly an event, with one thing about it spoilt now and then."""
    event_type = draw(st.sampled_from(EVENT_TYPES))
    data: dict[str, Any] = {
        "item_id": draw(st.sampled_from(ITEMS + ITEMS[:1] * 4)),
        # The driver puts the number that would be next, unless one is given.
        "item_seq": draw(st.sampled_from([NEXT] * 12 + [1, 2, 3])),
        "checkpoint_id": "c",
        "event_type": event_type,
        "run_id": "r",
        "writer_epoch": "w",
        "event_ts": "2024-01-02T03:04:05Z",
    }
    if event_type not in ("ITEM_CREATED", "TERMINAL"):
        kind = "sequence" if event_type == "STEP_STARTED" else "leaf"
        data |= {"step_name": "s", "step_kind": kind, "step_index": draw(st.integers(0, 2))}
    if event_type in ("FIELD_SET", "FIELD_APPEND"):
        name = "f" if event_type == "FIELD_SET" else "g"
        data |= {
            "field_name": draw(st.sampled_from([name] * 6 + ["f", "g"])),
            "field_type": "int",
            "codec_version": 1,
            "value": DatagenValue.of(draw(FEW_VALUES)).to_dict(),
        }
    if event_type == "TERMINAL":
        data["status"] = draw(st.sampled_from(["completed", "filtered"]))
    if event_type == "ITEM_CREATED":
        data["query_tags"] = draw(JSON_VALUES)
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from(sorted(SPOILS)))
        data[name] = draw(st.sampled_from(SPOILS[name]))
    return data


@st.composite
def field_events(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """A sound row for itself, of which two may not go together in one item."""
    data = {
        "item_id": draw(st.sampled_from(["5", "5", "5/x:0"])),
        "item_seq": draw(st.sampled_from([NEXT] * 15 + [1, 2, 3])),
        "checkpoint_id": "c",
        "event_type": draw(st.sampled_from(["FIELD_SET"] * 6 + ["FIELD_APPEND"])),
        "run_id": "r",
        "writer_epoch": "w",
        "event_ts": "2024-01-02T03:04:05Z",
        "step_name": "s",
        "step_kind": "leaf",
        "step_index": 0,
        "field_name": draw(st.sampled_from(["f", "h"])),
        "field_type": draw(st.sampled_from(["int"] * 6 + ["other"])),
        "codec_version": 1,
        "value": DatagenValue.of(draw(FEW_VALUES)).to_dict(),
    }
    if data["event_type"] == "FIELD_APPEND" or draw(st.integers(0, 9)) == 0:
        data |= {"field_name": "g", "event_type": "FIELD_APPEND"}
    if draw(st.integers(0, 9)) == 0:
        data |= {"field_name": draw(st.sampled_from(["f", "g"]))}
    if draw(st.integers(0, 9)) == 0:
        data |= {"event_id": draw(st.sampled_from(["shared", "shared2"]))}
    return data


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(field_events(), min_size=1, max_size=4)),
        st.tuples(
            st.just("stream"),
            st.sampled_from(ITEMS),
            st.lists(STREAM_CALLS, min_size=1, max_size=4),
            st.sampled_from(["once", "once", "twice", "lost"]),
        ),
        st.tuples(st.just("append"), st.lists(raw_events(), min_size=1, max_size=3)),
        st.tuples(st.just("append_checkpoint"), st.lists(raw_events(), min_size=1, max_size=3)),
        st.tuples(st.just("again")),
        st.tuples(st.just("flush")),
        st.tuples(st.just("merge")),
    ),
    min_size=1,
    max_size=7,
)


class Driver:
    """Two shards of one log, the streams open on it, and all that was taken."""

    def __init__(self, uri: str) -> None:
        self.stores = [DatagenStore.open(uri, shard_id=name, fsync=False) for name in "AB"]
        self.writers: dict[str, DatagenStreamWriter] = {}
        self.taken: list[model.Event] = []
        self.last: list[DatagenEvent] = []

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def run(self, operation: tuple[Any, ...], shard: int) -> bool:
        """Do it; whether anything was taken."""
        store, (name, *arguments) = self.stores[shard], operation
        if name == "flush":
            store.flush()
            return False
        if name == "merge":
            store.flush()
            store.cleanup_own_shard()
            return True  # nothing new, and that is to be seen
        try:
            if name == "stream":
                return self._stream(store, *arguments)
            if name == "again":
                return self._append(store, self.last)
            events = [DatagenEvent.from_dict(data) for data in self._numbered(arguments[0])]
            if name == "append":
                return self._append(store, events)
            store.append_checkpoint(events)
            return self._take(events)
        except (InputError, ItemViolationError) as error:
            event(f"{name}: {getattr(error, 'code', type(error).__name__)}")
            return False

    def _numbered(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with the numbers and ids that they leave to us."""
        numbers = dict.fromkeys(ITEMS, 1)
        for data in self.taken:
            numbers[data["item_id"]] = max(numbers[data["item_id"]], data["item_seq"] + 1)
        made = []
        for index, row in enumerate(rows):
            data = {"root_item_id": row["item_id"].partition("/")[0], **row}
            if data["item_seq"] == NEXT:
                data["item_seq"] = numbers.get(data["item_id"], 1)
                numbers[data["item_id"]] = data["item_seq"] + 1
            data.setdefault("event_id", f"{data['item_id']}#{data['item_seq']}#{index}")
            made.append(data)
        return made

    def _stream(
        self, store: DatagenStore, item_id: str, calls: list[tuple[Any, ...]], how: str
    ) -> bool:
        writer = self.writers.get(item_id)
        if writer is None:
            writer = store.resume_stream(item_id, run_id="r2")
        if writer is None:
            writer = store.open_stream(item_id, run_id="r", query_tags={"n": 1})
            created_id = datagen_event_id(item_id, f"{item_id}\0created", 0)
            events = store.events_for_item(item_id)
            self._take([each for each in events if each.event_id == created_id])
        self.writers[item_id] = writer
        taken = True
        for method, *arguments in calls:
            before = writer.next_item_seq
            try:
                made = getattr(writer, method)(*arguments)
            except InputError as error:
                assert writer.next_item_seq == before
                event(f"stream: {getattr(error, 'code', '')}")
                continue
            events = made if isinstance(made, list) else [made]
            if how == "lost":
                continue
            for _ in range(2 if how == "twice" else 1):
                taken |= self._append(store, events)
        return taken

    def _append(self, store: DatagenStore, events: list[DatagenEvent]) -> bool:
        store.append(events)
        self.last = list(events)
        return self._take(events)

    def _take(self, events: list[DatagenEvent]) -> bool:
        for each in events:
            data = each.to_dict()
            if data["event_type"] == "ITEM_CREATED":
                data["status"] = "running"
            if data["event_type"] == "FAILED":
                data["status"] = "failed"
            self.taken.append(data)
        return bool(events)

    # -- comparing -----------------------------------------------------------------------------

    def check(self) -> None:
        expected: dict[str, list[model.Event]] = {item_id: [] for item_id in ITEMS}
        for data in self.taken:
            expected[data["item_id"]].append(data)
        lazily = {
            item_id: [model.without_bytes(data) for data in events]
            for item_id, events in expected.items()
        }
        folds = {item_id: model.fold(events) for item_id, events in lazily.items()}
        for state, what in folds.values():
            if currently_in_test_context():
                event(f"fold: {what if state == 'damaged' else state}")
        store = self.stores[len(self.taken) % 2]
        for item_id in ITEMS:
            self._check_item(store, item_id, expected[item_id], folds[item_id])
        self._check_bulk(store, folds, lazily)

    def _check_item(
        self,
        store: DatagenStore,
        item_id: str,
        events: list[model.Event],
        expected: tuple[str, Any],
    ) -> None:
        found = [each.to_dict() for each in store.events_for_item(item_id)]
        distinct = {model.key_of(model.without_bytes(data)): data for data in events}
        wanted = sorted(distinct.values(), key=lambda data: (data["item_seq"], data["event_id"]))
        if expected != ("damaged", "event_id_reused"):
            assert same([model.without_bytes(data) for data in wanted], found)
        assert same(expected, shown(lambda: store.fold_item(item_id).folded()))
        if expected[0] == "damaged":
            assert store.verify().violation_counts
            return
        failures = [data for data in wanted if data["event_type"] == "FAILED"]
        assert [f.at.item_seq for f in store.item_failures(item_id) if f.at is not None] == [
            data["item_seq"] for data in failures
        ]
        if expected[0] == "never":
            assert store.trajectory(item_id) is None
            return
        for data in wanted:
            if data["value"] is not None and data["value"]["kind"] == "blob":
                assert store.get_blob(data["event_id"]) == data["value"]["bytes"]
        middle = wanted[len(wanted) // 2]["item_seq"]
        until = [model.without_bytes(data) for data in wanted if data["item_seq"] <= middle]
        assert same(model.fold(until), shown(lambda: store.state_at(item_id, middle)))

    def _check_bulk(
        self,
        store: DatagenStore,
        folds: dict[str, tuple[str, Any]],
        events: dict[str, list[model.Event]],
    ) -> None:
        assert same(
            {item_id: fold for item_id, fold in folds.items()},  # noqa: C416
            {item_id: shown(lookup.folded) for item_id, lookup in store.fold_items(ITEMS).items()},
        )
        exact = {item_id for item_id, fold in folds.items() if fold[1] != "event_id_reused"}
        for ids in (None, ITEMS):
            statuses = store.root_item_statuses(ids)
            for item_id in exact:
                state, fold = folds[item_id]
                is_root = DatagenItemId.parse(item_id).is_root
                status = fold["status"] if state == "found" and is_root else None
                assert statuses.status(item_id) == status
                assert (item_id in statuses.violations) is (state == "damaged" and is_root)
        tree = store.item_tree("5")
        for item_id in exact:
            if DatagenItemId.parse(item_id).root_key == "5":
                assert (item_id in tree.nodes) is (folds[item_id][0] == "found")
        if len(exact) == len(ITEMS):
            found = store.overview()
            steps = [
                data
                for item_id, (state, _) in folds.items()
                if state == "found"
                for data in {d["event_id"]: d for d in events[item_id]}.values()
                if data["event_type"] == "STEP_COMPLETED"
            ]
            assert sum(found.completed_steps.values()) == len(steps)
            assert set(found.violations) == {i for i, f in folds.items() if f[0] == "damaged"}
        stored = {model.key_of(data) for each in events.values() for data in each}
        assert sum(batch.num_rows for batch in store.events()) == len(stored)
        store.failures()


def shown(read: Callable[[], Any]) -> tuple[str, Any]:
    """What a read gives, in the words of the model. No other error may come out of it."""
    try:
        folded = read()
    except ItemViolationError as error:
        return "damaged", error.code
    return ("never", None) if folded is None else ("found", folded.to_dict())


@pytest.fixture(autouse=True)
def _say_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {EXAMPLES} examples, seed {SEED} ")


@seed(SEED)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
)
@given(
    st.sets(st.sampled_from(ITEMS)), st.lists(st.integers(0, 1), min_size=7, max_size=7), OPERATIONS
)
def test_what_append_takes_breaks_no_read(
    created: set[str], shards: list[int], operations: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(str(Path(folder) / "log.lance"))
        try:
            first = [("stream", item_id, [], "once") for item_id in sorted(created)]
            assert all(driver.run(operation, 0) for operation in first)
            for operation, shard in zip(operations, shards, strict=False):
                if driver.run(operation, shard):
                    driver.check()
        finally:
            driver.close()


def test_the_model_and_the_driver_see_damage_too(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path / "log.lance"))
    try:
        for item_seq, event_type in enumerate(("ITEM_CREATED", "FIELD_SET", "FIELD_APPEND")):
            data = {
                "event_id": f"e{item_seq}", "item_id": "5", "root_item_id": "5",
                "item_seq": item_seq, "checkpoint_id": "c", "event_type": event_type,
                "run_id": "r", "writer_epoch": "w", "event_ts": NOW,
            }  # fmt: skip
            if item_seq:
                data |= {
                    "step_name": "s", "step_kind": "leaf", "step_index": 0, "field_name": "f",
                    "field_type": "t", "codec_version": 1, "value": {"kind": "int", "value": 1},
                }  # fmt: skip
            assert driver.run(("append", [data]), item_seq % 2)
            driver.check()
        assert model.fold(driver.taken) == ("damaged", "mixed_set_append")
    finally:
        driver.close()
