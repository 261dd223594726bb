"""A forked process is told what it cannot do with a log, rather than hang. Each runs on its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = """
import asyncio, os, sys, warnings
from datagen_ray import ConfigError, DatagenStore
from tests.log.builders import created

warnings.simplefilter("ignore")
uri, before, act = sys.argv[1:]
if before != "nothing":
    store = DatagenStore.open(uri, shard_id="slot", fsync=False)
    store.append([created(1, "5")])
    if before == "closed":
        store.close()
    elif before == "read only":
        store.close()
        store = DatagenStore.open(uri, read_only=True)

async def append_async():
    await store.append_async([created(1, "7")])

def new():
    with DatagenStore.open(uri, shard_id="child", fsync=False) as opened:
        opened.append([created(1, "child")])

def elsewhere():
    DatagenStore.open(uri + "/../other/log.lance")

acts = dict(
    append=lambda: store.append([created(1, "7")]),
    append_async=lambda: asyncio.run(append_async()),
    flush=lambda: store.flush(),
    reopen=lambda: store.reopen(),
    epoch=lambda: store.writer_epoch,
    stream=lambda: store.open_stream("7", run_id="run"),
    cleanup=lambda: store.spawn_periodic_cleanup(1.0),
    merge=lambda: store.cleanup_own_shard(),
    close=lambda: store.close(),
    new=new,
    elsewhere=elsewhere,
    read=lambda: print(len(store.events_for_item("5")), end=" "),
    read_new=lambda: print(len(DatagenStore.open(uri).events_for_item("5")), end=" "),
)
child = os.fork()
if child == 0:
    try:
        acts[act]()
    except ConfigError as error:
        print("refused:", error, flush=True)
    else:
        print("done", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if before == "open":
    store.append([created(1, "6")])
    store.close()
"""


def said_by_child(tmp_path: Path, before: str, act: str) -> str:
    uri = str(tmp_path / "log.lance")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, uri, before, act],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "act",
    ["append", "append_async", "flush", "reopen", "epoch", "stream", "cleanup", "merge"],
)
def test_a_store_refuses_to_write_in_a_process_forked_since(tmp_path: Path, act: str) -> None:
    said = said_by_child(tmp_path, "open", act)
    assert said.startswith("refused: the store of ")
    assert "was opened in another process, before a fork" in said
    assert "spawn" in said


def test_closing_an_inherited_store_leaves_it_to_the_process_that_opened_it(
    tmp_path: Path,
) -> None:
    assert said_by_child(tmp_path, "open", "close") == "done"


@pytest.mark.parametrize("before", ["open", "closed", "read only"])
def test_no_shard_is_claimed_in_a_process_forked_from_one_that_had_a_log_open(
    tmp_path: Path, before: str
) -> None:
    assert "forked from one that had opened a log" in said_by_child(tmp_path, before, "new")


def test_no_log_is_made_in_a_process_forked_from_one_that_had_a_log_open(tmp_path: Path) -> None:
    assert "forked from one that had opened a log" in said_by_child(tmp_path, "open", "elsewhere")
    assert not (tmp_path / "other").exists()


def test_a_process_forked_before_any_log_was_opened_writes(tmp_path: Path) -> None:
    assert said_by_child(tmp_path, "nothing", "new") == "done"


@pytest.mark.parametrize("act", ["read", "read_new"])
def test_a_forked_process_reads(tmp_path: Path, act: str) -> None:
    assert said_by_child(tmp_path, "open", act) == "1 done"
