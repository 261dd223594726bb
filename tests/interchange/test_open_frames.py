"""The reference's answer to where an interrupted item stands, beside where it really stood.

The stack of frames is kept while the pipeline runs, by the entering and leaving of frames, and
remembered with each batch that reaches the log. The reference knows the log only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lance_context
import pytest

from datagen_ray import testing
from datagen_ray.log.events import DatagenEvent, DatagenStreamPosition
from datagen_ray.pipeline.walk import StreamWalk
from datagen_ray.store.store import DatagenStore
from tests.pipeline.random_pipelines import Maker, World

SEEDS = range(1, 11)
TRIALS = 2


class Frames:
    """The open frames of every item, as of its last batch in the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: dict[str, list[DatagenStreamPosition]] = defaultdict(list)
        self.durable: dict[str, list[DatagenStreamPosition]] = {}
        enter, leave, append = StreamWalk._open, StreamWalk._close, DatagenStore.append_async

        def open_(walk: StreamWalk, position: DatagenStreamPosition) -> None:
            self.now[walk.item_id].append(position)
            enter(walk, position)

        def close(walk: StreamWalk, position: DatagenStreamPosition) -> None:
            assert self.now[walk.item_id].pop() == position
            leave(walk, position)

        def append_async(store: DatagenStore, events: Sequence[DatagenEvent]) -> Any:
            for item_id in {event.item_id for event in events}:
                self.durable[item_id] = list(self.now[item_id])
            return append(store, events)

        monkeypatch.setattr(StreamWalk, "_open", open_)
        monkeypatch.setattr(StreamWalk, "_close", close)
        monkeypatch.setattr(DatagenStore, "append_async", append_async)


def positions(listed: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(sorted(position.items(), key=str)) for position in listed}


@pytest.mark.slow
def test_started_minus_completed_is_the_real_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = Frames(monkeypatch)
    assert sum(open_frames_compared(seed, frames) for seed in SEEDS) > 20


def open_frames_compared(seed: int, frames: Frames) -> int:
    """Crash a random pipeline again and again; how many open frames both sides agreed upon."""
    rng = random.Random(seed)
    world = World(seed, randomness=0.2 if seed % 2 else 0.0)
    pipeline = Maker(seed, lambda: world).pipeline()
    open_found = 0
    frames.durable.clear()
    with testing.TrialLog() as log:
        for _ in range(TRIALS):
            frames.now.clear()
            log.run(
                pipeline,
                [{"q": 3}],
                crash_at=rng.randint(2, 30),
                last_is_durable=rng.random() < 0.5,
            )
            theirs = lance_context.DatagenStore.open(log.uri)
            for item_id, stack in frames.durable.items():
                folded = theirs.fold_item(item_id)
                left_open = positions(folded["started"]) - positions(folded["completed"])
                real = positions([position.to_dict() for position in stack])
                assert left_open == real, f"seed {seed}: {item_id}"
                open_found += len(stack)
    return open_found
