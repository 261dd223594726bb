from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datagen_ray.errors import (
    InputError,
    InternalError,
    InvalidEventError,
    LogNotFoundError,
    RunSupersededError,
    ValueTooLargeError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.log.schema import encode_events
from datagen_ray.store import claim, layout
from datagen_ray.store.creation import open_log
from datagen_ray.store.shard import read_latest_manifest
from datagen_ray.store.storage import LogStorage
from datagen_ray.store.writer import ShardOwner, WriterOptions
from tests.store.writer_support import (
    batch,
    event,
    new_log,
    stored_ids,
    wal_ids,
    wal_path,
    wal_positions,
)

SHARD = layout.shard_uuid("slot")
EAGER = WriterOptions(reopen_pause_s=0.001)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_log(tmp_path)


class Gate:
    """Holds a writer's thread at its next WAL entry until the test has queued what it wants."""

    def __init__(self, owner: ShardOwner) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()
        append = owner._appender.append

        def held(rows, event_ids):
            self.arrived.set()
            assert self.opened.wait(60)
            append(rows, event_ids)

        owner._appender.append = held


class BrokenWal:
    """Makes every WAL write of a shard fail: a file stands where the folder was."""

    def __init__(self, uri: str) -> None:
        self.folder = Path(uri) / layout.wal_folder(SHARD)
        self.aside = self.folder.with_name("wal-aside")

    def break_it(self) -> None:
        self.folder.rename(self.aside)
        self.folder.touch()

    def mend(self) -> None:
        if self.aside.exists():
            self.folder.unlink()
            self.aside.rename(self.folder)


def assert_not_after_the_peer(uri: str, event_id: str) -> None:
    """Its outcome was unknown, so it may be there, but only from before the peer's claim."""
    flat = [each for entry in wal_ids(uri, "slot") for each in entry]
    assert event_id not in flat[flat.index("peer.0") :]


# -- group commit ----------------------------------------------------------------------------


def test_an_append_is_durable_when_it_returns(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        assert owner.submit(batch("a")).result() is None
        assert wal_ids(uri, "slot") == [["a.0", "a.1", "a.2"]]
        assert owner.writer_epoch == "slot:1"


def test_many_callers_share_one_entry_in_the_order_they_came(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        gate = Gate(owner)
        futures = [owner.submit(batch("first"))]
        assert gate.arrived.wait(60)
        futures += [owner.submit(batch(f"b{number:03}")) for number in range(100)]
        gate.opened.set()
        for future in futures:
            future.result()
        entries = wal_ids(uri, "slot")
        assert len(entries) == 2
        expected = [f"b{number:03}.{row}" for number in range(100) for row in range(3)]
        assert entries[1] == expected


def test_a_batch_is_never_split_over_entries(uri):
    options = WriterOptions(entry_rows=10)
    with ShardOwner.claim(uri, "slot", options=options) as owner:
        gate = Gate(owner)
        futures = [owner.submit(batch("first"))]
        assert gate.arrived.wait(60)
        futures += [owner.submit(batch(f"b{number}", rows=4)) for number in range(5)]
        futures.append(owner.submit(batch("big", rows=25)))
        gate.opened.set()
        for future in futures:
            future.result()
        sizes = [len(entry) for entry in wal_ids(uri, "slot")]
        assert sizes == [3, 8, 8, 4, 25]


def test_coroutines_are_queued_when_they_call_and_woken_together(uri):
    async def append_many(owner: ShardOwner) -> None:
        first = [owner.submit_async(batch(f"b{number:03}")) for number in range(50)]
        assert owner.statistics().queued_appends <= 50
        await asyncio.gather(*first)

    with ShardOwner.claim(uri, "slot") as owner:
        asyncio.run(append_many(owner))
        flat = [event_id for entry in wal_ids(uri, "slot") for event_id in entry]
        assert flat == [f"b{number:03}.{row}" for number in range(50) for row in range(3)]
        assert owner.statistics().wal_entries < 50


def test_what_coroutines_append_in_one_turn_of_their_loop_is_one_entry(uri):
    async def append(owner: ShardOwner, name: str) -> None:
        await owner.submit_async(batch(f"{name}1"))
        await owner.submit_async(batch(f"{name}2"))

    async def append_all(owner: ShardOwner) -> None:
        await asyncio.gather(*(append(owner, f"c{number}-") for number in range(20)))

    with ShardOwner.claim(uri, "slot") as owner:
        asyncio.run(append_all(owner))
        assert [len(entry) for entry in wal_ids(uri, "slot")] == [60, 60]


def test_closing_and_flushing_write_what_a_loop_has_not_handed_over(uri):
    async def leave(owner: ShardOwner) -> None:
        flushed = owner.submit_async(batch("a"))
        owner.flush()
        assert [e for entry in wal_ids(uri, "slot") for e in entry][:1] == ["a.0"]
        closed = owner.submit_async(batch("b"))
        owner.close()
        await asyncio.gather(flushed, closed)

    owner = ShardOwner.claim(uri, "slot")
    asyncio.run(leave(owner))
    flat = [event_id for entry in wal_ids(uri, "slot") for event_id in entry]
    assert flat == ["a.0", "a.1", "a.2", "b.0", "b.1", "b.2"]


def test_what_a_loop_left_behind_goes_with_the_next_append(uri):
    loop = asyncio.new_event_loop()

    async def leave(owner: ShardOwner) -> None:
        owner.submit_async(batch("a"))
        loop.stop()

    with ShardOwner.claim(uri, "slot") as owner:
        task = loop.create_task(leave(owner))
        loop.run_forever()
        assert task.done()
        loop.close()
        owner.submit(batch("b")).result()
        flat = [event_id for entry in wal_ids(uri, "slot") for event_id in entry]
        assert flat == ["a.0", "a.1", "a.2", "b.0", "b.1", "b.2"]


def test_a_cancelled_append_is_written_all_the_same(uri):
    async def cancel(owner: ShardOwner, gate: Gate) -> None:
        future = owner.submit_async(batch("a"))
        await asyncio.sleep(0)  # what the loop's turn appends is handed over at its end
        assert gate.arrived.wait(60)
        future.cancel()
        gate.opened.set()
        await owner.submit_async(batch("b"))

    with ShardOwner.claim(uri, "slot") as owner:
        asyncio.run(cancel(owner, Gate(owner)))
        assert wal_ids(uri, "slot") == [["a.0", "a.1", "a.2"], ["b.0", "b.1", "b.2"]]


def test_a_loop_that_is_gone_does_not_hurt_the_writer(uri):
    async def leave(owner: ShardOwner) -> None:
        owner.submit_async(batch("a"))

    with ShardOwner.claim(uri, "slot") as owner:
        gate = Gate(owner)
        asyncio.run(leave(owner))
        gate.opened.set()
        owner.submit(batch("b")).result()
        assert sorted(stored_ids(uri)) == sorted(e.event_id for n in "ab" for e in batch(n))


def test_a_full_queue_holds_callers_back(uri):
    options = WriterOptions(queue_rows=6)
    with ShardOwner.claim(uri, "slot", options=options) as owner, ThreadPoolExecutor(1) as pool:
        gate = Gate(owner)
        owner.submit(batch("first"))
        assert gate.arrived.wait(60)
        queued = [owner.submit(batch("a")), owner.submit(batch("b"))]
        blocked = pool.submit(owner.submit, batch("c"))
        assert owner.statistics().queued_rows == 6
        assert not blocked.done()
        gate.opened.set()
        for future in (*queued, blocked.result()):
            future.result()


def test_an_append_that_no_entry_can_hold_is_refused_at_once(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        with pytest.raises(ValueTooLargeError, match="append less"):
            owner.submit([event("x")] * 200_001)
        owner.submit(batch("a")).result()


def test_one_caller_with_a_bad_value_does_not_fail_the_others(uri):
    bad = event("bad")
    object.__setattr__(bad, "step_index", "not a number")
    with ShardOwner.claim(uri, "slot") as owner:
        gate = Gate(owner)
        futures = [owner.submit(batch("first"))]
        assert gate.arrived.wait(60)
        futures.append(owner.submit(batch("a")))
        refused = owner.submit([bad])
        futures.append(owner.submit(batch("b")))
        gate.opened.set()
        with pytest.raises(InvalidEventError, match="cannot be stored"):
            refused.result()
        for future in futures:
            future.result()
        assert "bad" not in stored_ids(uri)


# -- retries ---------------------------------------------------------------------------------


def test_an_identical_retry_writes_nothing(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("a")).result()
        owner.submit(batch("a")).result()
        owner.submit([*batch("a"), event("new")]).result()
        assert wal_ids(uri, "slot") == [["a.0", "a.1", "a.2"], ["new"]]
        assert owner.statistics().duplicate_events == 6


def test_an_identical_retry_in_the_same_entry_is_written_once(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        gate = Gate(owner)
        futures = [owner.submit(batch("first"))]
        assert gate.arrived.wait(60)
        futures += [owner.submit(batch("a")) for _ in range(3)]
        gate.opened.set()
        for future in futures:
            future.result()
        assert wal_ids(uri, "slot")[1] == ["a.0", "a.1", "a.2"]


def test_other_content_under_a_known_id_is_refused_before_anything_is_written(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("a")).result()
        changed = [*batch("b"), event("a.1", item_seq=2, text="other")]
        with pytest.raises(InvalidEventError, match="other content") as refused:
            owner.submit(changed).result()
        assert (refused.value.code, refused.value.index) == ("conflicting_retry", 3)
        assert wal_ids(uri, "slot") == [["a.0", "a.1", "a.2"]]
        owner.submit(batch("b")).result()


def test_rows_that_were_flushed_are_forgotten(uri):
    with ShardOwner.claim(uri, "slot") as owner:
        owner.submit(batch("a")).result()
        assert owner.statistics().unflushed_rows == 3
        owner.flush()
        assert owner.statistics().unflushed_rows == 0
        assert owner.epoch == 2
        owner.submit(batch("b")).result()
        assert owner.statistics().unflushed_rows == 3
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    assert [table.generation for table in manifest.sstables] == [1, 2]


# -- fencing ---------------------------------------------------------------------------------


def test_fenced_writer_acknowledges_nothing(uri):
    old = ShardOwner.claim(uri, "slot")
    old.submit(batch("a")).result()
    new = ShardOwner.claim(uri, "slot")
    with pytest.raises(WriterFencedError):
        old.submit(batch("lost")).result()
    new.submit(batch("b")).result()
    with pytest.raises(WriterFencedError):
        old.submit(batch("lost too")).result()
    new.close()
    old.close()
    assert sorted(stored_ids(uri)) == sorted(e.event_id for n in "ab" for e in batch(n))


def test_fenced_writer_acknowledges_nothing_where_wal_entries_were_collected(uri):
    old = ShardOwner.claim(uri, "slot")
    old.submit(batch("a")).result()
    new = ShardOwner.claim(uri, "slot")
    for name in "bcd":
        new.submit(batch(name)).result()
    new.close()
    for position in wal_positions(uri, "slot"):
        wal_path(uri, "slot", position).unlink()
    # Lance alone accepts this put, since nothing is in its way any more
    with pytest.raises(WriterFencedError, match="another writer claimed"):
        old.submit(batch("lost")).result()
    old.close()


def test_fenced_writer_fails_what_is_queued_and_never_claims_again(uri):
    old = ShardOwner.claim(uri, "slot", options=EAGER)
    gate = Gate(old)
    futures = [old.submit(batch("first"))]
    assert gate.arrived.wait(60)
    futures += [old.submit(batch(f"b{number}")) for number in range(5)]
    new = ShardOwner.claim(uri, "slot")
    gate.opened.set()
    for future in futures:
        with pytest.raises(WriterFencedError):
            future.result()
    with pytest.raises(WriterFencedError):
        old.flush()
    with pytest.raises(WriterFencedError):
        old.reopen()
    old.close()
    new.submit(batch("b")).result()
    new.close()
    assert new.epoch == 2


def test_closing_a_writer_that_was_fenced_unnoticed_says_so(uri):
    old = ShardOwner.claim(uri, "slot")
    old.submit(batch("a")).result()
    new = ShardOwner.claim(uri, "slot")
    with pytest.raises(WriterFencedError):
        old.close()
    old.close()
    new.close()
    assert sorted(stored_ids(uri)) == [f"a.{row}" for row in range(3)]


def test_of_many_racing_claims_at_most_one_can_acknowledge(uri):
    def claim(_: int) -> ShardOwner | None:
        try:
            return ShardOwner.claim(uri, "slot")
        except WriterFencedError:
            return None

    acknowledged = []
    for turn in range(5):
        with ThreadPoolExecutor(4) as pool:
            owners = [owner for owner in pool.map(claim, range(4)) if owner]
        for number, owner in enumerate(owners):
            try:
                owner.submit(batch(f"{turn}-{number}")).result()
            except WriterFencedError:
                continue
            acknowledged.append(f"{turn}-{number}")
        for owner in owners:
            try:
                owner.close()
            except WriterFencedError:
                continue
        assert len([name for name in acknowledged if name.startswith(f"{turn}-")]) <= 1
    expected = [e.event_id for name in acknowledged for e in batch(name)]
    assert sorted(stored_ids(uri)) == sorted(expected)


def test_a_claim_that_another_one_overlapped_stops(uri, monkeypatch):
    real = claim._open_writer
    peers = []

    def after_a_peer(*arguments):
        peers.append(real(*arguments))
        return real(*arguments)

    monkeypatch.setattr(claim, "_open_writer", after_a_peer)
    # Ours is the later of the two, but neither can know: each saw the same epoch before
    with pytest.raises(WriterFencedError, match="at the same time"):
        ShardOwner.claim(uri, "slot")
    assert len(peers) == 1


def test_a_closed_writer_refuses(uri):
    owner = ShardOwner.claim(uri, "slot")
    owner.close()
    owner.close()
    with pytest.raises(InputError, match="closed"):
        owner.submit(batch("a")).result()
    with pytest.raises(InputError, match="closed"):
        owner.flush()


def test_claiming_where_no_log_is_writes_nothing(tmp_path):
    with pytest.raises(LogNotFoundError):
        ShardOwner.claim(str(tmp_path / "log.lance"), "slot")
    assert list(tmp_path.iterdir()) == []


def test_a_tail_longer_than_the_limits_is_claimed_after_a_flush(uri):
    writer = open_log(uri).mem_wal_writer(
        SHARD, max_wal_flush_interval_ms=1, max_memtable_batches=5000
    )
    for number in range(520):
        writer.put(encode_events(batch(number, rows=1)))
    owner = ShardOwner.claim(uri, "slot")
    owner.submit(batch("next")).result()
    assert len(stored_ids(uri)) == 523
    owner.close()


# -- failures of the storage -----------------------------------------------------------------


def test_a_poisoned_writer_reopens_and_puts_the_same_rows_in_order(uri):
    wal = BrokenWal(uri)
    owner = ShardOwner.claim(uri, "slot", options=EAGER, before_reopen=wal.mend)
    owner.submit(batch("a")).result()
    wal.break_it()
    futures = [owner.submit(batch(name)) for name in "bcd"]
    for future in futures:
        future.result()
    assert owner.statistics().reopens == 1
    assert owner.epoch == 3
    # Lance may have made the entry durable after all, before the same rows are put again
    flat = [event_id for entry in wal_ids(uri, "slot", 1) for event_id in entry]
    assert list(dict.fromkeys(flat)) == [e.event_id for n in "bcd" for e in batch(n)]
    owner.close()
    assert set(stored_ids(uri)) == {e.event_id for n in "abcd" for e in batch(n)}


def test_a_writer_whose_storage_stays_broken_says_poisoned_and_can_be_reopened(uri):
    wal = BrokenWal(uri)
    owner = ShardOwner.claim(uri, "slot", options=EAGER)
    owner.submit(batch("a")).result()
    wal.break_it()
    with pytest.raises(WriterPoisonedError):
        owner.submit(batch("b")).result()
    with pytest.raises(WriterPoisonedError):
        owner.submit(batch("c")).result()
    with pytest.raises(WriterPoisonedError):
        owner.reopen()
    wal.mend()
    owner.reopen()
    assert {e.event_id for e in batch("b")} <= set(stored_ids(uri))
    owner.submit(batch("b")).result()  # the retry of what is durable by now
    owner.submit(batch("d")).result()
    owner.close()
    assert set(stored_ids(uri)) == {e.event_id for n in "abd" for e in batch(n)}


def test_a_poisoned_writer_does_not_fence_whoever_claimed_meanwhile(uri):
    wal = BrokenWal(uri)
    owner = ShardOwner.claim(uri, "slot", options=EAGER)
    owner.submit(batch("a")).result()
    wal.break_it()
    with pytest.raises(WriterPoisonedError):
        owner.submit(batch("b")).result()
    wal.mend()
    peer = ShardOwner.claim(uri, "slot")
    peer.submit(batch("peer")).result()
    with pytest.raises(WriterFencedError):
        owner.reopen()
    peer.submit(batch("peer again")).result()
    peer.close()
    owner.close()
    assert_not_after_the_peer(uri, "b.0")


def test_a_writer_unsure_of_its_own_epoch_puts_nothing_after_a_peer(uri):
    wal = BrokenWal(uri)
    owner = ShardOwner.claim(uri, "slot", options=EAGER)
    owner.submit(batch("a")).result()
    wal.break_it()
    with pytest.raises(WriterPoisonedError):
        owner.submit(batch("b")).result()
    wal.mend()
    with ShardOwner.claim(uri, "slot") as peer:
        peer.submit(batch("peer")).result()
    # as if one more claim of its own had failed without telling whether it took an epoch
    owner._appender._unclear_claims += 1
    with pytest.raises(WriterFencedError, match="another writer appended"):
        owner.reopen()
    owner.close()
    assert_not_after_the_peer(uri, "b.0")


def test_a_superseded_run_does_not_reopen(uri):
    def superseded() -> None:
        raise RunSupersededError("another run took over")

    wal = BrokenWal(uri)
    owner = ShardOwner.claim(uri, "slot", options=EAGER, before_reopen=superseded)
    owner.submit(batch("a")).result()
    wal.break_it()
    with pytest.raises(RunSupersededError):
        owner.submit(batch("b")).result()
    wal.mend()
    with pytest.raises(RunSupersededError):
        owner.submit(batch("c")).result()
    owner.close()
    assert read_latest_manifest(LogStorage(uri), SHARD).writer_epoch == 1


def test_a_failed_fsync_is_not_repeated_on_the_same_entry(uri, monkeypatch):
    owner = ShardOwner.claim(uri, "slot", options=EAGER)
    owner.submit(batch("a")).result()
    real = os.fsync
    failed: list[str] = []

    def fail_once(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not failed and path.endswith(".arrow"):
            failed.append(path)
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    owner.submit(batch("b")).result()
    suspect = layout.parse_wal_name(Path(failed[0]).name)
    manifest = read_latest_manifest(LogStorage(uri), SHARD)
    # its rows stand in a later entry, and the suspect one is no part of the tail any more
    assert manifest.replay_after >= suspect
    assert wal_ids(uri, "slot", manifest.replay_after) == [["b.0", "b.1", "b.2"]]
    owner.close()


def test_a_bug_in_the_thread_reaches_the_callers(uri, monkeypatch):
    owner = ShardOwner.claim(uri, "slot")

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(owner._appender, "append", broken)
    with pytest.raises(InternalError, match="broke down"):
        owner.submit(batch("a")).result()
    with pytest.raises(InternalError, match="broke down"):
        owner.submit(batch("b")).result()
    owner.close()


@pytest.mark.parametrize("deleted", [False, True], ids=["moved", "deleted"])
def test_a_log_that_is_gone_from_its_place_takes_no_further_rows(uri: str, deleted: bool) -> None:
    owner = ShardOwner.claim(uri, "slot", options=EAGER)
    owner.submit(batch("before")).result()
    elsewhere = Path(f"{uri}-elsewhere")
    os.rename(uri, elsewhere)
    if deleted:
        shutil.rmtree(elsewhere)
    with pytest.raises(WriterPoisonedError, match="there is no log"):
        owner.submit(batch("after")).result()
    assert not os.path.exists(uri), "a put made a log that nobody reads"
    if not deleted:
        os.rename(elsewhere, uri)
        owner.reopen()
        assert set(stored_ids(uri)) == {
            e.event_id for name in ("before", "after") for e in batch(name)
        }
        owner.close()
