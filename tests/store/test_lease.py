from __future__ import annotations

import threading
from pathlib import Path

import pytest

from datagen_ray.errors import ConfigError, LeaseLostError, StorageError
from datagen_ray.store import layout
from datagen_ray.store.lease import MaintenanceLease
from datagen_ray.store.storage import LogStorage

LEASE_S = 10.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return layout.log_uri(str(tmp_path), "pipeline", "experiment")


def lease(uri: str, holder: str, clock: FakeClock | None = None) -> MaintenanceLease:
    return MaintenanceLease(uri, holder, lease_s=LEASE_S, monotonic=clock or FakeClock())


def lease_path(uri: str, term: int) -> Path:
    return Path(layout.experiment_of(uri)) / layout.lease_key(term)


def test_the_first_to_come_holds_the_lease_and_the_second_waits(uri):
    first, second = lease(uri, "first"), lease(uri, "second")
    assert first.try_acquire()
    assert first.try_acquire(), "holding it already is holding it"
    assert not second.try_acquire()
    assert (first.term, second.term) == (1, None)
    first.check_still_leader()
    with pytest.raises(LeaseLostError, match="second does not hold"):
        second.check_still_leader()


def test_a_holder_that_counts_on_is_never_replaced(uri):
    clock = FakeClock()
    holder, candidate = lease(uri, "holder"), lease(uri, "candidate", clock)
    assert holder.try_acquire()
    for _ in range(20):
        assert not candidate.try_acquire()
        clock.now += LEASE_S - 0.1
        holder.renew()
    holder.check_still_leader()


def test_a_counter_that_stands_still_for_the_lease_time_loses_the_lease(uri):
    clock = FakeClock()
    holder, candidate = lease(uri, "holder"), lease(uri, "candidate", clock)
    holder.try_acquire()
    assert not candidate.try_acquire()
    clock.now += LEASE_S - 0.1
    assert not candidate.try_acquire()
    clock.now += 0.1
    assert candidate.try_acquire()
    assert candidate.term == 2
    for call in (holder.check_still_leader, holder.renew):
        with pytest.raises(LeaseLostError):
            call()
    candidate.check_still_leader()


def test_the_replaced_holder_is_told_by_whom(uri):
    clock = FakeClock()
    holder, candidate = lease(uri, "holder"), lease(uri, "candidate", clock)
    holder.try_acquire()
    candidate.try_acquire()
    clock.now += LEASE_S
    candidate.try_acquire()
    with pytest.raises(LeaseLostError, match="candidate was elected"):
        holder.check_still_leader()


def test_what_was_seen_before_a_new_term_began_does_not_count_against_it(uri):
    clock = FakeClock()
    first, slow = lease(uri, "first"), lease(uri, "slow", clock)
    first.try_acquire()
    assert not slow.try_acquire()
    clock.now += LEASE_S - 1
    first.release()
    second = lease(uri, "second")
    assert second.try_acquire()
    clock.now += 1
    assert not slow.try_acquire(), "the lease time starts anew with the new term"


def test_a_released_lease_is_free_at_once(uri):
    first, second = lease(uri, "first"), lease(uri, "second")
    first.try_acquire()
    first.release()
    first.release()
    with pytest.raises(LeaseLostError):
        first.check_still_leader()
    assert second.try_acquire()
    assert second.term == 2


def test_of_many_candidates_one_is_elected(uri):
    stopped = lease(uri, "stopped")
    stopped.try_acquire()
    stopped.release()
    candidates = [lease(uri, str(number)) for number in range(8)]
    start = threading.Barrier(len(candidates))
    elected = []

    def run(candidate: MaintenanceLease) -> None:
        start.wait()
        if candidate.try_acquire():
            elected.append(candidate)

    threads = [threading.Thread(target=run, args=(each,)) for each in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.term for each in elected] == [2]


def test_a_holder_whose_file_was_removed_steps_down(uri):
    holder = lease(uri, "holder")
    holder.try_acquire()
    lease_path(uri, 1).unlink()
    with pytest.raises(LeaseLostError, match="was removed"):
        holder.renew()
    assert not lease_path(uri, 1).exists(), "a removed lease is not brought back"


def test_an_unreadable_lease_is_taken_over_after_the_lease_time(uri):
    lease(uri, "holder").try_acquire()
    for content in (b"", b"[]", b'{"holder": "x"}'):
        lease_path(uri, 1).write_bytes(content)
    clock = FakeClock()
    candidate = lease(uri, "candidate", clock)
    assert not candidate.try_acquire()
    clock.now += LEASE_S
    assert candidate.try_acquire()


def test_a_put_whose_answer_was_lost_finds_itself(uri, monkeypatch):
    real = LogStorage.put_if_absent

    def lost(self: LogStorage, key: str, data: bytes) -> bool:
        real(self, key, data)
        return False

    monkeypatch.setattr(LogStorage, "put_if_absent", lost)
    holder = lease(uri, "holder")
    assert holder.try_acquire()
    holder.check_still_leader()


def test_a_kept_lease_is_renewed_and_then_released(uri):
    holder = MaintenanceLease(uri, "holder", lease_s=0.02)
    assert holder.try_acquire()
    renewed = threading.Event()
    renew = holder.renew

    def counted() -> None:
        renew()
        renewed.set()

    holder.renew = counted  # type: ignore[method-assign]
    with holder.kept():
        assert renewed.wait(30)
        holder.check_still_leader()
    assert b'"released": true' in lease_path(uri, 1).read_bytes()


def test_a_renewal_that_fails_is_told_at_the_next_check(uri):
    holder = MaintenanceLease(uri, "holder", lease_s=0.02)
    assert holder.try_acquire()
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise StorageError("the storage is away; try again")

    holder.renew = fail  # type: ignore[method-assign]
    with holder.kept():
        assert failed.wait(30)
        told = None
        while told is None:
            try:
                holder.check_still_leader()
            except StorageError as error:
                told = error
        assert "away" in str(told)


@pytest.mark.parametrize(("holder", "lease_s"), [("", 1.0), ("x", 0.0), ("x", -1.0)])
def test_a_lease_without_name_or_time_is_refused(uri, holder, lease_s):
    with pytest.raises(ConfigError):
        MaintenanceLease(uri, holder, lease_s=lease_s)
