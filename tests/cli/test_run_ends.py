"""How ``run`` ends when it does not end well: one line, and the right exit status."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from datagen_ray.cli.main import INTERRUPTED, TERMINATED, status_of
from datagen_ray.cluster import actors, termination
from datagen_ray.cluster.messages import RunCounts
from datagen_ray.cluster.run import _report_early_end
from datagen_ray.cluster.summary import RunSummary, Silent
from datagen_ray.errors import ClusterLostError


def test_a_ray_that_does_not_start_is_tried_again_and_then_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []

    def init(**options: Any) -> None:
        tried.append(options)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(actors.ray, "init", init)
    fleet = actors.RayFleet(actors.RayOptions(cluster_cpus=1))
    with pytest.raises(ClusterLostError, match=r"did not start here in 2 attempts .*timed out"):
        fleet.open()
    assert len(tried) == 2
    fleet.close()


def test_an_interrupted_command_says_what_becomes_of_its_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("datagen_ray.cli.maintain.maintain_once", interrupted)
    monkeypatch.setattr("datagen_ray.cli.look.DatagenStore.open", interrupted)
    assert status_of(["maintain", "log.lance", "--once"]) == INTERRUPTED
    assert "interrupted; the log is whole" in capsys.readouterr().err
    assert status_of(["status", "log.lance"]) == INTERRUPTED
    assert "interrupted; nothing was written" in capsys.readouterr().err


@pytest.fixture
def sigterm() -> Any:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    termination._TERMINATED.clear()


@pytest.mark.parametrize(
    "sigint",
    [
        pytest.param(signal.default_int_handler, id="in the foreground"),
        pytest.param(signal.SIG_IGN, id="in the background"),
    ],
)
def test_sigterm_ends_a_run_as_an_interrupt_does(
    sigterm: None,
    sigint: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    signal.signal(signal.SIGINT, sigint)
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    def run(*_: object, **__: object) -> None:
        taken = termination.SigtermAsInterrupt()
        taken.take()
        try:
            asyncio.run(work())
        finally:
            taken.close()

    monkeypatch.setattr("datagen_ray.cli.look.DatagenStore.open", run)
    assert status_of(["status", "log.lance"]) == TERMINATED
    assert "ended by SIGTERM" in capsys.readouterr().err
    assert cleaned == ["yes"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_program_itself_stays(sigterm: None) -> None:
    def own(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    taken = termination.SigtermAsInterrupt()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    taken.take()
    assert signal.getsignal(signal.SIGTERM) is own


class _Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_run_that_ended_early_says_so_and_counts_all_rows() -> None:
    counts = RunCounts(roots_total=400, fresh=137, completed=134, failed=3)
    notes = _Notes()
    _report_early_end(notes, counts, 2)
    assert len(notes.said) == 1
    assert "3 root(s) failed, and max_failures is 2; 263 of 400 roots" in notes.said[0]
    summary = RunSummary.of(counts, run_id="r", log_uri="l", elapsed_s=1.0)
    assert summary.roots_total == 400


def test_a_run_whose_last_roots_failed_did_not_end_early() -> None:
    notes = _Notes()
    _report_early_end(notes, RunCounts(roots_total=3, fresh=3, failed=3), 2)
    _report_early_end(notes, RunCounts(roots_total=3, fresh=3, failed=3), None)
    assert notes.said == []
