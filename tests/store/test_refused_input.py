"""What a caller may not pass to a store: one error names it, and nothing is left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from datagen_ray import (
    ConfigError,
    DatagenItemId,
    DatagenStore,
    InputError,
    InvalidEventError,
    InvalidItemIdError,
)
from datagen_ray.store.cleanup import CleanupOptions
from datagen_ray.store.lookup import NeverStarted
from datagen_ray.store.maintenance import MaintenanceOptions
from datagen_ray.store.writer import WriterOptions
from tests.log.builders import completed, created, field_append, field_set

Call = Callable[[DatagenStore], Any]
TOO_LONG = (math.nan, math.inf, -1, 1e18, 1e300, "1", None, True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatagenStore]:
    """One item in the base table, one in the WAL."""
    with DatagenStore.open(str(tmp_path / "log.lance"), fsync=False) as opened:
        for item in ("5", "6"):
            opened.append([created(1, item)])
            if item == "5":
                opened.flush()
                opened.cleanup_own_shard()
        yield opened


@pytest.mark.parametrize(
    "name", ["entry_rows", "entry_bytes", "queue_rows", "queue_bytes", "reopen_attempts"]
)
@pytest.mark.parametrize("value", [0, -1, "x", 1.5, math.nan, None, True])
def test_a_writer_option_that_is_no_count_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .* at least 1"):
        WriterOptions(**{name: value})


@pytest.mark.parametrize("value", TOO_LONG)
def test_an_option_that_is_no_time_is_refused(value: Any) -> None:
    for options, names in (
        (WriterOptions, ("reopen_pause_s", "idle_check_s")),
        (CleanupOptions, ("slow_step_s", "longest_pause_s")),
        (
            MaintenanceOptions,
            ("version_retention_s", "grace_s", "wal_retention_s", "leftover_age_s"),
        ),
    ):
        for name in names:
            with pytest.raises(ConfigError, match=f"{name} is .* seconds, at most"):
                options(**{name: value})


def test_an_idle_check_without_a_pause_is_refused() -> None:
    with pytest.raises(ConfigError, match="idle_check_s is 0; it must be greater than 0"):
        WriterOptions(idle_check_s=0)


@pytest.mark.parametrize("value", TOO_LONG)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("retention_s", lambda store, value: store.cleanup_old_versions(retention_s=value)),
        ("grace_s", lambda store, value: store.collect_garbage(grace_s=value)),
        ("wal_retention_s", lambda store, value: store.collect_garbage(wal_retention_s=value)),
        ("interval_s", lambda store, value: store.spawn_periodic_cleanup(value)),
    ],
)
def test_a_time_that_nothing_can_wait_for_is_refused(
    store: DatagenStore, name: str, call: Callable[[DatagenStore, Any], Any], value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is "):
        call(store, value)


MANY_IDS: dict[str, Callable[[DatagenStore, Any], Any]] = {
    "fold_items": lambda store, ids: store.fold_items(ids),
    "fold_roots": lambda store, ids: store.fold_roots(ids),
    "events_for_roots": lambda store, ids: store.events_for_roots(ids),
    "root_item_statuses": lambda store, ids: store.root_item_statuses(ids),
}
ONE_ID: dict[str, Callable[[DatagenStore, Any], Any]] = {
    "fold_item": lambda store, one: store.fold_item(one),
    "events_for_item": lambda store, one: store.events_for_item(one),
    "events_for_root": lambda store, one: store.events_for_root(one),
    "item_tree": lambda store, one: store.item_tree(one),
    "trajectory": lambda store, one: store.trajectory(one),
    "item_failures": lambda store, one: store.item_failures(one),
    "state_at": lambda store, one: store.state_at(one, 1),
    "load_blob": lambda store, one: store.load_blob(one, "field"),
    "open_stream": lambda store, one: store.open_stream(one, run_id="run"),
    "resume_stream": lambda store, one: store.resume_stream(one, run_id="run"),
}
NO_IDS = [None, 5, b"x", "\ud800", "a\udfff/b:1", ["5"]]


@pytest.mark.parametrize("read", MANY_IDS.values(), ids=MANY_IDS)
@pytest.mark.parametrize("ids", ["56", b"56", DatagenItemId("56"), 5])
def test_one_id_where_a_list_is_asked_for_is_refused(
    store: DatagenStore, read: Callable[[DatagenStore, Any], Any], ids: Any
) -> None:
    with pytest.raises(InvalidItemIdError, match="not a list of item ids; pass one"):
        read(store, ids)


@pytest.mark.parametrize("read", [*MANY_IDS.values(), *ONE_ID.values()], ids=[*MANY_IDS, *ONE_ID])
@pytest.mark.parametrize("no_id", NO_IDS, ids=repr)
def test_what_cannot_be_the_text_of_an_id_is_refused(
    store: DatagenStore, read: Callable[[DatagenStore, Any], Any], no_id: Any
) -> None:
    with pytest.raises(InvalidItemIdError, match=r"must be a string|lone surrogate"):
        read(store, [no_id] if read in MANY_IDS.values() else no_id)


@pytest.mark.parametrize("text", ["", "a/b", "5/x:01", "5%"])
def test_reads_take_any_text_for_an_id_that_never_started(store: DatagenStore, text: str) -> None:
    assert isinstance(store.fold_item(text), NeverStarted)
    assert isinstance(store.fold_items([text])[text], NeverStarted)
    assert not store.root_item_statuses([text])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.events(columns=["item_id", "item_id"]), "'item_id' more than once"),
        (lambda store: store.events(columns="item_id"), "pass a list of names"),
        (lambda store: store.events(pc.field("zz") == 1), r"the filter \(zz == 1\)"),
        (lambda store: store.events(pc.field("item_seq") == "a"), r"the filter \(item_seq == "),
        (lambda store: store.events(pc.field("item_seq") > 2.5), r"the filter \(item_seq > 2.5"),
        (lambda store: store.events(pc.field("item_seq")), "the filter item_seq cannot be used"),
        (
            lambda store: store.events(pc.utf8_upper(pc.field("item_id")) == "A"),
            "the filter .*utf8_upper",
        ),
        (lambda store: store.events("item_id = '5'"), "pass a pyarrow expression"),
        (lambda store: store.get_blob(None), "event_id is None"),
        (lambda store: store.get_blob("\ud800"), "event_id is "),
        (lambda store: store.failures(5), "run_id is 5"),
        (lambda store: store.state_at("5", "1"), "item_seq is '1'"),
    ],
)
def test_a_read_that_no_log_can_answer_is_refused_at_once(
    store: DatagenStore, call: Call, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(store)


@pytest.mark.parametrize("index", [5, 2, -3, "0", None, 0.0])
def test_a_value_that_an_appended_blob_field_lacks_is_refused(
    store: DatagenStore, index: Any
) -> None:
    store.append([created(1, "b"), field_append(2, b"one", "b"), field_append(3, b"two", "b")])
    field = next(iter(store.fold_item("b").folded().fields))
    assert [store.load_blob("b", field, place) for place in (0, 1, -1, -2)] == [
        b"one",
        b"two",
        b"two",
        b"one",
    ]
    with pytest.raises(ConfigError, match=r"index is .* has 2 values, so it must be from -2 to 1"):
        store.load_blob("b", field, index)


@pytest.mark.parametrize("events", [None, "x", 5, b"x", created(1, "x"), [None], ["x"], [5]])
@pytest.mark.parametrize("append", ["append", "append_checkpoint"])
def test_what_is_no_list_of_events_is_not_appended(
    store: DatagenStore, append: str, events: Any
) -> None:
    with pytest.raises(InvalidEventError, match="append takes") as raised:
        getattr(store, append)(events)
    assert raised.value.code == "wrong_type"
    store.append([field_set(2, 1, "6"), completed(3, "6")])


NO_TEXT = [None, 5, "a\nb", "a\0b", "\ud800", "\x1b"]


@pytest.mark.parametrize("name", NO_TEXT, ids=repr)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_no_log_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, read_only: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"{tmp_path}/{name}/log.lance" if isinstance(name, str) else name
    with pytest.raises(ConfigError, match="names no log; pass a path or URL as text"):
        DatagenStore.open(uri, read_only=read_only)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shard", ["", *NO_TEXT[1:]], ids=repr)
def test_a_shard_name_that_cannot_be_stored_leaves_no_log_behind(
    tmp_path: Path, shard: Any
) -> None:
    with pytest.raises(ConfigError, match="shard"):
        DatagenStore.open(str(tmp_path / "log.lance"), shard_id=shard)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_store_starts_no_periodic_cleanup(store: DatagenStore) -> None:
    store.close()
    with pytest.raises(InputError, match="is closed; open it again"):
        store.spawn_periodic_cleanup(1.0)
    assert store.statistics().cleanup is None


def test_a_store_that_is_dropped_unclosed_is_told_of(tmp_path: Path) -> None:
    store = DatagenStore.open(str(tmp_path / "log.lance"), shard_id="slot", fsync=False)
    owner = store._owner
    assert owner is not None
    with pytest.warns(ResourceWarning, match="unclosed store of .*log.lance"):
        del store
    owner.close()
