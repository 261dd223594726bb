"""A log in a list, and what the tests of this layer ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from datagen_ray.log.events import DatagenEvent, DatagenEventType
from datagen_ray.log.fold import FoldedDatagenItem, fold_datagen_events
from datagen_ray.log.validate import validate_append
from datagen_ray.pipeline.executor import Executor, RootResult, RootTask
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.testing import CrashingSink


class ListLog:
    """What is durable, and the blobs in it."""

    def __init__(self) -> None:
        self.batches: list[list[DatagenEvent]] = []

    @property
    def events(self) -> list[DatagenEvent]:
        return [event for batch in self.batches for event in batch]

    def history(self, root_id: str = "5") -> list[DatagenEvent]:
        """As a store gives it: in order, blobs without their bytes."""
        found = [
            event if event.value is None else _without_blob(event)
            for event in self.events
            if event.root_item_id == root_id
        ]
        return sorted(found, key=lambda event: (event.item_id, event.item_seq, event.event_id))

    async def load(self, event_id: str) -> bytes:
        for event in self.events:
            if event.event_id == event_id and event.value is not None:
                data = event.value.raw.bytes  # type: ignore[union-attr]
                assert isinstance(data, bytes)
                return data
        raise AssertionError(f"no blob {event_id}")

    def folded(self, item_id: str = "5") -> FoldedDatagenItem:
        folded = fold_datagen_events(e for e in self.events if e.item_id == item_id)
        assert folded is not None
        return folded

    def fields(self, item_id: str = "5") -> dict[str, Any]:
        return {
            name: [v.value for v in kept.values] if kept.mode == "append" else kept.value.value
            for name, kept in self.folded(item_id).fields.items()
        }


def _without_blob(event: DatagenEvent) -> DatagenEvent:
    from dataclasses import replace

    assert event.value is not None
    return replace(event, value=event.value.lazy())


class _Memory:
    """Takes every batch, and acknowledges it a moment later, as a real writer does."""

    def __init__(self, log: ListLog, epoch: int) -> None:
        self.log = log
        self.writer_epoch = f"slot-0:{epoch}"

    def append_async(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        checked = validate_append(events)
        assert checked, "an empty batch was appended"
        self.log.batches.append(checked)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(_acknowledge, future)
        return future


class ListSink(CrashingSink):
    """Takes ``limit`` batches, then behaves as a writer that was fenced."""

    def __init__(
        self,
        log: ListLog,
        *,
        epoch: int = 1,
        limit: int | None = None,
        last_is_durable: bool = False,
    ) -> None:
        super().__init__(
            _Memory(log, epoch),
            crash_at=None if limit is None else limit + 1,
            last_is_durable=last_is_durable,
        )


def _acknowledge(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def run_once(
    pipeline: Pipeline,
    log: ListLog,
    inputs: dict[str, Any] | None,
    *,
    sink: ListSink | None = None,
    root_id: str = "5",
    **options: Any,
) -> RootResult:
    """One run of one root on what the log has of it."""
    options.setdefault("exhausted_after", None)
    executor = Executor(pipeline, sink or ListSink(log), run_id="run", blobs=log, **options)
    await executor.start()
    try:
        return await executor.run(RootTask(root_id, inputs, log.history(root_id)))
    finally:
        await executor.close()


def run(
    pipeline: Pipeline, inputs: dict[str, Any] | None = None, **options: Any
) -> tuple[RootResult, ListLog]:
    """A fresh root in a new log."""
    log = ListLog()
    result = asyncio.run(run_once(pipeline, log, {} if inputs is None else inputs, **options))
    return result, log


def rerun(pipeline: Pipeline, log: ListLog, **options: Any) -> RootResult:
    return asyncio.run(run_once(pipeline, log, None, **options))


def rows(log: ListLog, item_id: str = "5", *, births: bool = False) -> list[str]:
    """One item's rows as short texts, by ``item_seq``; births are left out unless asked for."""
    events = sorted((e for e in log.events if e.item_id == item_id), key=lambda e: e.item_seq)
    texts = [_row(event) for event in events]
    if not births:
        end = next(i for i, e in enumerate(events) if e.step_name == "input" and _completes(e))
        texts = texts[end + 1 :]
    return texts


def _completes(event: DatagenEvent) -> bool:
    return event.event_type is DatagenEventType.STEP_COMPLETED


def _row(event: DatagenEvent) -> str:
    text = str(event.event_type)
    if event.field_name is not None:
        text += f" {event.field_name}"
    if event.position is not None:
        text += f" {event.position}"
    if event.status is not None and event.event_type is DatagenEventType.TERMINAL:
        text += f" = {event.status}"
    return text


def durable_completions(events: Iterable[DatagenEvent]) -> set[tuple[str, str]]:
    return {(e.item_id, str(e.position)) for e in events if _completes(e)}
