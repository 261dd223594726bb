"""How a run shows that it goes on: a bar on a terminal, plain lines elsewhere.

All of it goes to standard error; standard output is for results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from datagen_ray.cluster.messages import RunCounts
from datagen_ray.cluster.summary import RunSummary

PLAIN_EVERY_S = 5.0


class RunDisplay:
    """Shows the progress of one run. Use it as a context manager."""

    def __init__(self, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._bar: Progress | None = None
        self._last_line = monotonic()
        self._first: str | None = None
        self._begun = False
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rest]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, rest="")

    def __enter__(self) -> RunDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, text: str) -> None:
        """On a terminal at once; elsewhere the first one waits for something that follows it.

        So a run that is refused says why in a single line.
        """
        if self._bar is None and not self._begun:
            self._begun = True
            self._first = text
        elif self._bar is None:
            self._print(text)
        else:
            self._bar.update(self._task, description=text)

    def note(self, text: str) -> None:
        self._print(text)

    def counts(self, counts: RunCounts) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                description="running",
                completed=counts.ended,
                total=counts.roots_total,
                rest=_rest(counts),
            )
        elif self._monotonic() - self._last_line >= PLAIN_EVERY_S:
            self._last_line = self._monotonic()
            self._print(f"{counts.ended} of {counts.roots_total} roots: {_rest(counts)}")

    def _print(self, text: str) -> None:
        self._begun = True
        if self._first is not None:
            first, self._first = self._first, None
            self._print(first)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rest(counts: RunCounts) -> str:
    text = (
        f"{counts.completed} completed, {counts.filtered} filtered, {counts.skipped} skipped, "
        f"{counts.steps_executed} steps"
    )
    return f"{text}, {counts.failed} failed" if counts.failed else text


def summary_lines(summary: RunSummary) -> list[str]:
    """The summary for people."""
    began = f"{summary.skipped} skipped, {summary.resumed} resumed, {summary.fresh} fresh"
    ended = f"{summary.completed} completed, {summary.filtered} filtered, {summary.failed} failed"
    lines = [
        f"run     {summary.run_id}",
        f"log     {summary.log_uri}",
        f"roots   {summary.roots_total} total: {began}",
        f"ended   {ended}",
        f"steps   {summary.steps_executed} executed, {summary.checkpoints} checkpoints written",
        f"time    {summary.elapsed_s:.1f} s",
    ]
    if summary.roots_total and summary.skipped == summary.roots_total:
        lines.append("all roots had ended before; nothing was left to run")
    return lines
