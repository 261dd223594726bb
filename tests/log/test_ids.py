"""Item ids and event ids."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen_ray import DatagenItemId, InvalidEventError, InvalidItemIdError, datagen_event_id
from datagen_ray.log.ids import canonical_ids

TEXT = st.text(min_size=1, max_size=12)


def test_an_id_is_composed_without_asking_anybody() -> None:
    root = DatagenItemId.from_source_key("5")
    child = root.child("solve_twice", 0)
    grandchild = child.child("judge", 1)
    assert str(grandchild) == "5/solve_twice:0/judge:1"
    assert (grandchild.origin_step, grandchild.branch_idx) == ("judge", 1)
    assert (grandchild.parent, grandchild.root) == (child, root)
    assert (root.parent, root.origin_step, root.branch_idx) == (None, None, None)
    assert root.is_root
    assert not child.is_root


@given(TEXT, st.lists(st.tuples(TEXT, st.integers(-(2**63), 2**63 - 1)), max_size=3))
def test_every_composed_id_parses_back_and_is_canonical(
    key: str, segments: list[tuple[str, int]]
) -> None:
    item = DatagenItemId.from_source_key(key)
    for step, index in segments:
        item = item.child(step, index)
    path = str(item)
    assert DatagenItemId.parse(path) == item
    assert canonical_ids(path) == (
        str(item.root),
        None if item.parent is None else str(item.parent),
    )


@given(TEXT, TEXT)
def test_different_keys_are_different_roots(one: str, other: str) -> None:
    ids = {str(DatagenItemId.from_source_key(key)) for key in (one, other)}
    assert len(ids) == len({one, other})


def test_children_are_ordered_by_number_not_by_text() -> None:
    root = DatagenItemId.from_source_key("5")
    assert sorted([root.child("x", 10), root.child("x", 9)]) == [
        root.child("x", 9),
        root.child("x", 10),
    ]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("", "item_id_empty_root"),
        ("/x:0", "item_id_empty_root"),
        ("5/x", "item_id_malformed_segment"),
        ("5/:0", "item_id_malformed_segment"),
        ("5//x:0", "item_id_malformed_segment"),
        ("5/x:", "item_id_bad_branch_index"),
        ("5/x:y", "item_id_bad_branch_index"),
        ("5/x:1.0", "item_id_bad_branch_index"),
        ("5/x:٣", "item_id_bad_branch_index"),
        ("5/x:1\n", "item_id_bad_branch_index"),
        (f"5/x:{2**63}", "item_id_bad_branch_index"),
        ("5\ud800", "not_utf8"),
        (5, "wrong_type"),
    ],
)
def test_a_path_that_is_no_id_is_refused(path: str, code: str) -> None:
    with pytest.raises(InvalidItemIdError) as caught:
        DatagenItemId.parse(path)
    assert caught.value.code == code


@pytest.mark.parametrize("path", ["5/x:01", "5/x:+1", "5/x:-0", "5/x:1/y:00"])
def test_another_spelling_of_an_id_is_not_canonical(path: str) -> None:
    DatagenItemId.parse(path)
    with pytest.raises(InvalidItemIdError) as caught:
        canonical_ids(path)
    assert caught.value.code == "item_id_not_canonical"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: DatagenItemId.from_source_key(""), "item_id_empty_root"),
        (lambda: DatagenItemId.from_source_key("\udc00"), "not_utf8"),
        (lambda: DatagenItemId.from_source_key(5), "wrong_type"),  # type: ignore[arg-type]
        (lambda: DatagenItemId("5").child("", 0), "item_id_malformed_segment"),
        (lambda: DatagenItemId("5").child("x", 2**63), "out_of_range"),
        (lambda: DatagenItemId("5").child("x", 1.0), "wrong_type"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_in_an_id_is_refused(make: object, code: str) -> None:
    with pytest.raises(InvalidItemIdError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.code == code


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 2**32 - 1))
def test_an_event_id_is_the_uuid5_of_what_it_is_about(
    item_id: str, checkpoint_id: str, ordinal: int
) -> None:
    expected = uuid.uuid5(uuid.NAMESPACE_OID, f"{item_id}\0{checkpoint_id}\0{ordinal}")
    assert datagen_event_id(item_id, checkpoint_id, ordinal) == str(expected)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("5", "c", -1), "out_of_range"),
        (("5", "c", 2**32), "out_of_range"),
        (("5", "c", 0.0), "wrong_type"),
        ((5, "c", 0), "wrong_type"),
        (("5\ud800", "c", 0), "not_utf8"),
    ],
)
def test_an_event_id_of_nonsense_is_refused(arguments: tuple[object, ...], code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        datagen_event_id(*arguments)  # type: ignore[arg-type]
    assert caught.value.code == code
