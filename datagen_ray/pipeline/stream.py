"""One stream: its recorded rows, its fields, its writer, and what befalls it.

What user code returns or raises becomes rows here. Where in the pipeline the stream stands is not
known here, but by its walk.
"""

from __future__ import annotations

from typing import Any, NoReturn

from datagen_ray.errors import InputError
from datagen_ray.log.events import DatagenEvent, DatagenItemStatus, DatagenStreamPosition
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.pipeline.calls import MakeContext, noted_retries
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.emitter import Emitter, Tally
from datagen_ray.pipeline.endings import (
    NOT_THE_ITEMS_FAULT,
    Ending,
    OwnTrouble,
    StreamFailed,
    StreamFiltered,
)
from datagen_ray.pipeline.environment import Environment
from datagen_ray.pipeline.failures import FailureDetails, describe_failure, text_of
from datagen_ray.pipeline.fields import merged, result_updates
from datagen_ray.pipeline.item import Cell, Item
from datagen_ray.pipeline.nodes import OnFailure
from datagen_ray.pipeline.places import Place
from datagen_ray.pipeline.replay import Cursor, RecordedStream
from datagen_ray.pipeline.results import Filtered
from datagen_ray.pipeline.steps import Node


class Stream:
    """The stream of one item."""

    def __init__(
        self,
        env: Environment,
        tally: Tally,
        *,
        place: Place,
        body: Node,
        writer: DatagenStreamWriter,
        recorded: RecordedStream | None,
        cells: dict[str, Cell],
        parent: Item | None = None,
        on_failure: OnFailure = "fail",
    ) -> None:
        self.env = env
        self.tally = tally
        self.body = body
        self.writer = writer
        self.cursor = Cursor(recorded)
        self.place = place
        self.emitter = Emitter(env.sink, tally, place)
        self.next_sub_item: dict[str, int] = {}
        self._cells = cells
        self._parent = parent
        self._on_failure = on_failure

    @property
    def item_id(self) -> str:
        return self.writer.item_id

    def own_item(self) -> Item:
        """The fields that this stream set itself."""
        return Item(self._cells, self.env.reader)

    async def item(self) -> Item:
        """The fields as user code sees them now."""
        item = Item(self._cells, self.env.reader, self._parent)
        if self.env.reader.types.has_blob_codecs:
            await item.load_bytes()
        return item

    # -- user code --------------------------------------------------------------------------

    async def inline(self, function: Any, position: DatagenStreamPosition, *more: Any) -> Any:
        """A predicate, key or loop test at ``position``."""
        await self.emitter.settle()
        item = await self.item_or_fail(position)
        self.env.observe("choice", self.item_id, position)
        try:
            ctx = self.contexts(position)(0)
            return await self.env.code.call_inline(function, item, ctx, *more)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            self.raise_from_user(position, error)

    async def decide(self, function: Any, position: DatagenStreamPosition, *more: Any) -> bool:
        """As :meth:`inline`, for a yes or no; an array, say, is neither."""
        answer = await self.inline(function, position, *more)
        try:
            return bool(answer)
        except Exception as error:  # noqa: BLE001 - a user's __bool__ may raise anything
            self.raise_from_user(position, error)

    async def item_or_fail(self, position: DatagenStreamPosition) -> Item:
        """The item for user code at ``position``."""
        if not self.env.reader.types.has_blob_codecs:
            return Item(self._cells, self.env.reader, self._parent)
        try:
            return await self.item()
        except (InputError, OwnTrouble) as error:
            self.raise_from_user(position, error)

    def contexts(self, position: DatagenStreamPosition) -> MakeContext:
        """Makes the ``ctx`` of each call of user code at ``position``."""

        def make(retry: int) -> StepContext:
            return StepContext(
                item_id=self.writer.item_id,
                root_id=self.writer.item_id.partition("/")[0],
                attempt=self.writer.attempt,
                retry=retry,
                position=position,
                run_id=self.env.run_id,
                pipeline=self.env.pipeline.name,
                base_seed=self.env.base_seed,
            )

        return make

    def raise_from_user(self, position: DatagenStreamPosition, error: Exception) -> NoReturn:
        """What an exception means for the stream."""
        if isinstance(error, OwnTrouble) and error.__cause__ is not None:
            raise error.__cause__
        if isinstance(error, NOT_THE_ITEMS_FAULT):
            raise error
        if isinstance(error, Filtered):
            raise StreamFiltered(position, text_of(error.reason or error)) from error
        details = describe_failure(error, noted_retries(error), self.env.redact)
        raise StreamFailed(position, details) from error

    def raise_failed_below(
        self, position: DatagenStreamPosition, details: FailureDetails
    ) -> NoReturn:
        """A sub-item failed, and its own stream says so."""
        raise StreamFailed(position, details, recorded=True)

    # -- writing ----------------------------------------------------------------------------

    async def complete(self, position: DatagenStreamPosition, result: Any) -> None:
        """Write a step's fields and its STEP_COMPLETED, to be durable before anything else runs."""
        try:
            updates = await result_updates(self.env.reader, position.step_name, result)
        except Exception as error:  # noqa: BLE001 - a user's mapping may raise anything
            self.raise_from_user(position, error)
        try:
            events = self.writer.step_completed(position, updates)
            self.emitter.emit(events)
        except InputError as error:
            self.raise_from_user(position, error)
        self._cells = merged(self._cells, events)

    def end(self, status: DatagenItemStatus, **columns: Any) -> Ending:
        """Hand over TERMINAL."""
        terminal = self.writer.item_terminal(status, **columns)
        self.emitter.emit([terminal], checkpoint=False)
        return Ending(terminal, None)

    def fail(self, failure: StreamFailed) -> Ending:
        """Hand over what a failure means: FAILED unless a sub-item has it, an end by policy."""
        details = failure.details
        events: list[DatagenEvent] = []
        if not failure.recorded:
            events.append(
                self.writer.item_failed(
                    failure.position,
                    details.error_type,
                    error_dump=details.error_dump,
                    traceback=details.traceback,
                )
            )
            self.tally.failures += 1
        terminal: DatagenEvent | None = None
        if self._on_failure != "fail":
            # One append with the FAILED row: alone, the one would be run again and the other
            # would be a filter without a reason.
            terminal = self.writer.item_terminal(
                DatagenItemStatus.FILTERED
                if self._on_failure == "drop"
                else DatagenItemStatus.COMPLETED,
                position=failure.position,
                error_type=details.error_type,
                error_dump=details.error_dump,
            )
            events.append(terminal)
        if events:
            self.emitter.emit(events, checkpoint=False)
        return Ending(terminal, details)
