from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from datagen_ray.errors import ConfigError, LogNotFoundError
from datagen_ray.log.schema import DATAGEN_SCHEMA
from datagen_ray.store.creation import create_log, log_exists, memtable_limits, open_log
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.writer import ShardOwner
from tests.log.builders import created
from tests.store.writer_support import batch, stored_ids

CASES = Path(__file__).parents[1] / "conformance" / "cases"


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_log_is_created_once_and_opened_after(tmp_path):
    uri = str(tmp_path / "new" / "log.lance")
    assert not log_exists(uri)
    first = create_log(uri)
    assert log_exists(uri)
    assert create_log(uri).version == first.version
    assert open_log(uri).schema.names == DATAGEN_SCHEMA.names
    assert memtable_limits(first).batches == 500


def test_file_urls_name_the_same_log(tmp_path):
    create_log(f"file://{tmp_path}/log.lance")
    assert log_exists(str(tmp_path / "log.lance"))
    with ShardOwner.claim(f"file://{tmp_path}/log.lance") as owner:
        owner.submit(batch("a")).result()
    assert len(stored_ids(str(tmp_path / "log.lance"))) == 3


def test_racing_creators_all_get_the_same_log(tmp_path):
    uri = str(tmp_path / "log.lance")
    with ThreadPoolExecutor(6) as pool:
        datasets = list(pool.map(lambda _: create_log(uri), range(6)))
    assert all(dataset.mem_wal_index_details() is not None for dataset in datasets)
    assert {dataset.version for dataset in datasets} == {2}
    with ShardOwner.claim(uri) as owner:
        owner.submit(batch("a")).result()
    assert len(stored_ids(uri)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["log.lance"]


def test_a_log_whose_creator_died_half_way_is_finished(tmp_path):
    uri = str(tmp_path / "log.lance")
    lance.write_dataset(pa.Table.from_batches([], schema=DATAGEN_SCHEMA), uri)
    with ShardOwner.claim(uri) as owner:
        owner.submit(batch("a")).result()
    assert memtable_limits(open_log(uri)).batches == 500


def test_opening_creates_nothing(tmp_path):
    with pytest.raises(LogNotFoundError, match="no log"):
        open_log(str(tmp_path / "mistyped" / "log.lance"))
    assert everything(tmp_path) == []


def test_a_file_in_the_way_is_named_and_nothing_is_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for uri in (tmp_path / "file", tmp_path / "file" / "below" / "log.lance"):
        with pytest.raises(ConfigError, match="file"):
            create_log(str(uri))
    with pytest.raises(ConfigError, match="is a file"):
        open_log(str(tmp_path / "file"))
    assert everything(tmp_path) == ["file"]


def test_a_folder_with_other_content_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="other content"):
        create_log(str(tmp_path))
    assert everything(tmp_path) == ["notes.txt"]


def test_a_dataset_that_is_no_log_is_refused(tmp_path):
    uri = str(tmp_path / "other.lance")
    lance.write_dataset(pa.table({"a": [1]}), uri)
    before = everything(tmp_path)
    for call in (create_log, open_log, ShardOwner.claim):
        with pytest.raises(ConfigError, match="not a datagen log"):
            call(uri)
    assert everything(tmp_path) == before


def test_a_log_with_columns_of_a_newer_version_asks_for_an_upgrade(tmp_path):
    uri = str(tmp_path / "log.lance")
    schema = DATAGEN_SCHEMA.append(pa.field("later", pa.int64()))
    lance.write_dataset(pa.Table.from_batches([], schema=schema), uri)
    with pytest.raises(ConfigError, match=r"later.*upgrade"):
        create_log(uri)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="not writable"):
        create_log(str(tmp_path / "log.lance"))
    monkeypatch.undo()

    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ConfigError, match="hard links"):
        create_log(str(tmp_path / "log.lance"))
    assert everything(tmp_path) == []


def test_logs_of_the_reference_implementation_open_and_claim(tmp_path):
    lance_context = pytest.importorskip("lance_context")
    uri = str(tmp_path / "log.lance")
    case = json.loads((CASES / "checkpoint_ok.json").read_text())
    store = lance_context.DatagenStore.open(uri)
    written: set[str] = set()
    for call in case["calls"]:
        events = [case["events"][index] for index in call["args"].get("events", ())]
        tagged = "$" in json.dumps(events)  # scalars that plain JSON cannot carry
        if call["method"].startswith("append") and events and "error" not in call and not tagged:
            getattr(store, call["method"])(events)
            written.update(event["event_id"] for event in events)
    del store
    assert written
    assert set(stored_ids(uri)) == written
    with ShardOwner.claim(uri) as owner:
        owner.submit(batch("ours")).result()
    assert set(stored_ids(uri)) == written | {e.event_id for e in batch("ours")}


@pytest.mark.parametrize("own", [None, "warn"])
def test_the_noise_of_lance_is_off_unless_the_user_set_it(own):
    environment = {key: value for key, value in os.environ.items() if key != "LANCE_LOG"}
    if own:
        environment["LANCE_LOG"] = own
    program = "import os, datagen_ray.store.writer; print(os.environ['LANCE_LOG'])"
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = root
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (own or "error,lance::index=off")


@pytest.mark.parametrize("name", ["a#b", "c%d", "e?f", "[g]", "~h", "i j", "é", r"k\l", '"m"'])
def test_a_log_leaves_nothing_beside_it_whatever_its_folder_is_called(
    tmp_path: Path, name: str
) -> None:
    uri = str(tmp_path / name / "log.lance")
    with DatagenStore.open(uri, fsync=False) as store:
        store.append([created()])
        store.flush()
        store.cleanup_own_shard()
        store.compact()
    assert os.listdir(tmp_path) == [name]
    with DatagenStore.open(uri, read_only=True) as store:
        assert store.fold_item("5").folded() is not None
