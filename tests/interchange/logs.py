"""A log with everything in it, written by us or by the reference, and both sides' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lance_context

from datagen_ray import (
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenItemId,
    DatagenStepKind,
    DatagenStore,
    DatagenStreamPosition,
    DatagenStreamWriter,
    DatagenValue,
)
from tests.conformance.golden import same

ROOTS = [str(DatagenItemId.from_source_key(key)) for key in ("5", "a/b:0", "naïve 鍵")]
NEVER = "never"


def place(name: str, kind: DatagenStepKind, index: int, **more: str) -> DatagenStreamPosition:
    return DatagenStreamPosition(name, kind, index, **more)


FRAME = place("main", DatagenStepKind.SEQUENCE, 0)
DRAFT = place("draft", DatagenStepKind.LEAF, 0, enclosing_step="main")
FANNED = place("solve_twice", DatagenStepKind.MAP_REDUCE, 1, enclosing_step="main")
CHOSEN = place("polish", DatagenStepKind.LEAF, 2, enclosing_step="main", selector_step="pick")


def updates(number: int) -> list[DatagenFieldUpdate]:
    """One field of each kind at values that both sides can hold, and two that are appended."""
    values: dict[str, Any] = {
        "int": [2**63 - 1, -(2**63), 0][number % 3],
        "float": [0.1, -0.0, 1e300][number % 3],
        "bool": number % 2 == 0,
        "str": ["", "é\0\U0001f600", "x" * 3000][number % 3],
        "json": {"b": [1, 2.5, None, "ü"], "a": {"n": number}},
        "blob": bytes(range(256)) * number,
    }
    fields = [
        DatagenFieldUpdate(name, "set", DatagenValue.of(value), f"{name}@codec", number)
        for name, value in values.items()
    ]
    for name in ("log", "parts"):
        for part in range(2):
            value: Any = f"{number}.{part}" if name == "log" else b"%d.%d" % (number, part)
            fields.append(DatagenFieldUpdate(name, "append", DatagenValue.of(value), "t"))
    return fields


Append = Callable[[Sequence[DatagenEvent]], None]
Open = Callable[[str], DatagenStreamWriter]


def first_half(number: int, root: str, open_stream: Open, append: Append) -> None:
    """An item that was stopped in the middle of its frame, with sub-items and a failure."""
    writer = open_stream(root)
    append([writer.step_started(FRAME)])
    append(writer.step_completed(DRAFT, updates(number)))
    for branch in range(2):
        child = open_stream(str(DatagenItemId.parse(root).child("solve_twice", branch)))
        append(child.step_completed(DRAFT, updates(number + branch)))
        if branch:
            append([child.item_failed(DRAFT, "ValueError", error_dump="d", traceback="t")])
        append([child.item_terminal("completed")])
    append([writer.item_failed(FANNED, "TimeoutError")])


def second_half(number: int, writer: DatagenStreamWriter, append: Append) -> None:
    """The rest of it, by whoever resumes it: the first two end, the last stays running."""
    append(writer.step_completed(FANNED, updates(number + 1)))
    append(writer.step_completed(CHOSEN))
    if number < 2:
        append(writer.step_completed(FRAME))
        append([writer.item_terminal("filtered" if number == 1 else "completed")])


def every_item(roots: Iterable[str] = ROOTS) -> list[str]:
    return [item for root in roots for item in (root, *(f"{root}/solve_twice:{n}" for n in (0, 1)))]


def assert_same_answers(uri: str) -> int:
    """Both programs read the log; every answer is the same. Gives the number of answers.

    The reference takes some milliseconds a read for each append that was ever made.
    """
    theirs = lance_context.DatagenStore.open(uri)
    count = 0

    def compare(what: str, expected: Any, found: Any) -> None:
        nonlocal count
        count += 1
        assert same(expected, found), f"{what}: theirs {expected!r}, ours {found!r}"

    with DatagenStore.open(uri, read_only=True) as ours:
        for item_id in [*every_item(), NEVER]:
            folded = ours.fold_item(item_id).folded()
            compare(
                f"fold_item {item_id}",
                theirs.fold_item(item_id),
                None if folded is None else folded.to_dict(),
            )
            loaded = ours.fold_item(item_id, load_blobs=True).folded()
            compare(
                f"fold_item {item_id} with blobs",
                theirs.fold_item(item_id, load_blobs=True),
                None if loaded is None else loaded.to_dict(),
            )
            events = ours.events_for_item(item_id)
            compare(
                f"item_events {item_id}",
                theirs.item_events(item_id),
                [event.to_dict() for event in events],
            )
            compare(
                f"item_failures {item_id}",
                theirs.item_failures(item_id),
                [failure.to_dict() for failure in ours.item_failures(item_id)],
            )
            for event in events:
                if event.value is not None and event.value.kind == "blob":
                    blob = ours.get_blob(event.event_id)
                    assert blob is not None
                    compare(f"get_blob {event.event_id}", theirs.get_blob(event.event_id), blob)
        for root in [*ROOTS, NEVER]:
            compare(
                f"root_events {root}",
                theirs.root_events(root),
                [event.to_dict() for event in ours.events_for_root(root)],
            )
            compare(f"item_tree {root}", theirs.item_tree(root), ours.item_tree(root).to_dict())
        ids = [*every_item(), NEVER]
        compare(
            "root_item_statuses",
            theirs.root_item_statuses(ids),
            ours.root_item_statuses(ids).to_dict(),
        )
        compare("overview", theirs.overview(), ours.overview().to_dict())
        assert ours.verify(blobs=True).is_clean
    return count
