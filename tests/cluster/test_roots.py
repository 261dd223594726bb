from __future__ import annotations

from collections.abc import Iterator

from datagen_ray.cluster.messages import Mode, Outcome, OutcomeStatus
from datagen_ray.cluster.roots import Roots, SourceReader
from datagen_ray.sources import SourceRow


class Log:
    """What a log knows, said by hand."""

    def __init__(self, terminal: set[str] = frozenset(), running: tuple[str, ...] = ()) -> None:  # type: ignore[assignment]
        self._terminal = terminal
        self._running = running

    def is_terminated(self, root_id: str) -> bool:
        return root_id in self._terminal

    def known(self, root_id: str) -> bool:
        return root_id in self._terminal or root_id in self._running

    def running(self) -> Iterator[str]:
        return iter(self._running)


def _reader(ids: str, log: Log) -> SourceReader:
    return SourceReader((SourceRow(each, {"key": each}) for each in ids), log)


def _filled(count: int, slot: str = "w", **limits: int) -> tuple[Roots, list[str]]:
    ids = [f"r{number}" for number in range(count)]
    roots = Roots(max_root_retries=limits.pop("max_root_retries", 2), **limits)
    reader = SourceReader((SourceRow(each, {}) for each in ids), Log())
    while not roots.exhausted:
        roots.take_classified(slot, reader.read(count))
    return roots, ids


def _failed(root_id: str, **more: bool) -> Outcome:
    return Outcome(root_id, OutcomeStatus.FAILED, error="ValueError: no", **more)


def test_roots_are_skipped_resumed_or_fresh_by_what_the_log_knows() -> None:
    roots = Roots(max_root_retries=0)
    reader = _reader("abcd", Log({"a", "c"}, ("b",)))
    taken = []
    while not roots.exhausted:
        taken += roots.take_classified("w", reader.read(10))
    assert [(each.root_id, each.mode) for each in taken] == [("b", Mode.RESUME), ("d", Mode.FRESH)]
    assert (roots.counts.skipped, roots.counts.resumed, roots.counts.fresh) == (2, 1, 1)


def test_running_roots_that_left_the_source_are_resumed_without_inputs() -> None:
    roots = Roots(max_root_retries=0)
    reader = _reader("a", Log(set(), ("a", "gone")))
    taken = []
    while not roots.exhausted:
        taken += roots.take_classified("w", reader.read(1))
    assert [(each.root_id, each.inputs) for each in taken] == [("a", {"key": "a"}), ("gone", None)]
    assert roots.counts.resumed == 2
    assert roots.counts.roots_total == 2


def test_a_read_hands_out_no_more_than_was_asked_for() -> None:
    reader = _reader("abcde", Log())
    assert [len(reader.read(2).assignments) for _ in range(3)] == [2, 2, 1]
    assert reader.read(2).exhausted


def test_a_failed_root_is_resumed_up_to_the_limit_and_then_counted() -> None:
    roots, (only,) = _filled(1, max_root_retries=2)
    for _ in range(2):
        roots.settle("w", _failed(only))
        (again,) = roots.take_again("w", 10)
        assert again.mode is Mode.RESUME
    roots.settle("w", _failed(only))
    assert roots.done
    assert roots.counts.failed == 1
    assert roots.counts.failures[0].error == "ValueError: no"


def test_what_a_retry_cannot_help_fails_at_once() -> None:
    roots, (only,) = _filled(1)
    roots.settle("w", _failed(only, can_retry=False))
    assert roots.done
    assert roots.counts.failed == 1


def test_an_outcome_that_comes_twice_counts_once() -> None:
    roots, (only,) = _filled(1)
    for _ in range(2):
        roots.settle("w", Outcome(only, OutcomeStatus.COMPLETED, 3, 4))
    assert (roots.counts.completed, roots.counts.steps_executed, roots.counts.checkpoints) == (
        1,
        3,
        4,
    )


def test_the_hand_of_a_lost_slot_goes_to_others_as_resume() -> None:
    roots, ids = _filled(3)
    roots.settle("w", Outcome(ids[0], OutcomeStatus.COMPLETED))
    assert roots.lost("w", unclean=True, began=1) == 2
    assert not roots.done
    taken = roots.take_again("other", 10)
    assert [(each.root_id, each.mode) for each in taken] == [
        (ids[1], Mode.RESUME),
        (ids[2], Mode.RESUME),
    ]
    roots.settle("w", Outcome(ids[1], OutcomeStatus.COMPLETED))
    assert roots.counts.completed == 1, "the lost slot has no say in it any more"


def test_a_root_that_runs_at_two_deaths_is_run_alone_and_buried_after_the_third() -> None:
    roots, (poison, other) = _filled(2)
    roots.lost("w", unclean=True, began=1)
    taken = {each.root_id: each for each in roots.take_again("w", 10)}
    assert set(taken) == {poison, other}
    roots.lost("w", unclean=True, began=1)
    assert [each.root_id for each in roots.take_again("w", 10)] == [other]
    assert roots.alone_waiting
    (alone,) = roots.take_alone("x")
    assert (alone.root_id, alone.mode) == (poison, Mode.RESUME)
    roots.lost("x", unclean=True, began=1)
    (buried,) = roots.take_again("w", 10)
    assert (buried.root_id, buried.mode) == (poison, Mode.BURY)


def test_a_slot_that_drained_accuses_nobody() -> None:
    roots, _ = _filled(1)
    for _ in range(5):
        roots.lost("w", unclean=False, began=1)
        assert len(roots.take_again("w", 1)) == 1
    assert not roots.alone_waiting


def test_too_many_failures_end_the_run_with_what_is_in_hand() -> None:
    roots, ids = _filled(3, max_failures=0, max_root_retries=0)
    roots.settle("w", _failed(ids[0]))
    assert roots.exhausted
    assert not roots.done
    roots.settle("w", Outcome(ids[1], OutcomeStatus.FILTERED))
    roots.settle("w", Outcome(ids[2], OutcomeStatus.COMPLETED))
    assert roots.done
