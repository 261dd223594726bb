"""Values: exact at their limits, refused where they cannot be."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen_ray import (
    DamagedLogError,
    DatagenBlobValue,
    DatagenFieldUpdate,
    DatagenValue,
    InvalidEventError,
)
from datagen_ray.log.schema import decode_batch, encode_events
from datagen_ray.log.values import MAX_JSON_DEPTH, blob_checksum, blob_matches
from tests.log.builders import field_set

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def round_trip(value: DatagenValue) -> DatagenValue:
    (event,) = decode_batch(encode_events([field_set(1, value)]))
    assert event.value is not None
    return event.value


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("given_value", "kind"),
    [
        (True, "bool"),
        (0, "int"),
        (2**63 - 1, "int"),
        (-(2**63), "int"),
        (0.0, "float"),
        (math.inf, "float"),
        (-math.inf, "float"),
        (5e-324, "float"),
        ("", "str"),
        ("\0 \U0010ffff é", "str"),
        ("x" * 1_000_000, "str"),
        (None, "json"),
        ([], "json"),
        ({"b": 1, "a": [2**70, 0.1, -0.0]}, "json"),
    ],
)
def test_a_value_comes_back_exactly(given_value: Any, kind: str) -> None:
    value = DatagenValue.of(given_value)
    back = round_trip(value)
    assert (back.kind, back) == (kind, value)
    assert back.value == given_value
    assert type(back.value) is type(given_value)


@given(st.floats())
def test_a_float_keeps_its_bits(number: float) -> None:
    back = round_trip(DatagenValue.of(number)).value
    assert struct.pack("<d", back) == struct.pack("<d", number)


@given(JSON)
def test_json_comes_back_equal_and_canonical(value: Any) -> None:
    stored = DatagenValue.json(value)
    back = round_trip(stored)
    assert back == stored
    assert DatagenValue.json(back.value) == stored
    assert repr(back.value) == repr(DatagenValue.json(value).value)


def test_nan_equals_nan_and_zero_differs_from_minus_zero() -> None:
    assert DatagenValue.of(math.nan) == DatagenValue.of(math.nan)
    assert DatagenValue.of(0.0) != DatagenValue.of(-0.0)
    assert hash(DatagenValue.of(math.nan)) == hash(DatagenValue.of(math.nan))
    assert DatagenValue.of(1) != DatagenValue.of(1.0)
    assert DatagenValue.of(True) != DatagenValue.of(1)


def test_json_may_be_nested_to_the_limit_and_no_deeper() -> None:
    deep = nested(MAX_JSON_DEPTH)
    assert round_trip(DatagenValue.json(deep)).value == deep
    for value in (nested(MAX_JSON_DEPTH + 1), {"a": nested(MAX_JSON_DEPTH)}):
        with pytest.raises(InvalidEventError, match="127") as caught:
            DatagenValue.json(value)
        assert caught.value.code == "json_too_deep"


def test_a_json_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidEventError):
        DatagenValue.json(loop)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: DatagenValue.of("a\ud800"), "not_utf8"),
        (lambda: DatagenValue.json({"a": "\udfff"}), "not_utf8"),
        (lambda: DatagenValue.json({"\udfff": 1}), "not_utf8"),
        (lambda: DatagenValue.json({1: 1}), "wrong_type"),
        (lambda: DatagenValue.json({"a": {1, 2}}), "wrong_type"),
        (lambda: DatagenValue.json(math.nan), "bad_json"),
        (lambda: DatagenValue.json([math.inf]), "bad_json"),
        (lambda: DatagenValue.of(2**63), "out_of_range"),
        (lambda: DatagenValue.of(-(2**63) - 1), "out_of_range"),
        (lambda: DatagenValue.of(object()), "wrong_type"),
        (lambda: DatagenValue.of_kind("int", "1"), "wrong_type"),
        (lambda: DatagenValue.of_kind("int", 1.0), "wrong_type"),
        (lambda: DatagenValue.of_kind("bool", 1), "wrong_type"),
        (lambda: DatagenValue.of_kind("float", 10**400), "out_of_range"),
        (lambda: DatagenValue("int", "1"), "wrong_type"),
        (lambda: DatagenValue("int", True), "wrong_type"),
        (lambda: DatagenValue("int", 2**63), "out_of_range"),
        (lambda: DatagenValue("str", "\ud800"), "not_utf8"),
        (lambda: DatagenValue("json", "{"), "bad_json"),
        (lambda: DatagenValue("json", '{"b":1,"a":2}'), "bad_json"),
        (lambda: DatagenValue("json", "NaN"), "bad_json"),
        (lambda: DatagenValue("json", "[" * 100_000), "bad_json"),
        (lambda: DatagenValue("blob", b"x"), "wrong_type"),
        (lambda: DatagenValue("date", "x"), "unsupported_value_kind"),
        (lambda: DatagenValue.from_dict({"kind": "date", "value": 1}), "unsupported_value_kind"),
        (lambda: DatagenValue.from_dict({"kind": 5, "value": 1}), "wrong_type"),
        (lambda: DatagenValue.from_dict({"kind": "blob", "bytes": b"", "size": "0"}), "wrong_type"),
        (lambda: DatagenValue.from_dict({"value": 1}), "value_missing_key"),
        (lambda: DatagenValue.from_dict({"kind": "int"}), "value_missing_key"),
        (lambda: DatagenValue.from_dict([1]), "wrong_type"),
        (lambda: DatagenValue.from_dict({"kind": "blob", "bytes": [256]}), "out_of_range"),
        (lambda: DatagenValue.from_dict({"kind": "blob", "bytes": ["a"]}), "wrong_type"),
        (lambda: DatagenValue.from_dict({"kind": "blob", "bytes": [1.0]}), "wrong_type"),
        (lambda: DatagenValue.from_dict({"kind": "blob", "bytes": "x"}), "wrong_type"),
    ],
)
def test_what_no_value_can_hold_is_refused(make: Any, code: str) -> None:
    with pytest.raises(InvalidEventError) as caught:
        make()
    assert caught.value.code == code


def test_nan_in_json_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidEventError, match="use a field of kind float"):
        DatagenValue.json({"a": math.nan})


def test_an_integer_too_long_for_text_is_refused_clearly() -> None:
    with pytest.raises(InvalidEventError) as caught:
        DatagenValue.json(10**5000)
    assert caught.value.code == "bad_json"


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "1" * 5000])
def test_stored_json_that_cannot_be_parsed_is_damage(text: str) -> None:
    with pytest.raises(DamagedLogError):
        DatagenValue.as_stored("json", text).value  # noqa: B018


def test_a_json_value_cannot_be_changed_through_what_it_was_made_of() -> None:
    given_value = {"a": [1]}
    value = DatagenValue.json(given_value)
    given_value["a"].append(2)
    value.value["a"].append(3)
    assert value.value == {"a": [1]}


def test_subclasses_of_the_native_types_become_them() -> None:
    class Text(str):
        __slots__ = ()

    class Real(float):
        __slots__ = ()

    class Count(int):
        pass

    for given_value, kind in ((Text("a"), str), (Real(1.5), float), (Count(3), int)):
        assert type(DatagenValue.of(given_value).raw) is kind


def test_a_blob_carries_size_and_checksum_and_is_lazy_without_its_bytes() -> None:
    value = DatagenValue.of(bytearray(b"abc"))
    assert value.value == DatagenBlobValue(b"abc", 3, blob_checksum(b"abc"))
    assert value.lazy().value == DatagenBlobValue(None, 3, blob_checksum(b"abc"))
    assert value.lazy().lazy() is value.lazy() or value.lazy().lazy() == value.lazy()
    assert value.lazy() != value


def test_only_checksums_of_our_own_form_prove_anything() -> None:
    ours = blob_checksum(b"abc")
    assert blob_matches(b"abc", ours)
    assert not blob_matches(b"abd", ours)
    assert blob_matches(b"abd", None)
    assert blob_matches(b"abd", "crc32:12345678")
    assert blob_matches(b"abd", "sha256:short")


def test_a_field_update_takes_the_exchange_form() -> None:
    update = DatagenFieldUpdate.from_dict(
        {
            "name": "b",
            "op": "set",
            "field_type": "blob",
            "value": {"kind": "blob", "bytes": b"x", "checksum": "whatever"},
        }
    )
    assert update.value.value == DatagenBlobValue(b"x", 1, None)
    with pytest.raises(InvalidEventError) as caught:
        DatagenFieldUpdate.from_dict(
            {"name": "n", "op": "set", "field_type": "t", "codec_version": "1",
             "value": {"kind": "int", "value": 1}}
        )  # fmt: skip
    assert caught.value.code == "wrong_type"
    for missing in ("name", "op", "field_type", "value"):
        data = {"name": "b", "op": "set", "field_type": "t", "value": {"kind": "int", "value": 1}}
        del data[missing]
        with pytest.raises(InvalidEventError) as caught:
            DatagenFieldUpdate.from_dict(data)
        assert caught.value.code == "missing_key"
