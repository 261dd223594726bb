"""The sandbox refuses what it must, says why, and accepts exact literals only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.sandbox import Call, Limits, Sandbox, SandboxError
from jobs.sandbox_child import round_trips, same


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Limits(timeout_s=1.5, cpu_s=1), pairs=1)
    yield made
    made.close()


def evaluate(source: str) -> Call:
    return Call("builtins", "eval", (repr(source),))


def test_a_pure_call_gives_the_exact_text_of_its_value(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Call("textwrap", "wrap", ("'to be or not to be'", "8")))
    assert (outcome.reason, outcome.text) == ("ok", "['to be or', 'not to', 'be']")
    assert (outcome.type, outcome.wrapper) == ("list", "")


def test_keyword_arguments_are_passed_by_name(sandbox: Sandbox) -> None:
    assert sandbox.run(Call("builtins", "sorted", ("[1, 3, 2]",), {"reverse": "True"})).text == (
        "[3, 2, 1]"
    )


@pytest.mark.parametrize(
    ("call", "wrapper", "text"),
    [
        (Call("itertools", "pairwise", ("'abc'",)), "list", "[('a', 'b'), ('b', 'c')]"),
        (Call("fractions", "Fraction", ("'6/8'",)), "str", "'3/4'"),
        (Call("datetime", "date", ("2024", "2", "29")), "str", "'2024-02-29'"),
        (Call("collections", "Counter", ("'aab'",)), "dict", "{'a': 2, 'b': 1}"),
        (Call("urllib.parse", "urldefrag", ("'a#b'",)), "tuple", "('a', 'b')"),
        (Call("builtins", "range", ("3",)), "list", "[0, 1, 2]"),
    ],
)
def test_a_value_without_a_literal_is_wrapped(
    sandbox: Sandbox, call: Call, wrapper: str, text: str
) -> None:
    outcome = sandbox.run(call)
    assert (outcome.reason, outcome.wrapper, outcome.text) == ("ok", wrapper, text)


@pytest.mark.parametrize(
    "call",
    [
        Call("socket", "socket"),
        Call("socket", "create_connection", ("('192.0.2.1', 80)",)),
        Call("socket", "getaddrinfo", ("'localhost'", "80")),
        Call("os", "fork"),
        Call("os", "system", ("'true'",)),
        Call("os", "listdir", ("'/'",)),
        Call("os", "kill", ("1", "9")),
        Call("builtins", "open", ("'/etc/passwd'",)),
        Call("_posixsubprocess", "fork_exec"),
        Call("ctypes", "string_at", ("0",)),
        evaluate("[__import__('os').fork() for _ in range(1000)]"),
    ],
    ids=lambda call: f"{call.module}.{call.qualname}",
)
def test_network_processes_and_files_are_out_of_reach(sandbox: Sandbox, call: Call) -> None:
    outcome = sandbox.run(call)
    assert outcome.reason in {"refused", "raised"}
    assert outcome.text == ""


def test_a_write_is_refused_and_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = tmp_path / "made"
    assert sandbox.run(Call("builtins", "open", (repr(str(target)), "'w'"))).reason == "refused"
    mode = repr(os.O_CREAT | os.O_WRONLY)
    assert sandbox.run(Call("os", "open", (repr(str(target)), mode))).reason == "refused"
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_cannot_be_swallowed(sandbox: Sandbox) -> None:
    # posixpath.exists catches OSError and would answer False
    assert sandbox.run(Call("os.path", "exists", ("'/'",))).reason in {"ok", "refused"}
    swallowing = "[x for x in [__import__('contextlib').suppress(BaseException)] if x.__exit__]"
    assert sandbox.run(evaluate(swallowing)).reason == "no_round_trip"


def test_an_endless_loop_ends(sandbox: Sandbox) -> None:
    assert sandbox.run(evaluate("[0 for _ in iter(int, 1)]")).reason == "timeout"


def test_a_call_that_waits_ends(sandbox: Sandbox) -> None:
    assert sandbox.run(Call("time", "sleep", ("3600",))).reason in {"timeout", "refused"}


def test_endless_memory_ends(sandbox: Sandbox) -> None:
    assert sandbox.run(evaluate("b'x' * (1 << 40)")).reason == "memory"
    assert sandbox.run(evaluate("list(range(10 ** 9))")).reason in {"memory", "timeout"}


def test_a_crash_of_the_interpreter_is_an_outcome(sandbox: Sandbox) -> None:
    assert sandbox.run(Call("os", "abort")).reason == "crashed"
    assert sandbox.run(Call("os", "_exit", ("3",))).reason == "crashed"
    assert sandbox.run(Call("math", "gcd", ("4", "6"))).text == "2"


@pytest.mark.parametrize(
    "call",
    [
        Call("builtins", "hash", ("'abc'",)),
        Call("builtins", "list", ("{'amber', 'birch', 'cedar', 'delta', 'ember', 'fern'}",)),
        Call("time", "time_ns"),
        Call("random", "getrandbits", ("64",)),
        Call("os", "getpid"),
    ],
    ids=lambda call: f"{call.module}.{call.qualname}",
)
def test_what_differs_between_two_processes_is_found(sandbox: Sandbox, call: Call) -> None:
    assert sandbox.run(call).reason in {"not_deterministic", "refused"}


def test_printing_is_a_side_effect(sandbox: Sandbox) -> None:
    assert sandbox.run(Call("builtins", "print", ("1",))).reason == "printed"


def test_raising_names_the_type(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Call("math", "sqrt", ("-1",)))
    assert (outcome.reason, outcome.detail) == ("raised", "ValueError")


def test_long_texts_are_refused(sandbox: Sandbox) -> None:
    assert sandbox.run(evaluate("'a' * 1000")).reason == "too_long"


def test_the_environment_is_empty(sandbox: Sandbox) -> None:
    assert sandbox.run(evaluate("sorted(__import__('os').environ)")).text in {
        "['PYTHONHASHSEED']",
        "['LC_CTYPE', 'PYTHONHASHSEED']",  # set by the interpreter itself where there is no locale
    }


def test_a_probe_goes_on_after_a_call_that_never_returns(sandbox: Sandbox) -> None:
    calls = [
        Call("math", "gcd", ("4", "6")),
        evaluate("[0 for _ in iter(int, 1)]"),
        Call("math", "gcd", ("4", "'6'")),
        Call("math", "gcd", ("9", "6")),
    ]
    assert [o.reason for o in sandbox.probe(calls)] == ["ok", "timeout", "raised", "ok"]


def test_a_closed_sandbox_starts_again() -> None:
    sandbox = Sandbox(pairs=1)
    try:
        assert sandbox.run(Call("math", "gcd", ("4", "6"))).ok
        sandbox.close()
        assert sandbox.run(Call("math", "gcd", ("4", "6"))).ok
    finally:
        sandbox.close()


def test_closing_ends_every_idle_server() -> None:
    sandbox = Sandbox(pairs=2)
    with sandbox._pair() as first, sandbox._pair() as second:
        servers = (*first, *second)
    sandbox.close()
    assert len(servers) == 4
    assert all(server._process.poll() is not None for server in servers)


def test_a_dead_server_is_an_error_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(pairs=1)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SandboxError):
        sandbox.run(Call("math", "gcd", ("4", "6")))
    monkeypatch.undo()
    try:
        assert sandbox.run(Call("math", "gcd", ("4", "6"))).text == "2"
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    "value",
    [
        0,
        -7,
        True,
        None,
        "a'b\n",
        b"\x00",
        0.1,
        -0.0,
        1e300,
        (1,),
        [1, [2.0]],
        {"a": {1, 2}},
        3 - 4j,
    ],
)
def test_literals_round_trip(value: object) -> None:
    assert round_trips(value, repr(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "-0.0"),
        (1, "True"),
        (1, "1.0"),
        ((1, 2), "[1, 2]"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ([float("nan")], "[nan]"),
        (frozenset({1}), "frozenset({1})"),
        (range(3), "range(0, 3)"),
        (object(), "<object>"),
    ],
)
def test_what_is_not_exactly_the_value_does_not_round_trip(value: object, text: str) -> None:
    assert not round_trips(value, text)


def test_same_compares_bits_and_order() -> None:
    assert same(float("nan"), float("nan"))
    assert not same(0.0, -0.0)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same([True], [1])
    assert not same(complex(0.0, -0.0), complex(0.0, 0.0))
