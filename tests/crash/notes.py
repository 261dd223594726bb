"""What worker processes do, written down outside the log: steps run, rows asked for, answers got.

One line a note, in one file, in the order of the writes. A step notes that it runs; every append
of the process is noted when it is asked for, and once more when its answer is known, before
anything else can follow from that answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.context import StepContext
from datagen_ray.store.store import DatagenStore

NOTES_VARIABLE = "DATAGEN_RAY_TEST_NOTES_FILE"

RAN = "ran"
ASKED = "asked"
ACKNOWLEDGED = "acknowledged"

Key = tuple[str, str, int]


@dataclass(frozen=True)
class Note:
    """``kind`` is one of the above, or the error that answered an append. Times are monotonic."""

    kind: str
    pid: int
    at_s: float
    item_id: str
    event_type: str | None = None
    step_name: str | None = None
    step_index: int | None = None
    event_id: str | None = None
    writer_epoch: str | None = None

    @property
    def key(self) -> Key:
        assert self.step_name is not None
        assert self.step_index is not None
        return self.item_id, self.step_name, self.step_index

    @property
    def is_checkpoint(self) -> bool:
        return self.event_type == "STEP_COMPLETED"


def note_run(ctx: StepContext) -> None:
    """A step runs. From the first one on, the appends of the process are noted, too."""
    if NOTES_VARIABLE not in os.environ:
        return
    _watch_appends()
    _write([_note(RAN, ctx.item_id, None, ctx.position.step_name, ctx.position.step_index)])


def read_notes(path: Path) -> list[Note]:
    return [Note(**json.loads(line)) for line in path.read_text().splitlines()]


def checkpoints_of(notes: Sequence[Note], pid: int, kind: str = ACKNOWLEDGED) -> int:
    return sum(each.pid == pid and each.kind == kind and each.is_checkpoint for each in notes)


def _watch_appends() -> None:
    plain = DatagenStore.append_async
    if getattr(plain, "is_noting", False):
        return

    def append_async(store: DatagenStore, events: Iterable[DatagenEvent]) -> asyncio.Future[None]:
        listed = list(events)
        _write(_of(ASKED, listed))
        durable = plain(store, listed)

        def answered(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                error = done.exception()
                _write(_of(ACKNOWLEDGED if error is None else type(error).__name__, listed))

        durable.add_done_callback(answered)
        return durable

    append_async.is_noting = True  # type: ignore[attr-defined]
    DatagenStore.append_async = append_async  # type: ignore[method-assign]


def _of(kind: str, events: Sequence[DatagenEvent]) -> list[Note]:
    return [
        _note(
            kind, each.item_id, each.event_type.value, each.step_name, each.step_index,
            each.event_id, each.writer_epoch,
        )
        for each in events
    ]  # fmt: skip


def _note(kind: str, item_id: str, *rest: str | int | None) -> Note:
    return Note(kind, os.getpid(), time.monotonic(), item_id, *rest)  # type: ignore[arg-type]


def _write(notes: Sequence[Note]) -> None:
    lines = "".join(f"{json.dumps(asdict(each))}\n" for each in notes)
    # One write to a file opened so is whole, and comes after all before it.
    file = os.open(os.environ[NOTES_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, lines.encode())
    finally:
        os.close(file)
