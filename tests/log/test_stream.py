"""The stream writer: the events it composes, and all that it refuses."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest

from datagen_ray import (
    DatagenBlobValue,
    DatagenEvent,
    DatagenFieldUpdate,
    DatagenStepKind,
    DatagenStreamPosition,
    DatagenStreamWriter,
    DatagenValue,
    InputError,
    InvalidEventError,
    InvalidItemIdError,
    datagen_event_id,
    fold_datagen_events,
)
from datagen_ray.log.validate import validate_append, validate_checkpoint
from tests.log.builders import FRAME, LEAF, clock, created, terminal


def new_writer(item_id: str = "5", **options: Any) -> DatagenStreamWriter:
    return DatagenStreamWriter.open(item_id, run_id="r", writer_epoch="w:1", now=clock, **options)


def opened(item_id: str = "5") -> DatagenStreamWriter:
    writer = new_writer(item_id)
    writer.item_created()
    return writer


def update(name: str, value: Any, op: Any = "set", **options: Any) -> DatagenFieldUpdate:
    given = value if isinstance(value, DatagenValue) else DatagenValue.of(value)
    return DatagenFieldUpdate(name, op, given, **{"field_type": "t", **options})


def resumed(*events: DatagenEvent) -> DatagenStreamWriter:
    folded = fold_datagen_events(events)
    assert folded is not None
    return DatagenStreamWriter.resume(folded, run_id="r2", writer_epoch="w:2", now=clock)


def whole_stream(writer: DatagenStreamWriter) -> list[DatagenEvent]:
    return [
        writer.item_created(),
        writer.step_started(FRAME),
        *writer.step_completed(
            LEAF, [update("a", 1), update("b", "x", "append"), update("b", "y", "append")]
        ),
        writer.item_failed(LEAF, "ValueError", error_dump="d", traceback="t"),
        *writer.step_completed(FRAME),
        writer.item_terminal("completed"),
    ]


def test_events_are_numbered_from_one_without_gaps() -> None:
    events = whole_stream(new_writer())
    assert [event.item_seq for event in events] == list(range(1, 10))
    assert len({event.event_id for event in events}) == 9
    assert validate_append(events) == events
    folded = fold_datagen_events(events)
    assert folded is not None
    assert folded.last_item_seq == 9


def test_ids_are_those_of_the_shared_format() -> None:
    events = whole_stream(new_writer())
    step = "5\x000\0draft\x000\x001"
    assert [(event.checkpoint_id, event.event_id) for event in events] == [
        (name, datagen_event_id("5", name, ordinal))
        for name, ordinal in (
            ("5\0created", 0),
            ("5\x000\0main\x000\x000", 0),
            (step, 1),
            (step, 2),
            (step, 3),
            (step, 0),
            ("5\x000\0draft\x000\x002", 0),
            ("5\x000\0main\x000\x003", 0),
            ("5\0terminal\x009", 0),
        )
    ]


def test_neither_run_nor_epoch_nor_time_is_part_of_an_id() -> None:
    other = DatagenStreamWriter.open("5", run_id="r9", writer_epoch="w:9")
    assert [event.event_id for event in whole_stream(other)] == [
        event.event_id for event in whole_stream(new_writer())
    ]


def test_a_checkpoint_of_the_writer_passes_the_checks_of_append() -> None:
    events = opened("5/x:0").step_completed(LEAF, [update("a", b"blob"), update("b", [1])])
    assert validate_checkpoint(events) == events
    assert events[-1].root_item_id == "5"
    assert events[-1].parent_item_id == "5"


NONSENSE: tuple[Any, ...] = (
    None, "", "ok", "\0", "\ud800", "é", b"", b"x", 0, 1, -1, 2**31, 2**63, 1.5, True, False, [],
    "completed", "leaf", DatagenStepKind.LEAF, DatagenStepKind.SEQUENCE, DatagenStepKind.ROUTER,
    DatagenValue.of(1), DatagenValue.as_stored("int", "1"), DatagenValue.as_stored("date", None),
    DatagenValue.of(DatagenBlobValue(b"x", 1, "sha256:" + "0" * 64)),
    DatagenValue.of(DatagenBlobValue(None)),
)  # fmt: skip


def test_whatever_the_writer_composes_keeps_every_rule_of_append() -> None:
    """Append does not check its rows again, so calls with a wrong argument here or there."""
    seed = 20260102
    chance = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201

    def spoilt(*sound: Any) -> list[Any]:
        given = list(sound)
        if chance.random() < 0.4:
            given[chance.randrange(len(given))] = chance.choice(NONSENSE)
        return given

    def position() -> DatagenStreamPosition:
        kind = chance.choice(list(DatagenStepKind))
        return DatagenStreamPosition(*spoilt("draft", kind, 0, None, None))

    def field() -> DatagenFieldUpdate:
        op = chance.choice(["set", "append"])
        return DatagenFieldUpdate(*spoilt("f", op, DatagenValue.of("x"), "str", 1))

    def options() -> dict[str, Any]:
        names = ("run_id", "writer_epoch", "attempt", "next_item_seq")
        return dict(zip(names, spoilt("r", "w", 0, 1), strict=True))

    composed = 0
    for _ in range(10_000):
        try:
            writer = DatagenStreamWriter(*spoilt("5/x:0"), now=clock, **options())
            name = chance.choice(["created", "started", "completed", "failed", "terminal"])
            if name == "created":
                events = [writer.item_created()]
            elif name == "started":
                events = [writer.step_started(position())]
            elif name == "completed":
                events = writer.step_completed(position(), [field()])
            elif name == "failed":
                error, dump, trace = spoilt("E", "dump", "trace")
                events = [writer.item_failed(position(), error, error_dump=dump, traceback=trace)]
            else:
                status, error, dump = spoilt("filtered", "E", "dump")
                events = [
                    writer.item_terminal(
                        status, position=position(), error_type=error, error_dump=dump
                    )
                ]
        except (InputError, AttributeError, TypeError):
            continue
        composed += 1
        assert all(event.composition is not None for event in events)
        assert validate_append(events) == events
        assert validate_append([replace(event) for event in events]) == events
        if name == "completed":
            assert validate_checkpoint(events) == events
            assert validate_checkpoint([replace(event) for event in events]) == events
    assert composed > 1_000


def test_what_is_made_from_an_event_of_the_writer_is_checked_by_append() -> None:
    event = new_writer().item_created()
    for other in (replace(event), copy.copy(event), copy.deepcopy(event)):
        assert other == event
        assert getattr(other, "composition", None) is None
    with pytest.raises(InvalidEventError):
        validate_append([replace(event, item_seq=-1)])


def test_what_is_not_the_whole_of_one_checkpoint_is_looked_at() -> None:
    writer = opened()
    first = writer.step_completed(LEAF, [update("a", 1), update("b", 2)])
    second = writer.step_completed(LEAF, [update("a", 1), update("b", 2)])
    assert validate_checkpoint(first[::-1]) == first[::-1]
    assert validate_checkpoint([first[0], first[2], first[0]]) == [first[0], first[2]]
    wrong: list[list[DatagenEvent]] = [
        first[:2],
        [*first, *second],
        [first[0], first[1], second[2]],
        [first[0], first[1], first[1]],
        [writer.step_started(FRAME)],
    ]
    for events in wrong:
        with pytest.raises(InvalidEventError):
            validate_checkpoint(events)


def test_tags_that_a_writer_was_handed_are_checked_by_append() -> None:
    writer = DatagenStreamWriter(
        "5", run_id="r", writer_epoch="w", attempt=0, next_item_seq=1, now=clock,
        query_tags_json="{",
    )  # fmt: skip
    with pytest.raises(InvalidEventError) as caught:
        validate_append([writer.item_created()])
    assert caught.value.code == "bad_json"


def test_what_a_writer_was_made_with_stays_so() -> None:
    writer = new_writer()
    for name in ("item_id", "run_id", "writer_epoch", "attempt", "next_item_seq"):
        with pytest.raises(AttributeError):
            setattr(writer, name, "")


def test_tags_are_on_item_created() -> None:
    assert new_writer(query_tags={"b": 1, "a": 2}).item_created().query_tags == {"a": 2, "b": 1}
    assert new_writer().item_created().query_tags_json is None


def test_a_filter_says_which_step_and_why() -> None:
    event = opened().item_terminal("filtered", position=LEAF, error_type="Short", error_dump="n")
    assert (event.status, event.position, event.error_type) == ("filtered", LEAF, "Short")
    assert validate_append([event]) == [event]


def test_resume_goes_on_one_attempt_later() -> None:
    first = new_writer()
    events = [first.item_created(), *first.step_completed(LEAF, [update("a", 1)])]
    writer = resumed(*events)
    assert (writer.attempt, writer.next_item_seq) == (1, 4)
    more = writer.step_completed(FRAME)
    assert more[0].checkpoint_id == "5\x001\0main\x000\x000"
    assert (more[0].run_id, more[0].writer_epoch) == ("r2", "w:2")


def test_resume_of_an_ended_item_is_refused() -> None:
    with pytest.raises(InvalidEventError) as caught:
        resumed(created(), terminal(2))
    assert caught.value.code == "item_terminated"


def test_nothing_follows_a_terminal() -> None:
    writer = opened()
    writer.item_terminal("completed")
    for call in (
        lambda: writer.step_started(FRAME),
        lambda: writer.step_completed(LEAF),
        lambda: writer.item_failed(LEAF, "E"),
        lambda: writer.item_terminal("filtered"),
    ):
        with pytest.raises(InvalidEventError) as caught:
            call()
        assert caught.value.code == "item_terminated"


def test_an_item_is_created_once() -> None:
    for writer in (opened(), resumed(created())):
        with pytest.raises(InvalidEventError) as caught:
            writer.item_created()
        assert caught.value.code == "item_created_twice"


def position(**parts: Any) -> DatagenStreamPosition:
    return DatagenStreamPosition(
        **{"step_name": "s", "step_kind": DatagenStepKind.LEAF, "step_index": 0, **parts}
    )


REFUSED_STEPS: dict[str, tuple[Any, str]] = {
    "leaf started": (lambda w: w.step_started(LEAF), "step_kind_not_started"),
    "router completed": (
        lambda w: w.step_completed(position(step_kind=DatagenStepKind.ROUTER)),
        "step_kind_not_completed",
    ),
    "empty name": (lambda w: w.step_completed(position(step_name="")), "requires_step_name"),
    "NUL in name": (lambda w: w.step_completed(position(step_name="a\0")), "nul_in_id"),
    "surrogate": (lambda w: w.step_completed(position(step_name="\ud800")), "not_utf8"),
    "surrogate around": (
        lambda w: w.step_completed(position(enclosing_step="\ud800")), "not_utf8"),
    "kind as text": (lambda w: w.step_completed(position(step_kind="leaf")), "wrong_type"),
    "negative index": (lambda w: w.step_completed(position(step_index=-1)), "negative_step_index"),
    "huge index": (lambda w: w.step_completed(position(step_index=2**63)), "out_of_range"),
    "failure text": (lambda w: w.item_failed(LEAF, "\ud800"), "not_utf8"),
    "failure dump": (lambda w: w.item_failed(LEAF, "E", error_dump="\ud800"), "not_utf8"),
    "end": (lambda w: w.item_terminal("failed"), "bad_terminal"),
    "end running": (lambda w: w.item_terminal("running"), "bad_terminal"),
    "end at nowhere": (
        lambda w: w.item_terminal("filtered", position=position(step_index=-1)),
        "negative_step_index"),
    "op": (lambda w: w.step_completed(LEAF, [update("f", 1, "add")]), "bad_field_op"),
    "nameless": (lambda w: w.step_completed(LEAF, [update("", 1)]), "field_requires_name"),
    "typeless": (
        lambda w: w.step_completed(LEAF, [update("f", 1, field_type="")]), "field_requires_type"),
    "version": (
        lambda w: w.step_completed(LEAF, [update("f", 1, codec_version=2**31)]), "out_of_range"),
    "lazy blob": (
        lambda w: w.step_completed(
            LEAF, [update("f", DatagenValue.of(DatagenBlobValue(None, 1)))]),
        "blob_without_bytes"),
    "mixed at once": (
        lambda w: w.step_completed(LEAF, [update("f", 1), update("f", 1, "append")]),
        "mixed_set_append"),
    "append to a set": (
        lambda w: w.step_completed(LEAF, [update("set", 1, "append")]), "mixed_set_append"),
    "set over an append": (
        lambda w: w.step_completed(LEAF, [update("app", 1)]), "mixed_set_append"),
    "kind of a set": (
        lambda w: w.step_completed(LEAF, [update("set", 1.0)]), "field_kind_change"),
    "kind of an append": (
        lambda w: w.step_completed(LEAF, [update("app", "1", "append")]), "field_kind_change"),
    "codec of an append": (
        lambda w: w.step_completed(LEAF, [update("app", 1, "append", field_type="u")]),
        "append_codec_change"),
    "codec version of an append": (
        lambda w: w.step_completed(LEAF, [update("app", 1, "append", codec_version=2)]),
        "append_codec_change"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["fresh", "resumed"])
@pytest.mark.parametrize(("call", "code"), REFUSED_STEPS.values(), ids=REFUSED_STEPS)
def test_a_refused_call_uses_up_nothing(call: Any, code: str, how: str) -> None:
    writer = new_writer()
    events = [
        writer.item_created(),
        *writer.step_completed(LEAF, [update("set", 1), update("app", 1, "append")]),
    ]
    if how == "resumed":
        writer = resumed(*events)
    before = writer.next_item_seq
    with pytest.raises(InvalidEventError) as caught:
        call(writer)
    assert caught.value.code == code
    assert writer.next_item_seq == before
    after = writer.step_completed(
        LEAF, [update("set", 2, field_type="other"), update("app", 2, "append")]
    )
    ordinal = 0 if how == "resumed" else 1
    assert [event.item_seq for event in after] == [before, before + 1, before + 2]
    assert after[0].checkpoint_id.endswith(f"\0{ordinal}")
    assert fold_datagen_events([*events, *after]) is not None


@pytest.mark.parametrize(
    ("item_id", "options", "code"),
    [
        ("5\0", {}, "nul_in_id"),
        ("5", {"run_id": ""}, "empty_column"),
        ("5", {"writer_epoch": ""}, "empty_column"),
        ("5", {"run_id": "\ud800"}, "not_utf8"),
        ("5", {"query_tags": {"a": object()}}, "wrong_type"),
    ],
)
def test_a_writer_for_nonsense_is_refused(item_id: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        DatagenStreamWriter.open(item_id, **{"run_id": "r", "writer_epoch": "w", **options})
    assert caught.value.code == code


@pytest.mark.parametrize("item_id", ["", "5/x", "5/x:01", "5//x:0"])
def test_a_writer_needs_a_canonical_id(item_id: str) -> None:
    with pytest.raises(InvalidItemIdError):
        new_writer(item_id)


def test_numbers_end_with_an_error_and_never_wrap() -> None:
    last = resumed(created(2**63 - 3))
    with pytest.raises(InvalidEventError) as caught:
        last.step_completed(LEAF, [update("a", 1), update("b", 1)])
    assert caught.value.code == "out_of_range"
    assert last.step_completed(LEAF, [update("a", 1)])[-1].item_seq == 2**63 - 1
    with pytest.raises(InvalidEventError) as caught:
        last.item_terminal("completed")
    assert caught.value.code == "out_of_range"
    with pytest.raises(InvalidEventError) as caught:
        resumed(created(attempt=2**31 - 1))
    assert caught.value.code == "out_of_range"
