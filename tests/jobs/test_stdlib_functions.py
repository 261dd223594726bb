"""Discovery finds many functions, always the same ones, and none that is impure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs.stdlib_functions import StdlibFunction, describe, discover, resolve

KEYS = [function.key for function in discover()]


def test_there_are_at_least_two_hundred() -> None:
    assert len(KEYS) >= 200


def test_keys_are_unique_and_ordered() -> None:
    assert sorted(set(KEYS)) == KEYS


def test_another_process_finds_the_same() -> None:
    code = "from jobs.stdlib_functions import discover; print([f.key for f in discover()])"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert found.strip() == repr(KEYS)


def test_every_key_names_a_callable() -> None:
    assert all(callable(resolve(function)) for function in discover())


@pytest.mark.parametrize(
    "key",
    [
        "textwrap.wrap", "math.gcd", "statistics.median", "fractions.Fraction",
        "bisect.bisect_left",
        "difflib.ndiff", "calendar.monthrange", "colorsys.rgb_to_hsv", "heapq.nlargest",
        "html.escape", "shlex.split", "urllib.parse.urljoin", "base64.b64encode",
        "binascii.hexlify", "unicodedata.normalize", "ipaddress.ip_network", "datetime.date",
        "json.dumps", "re.findall", "operator.add", "keyword.iskeyword", "posixpath.splitext",
        "ntpath.join", "fnmatch.filter", "zlib.crc32", "struct.pack", "ast.literal_eval",
        "builtins.sorted", "builtins.str.partition", "builtins.int.from_bytes",
        "itertools.accumulate", "string.capwords", "cmath.polar", "decimal.Decimal",
    ],
)  # fmt: skip
def test_well_known_functions_are_found(key: str) -> None:
    assert key in KEYS


@pytest.mark.parametrize(
    "key",
    [
        "builtins.print", "builtins.open", "builtins.exec", "builtins.eval", "builtins.input",
        "builtins.hash", "builtins.id", "builtins.list.sort", "builtins.set.add",
        "datetime.date.today",
        "datetime.datetime.now", "decimal.setcontext", "posixpath.exists", "posixpath.abspath",
        "posixpath.expandvars", "calendar.setfirstweekday", "calendar.prmonth", "heapq.heapify",
        "bisect.insort", "operator.iadd", "operator.setitem", "email.utils.make_msgid",
        "email.utils.formatdate", "itertools.count", "itertools.cycle", "re.purge",
    ],
)  # fmt: skip
def test_impure_functions_are_not_found(key: str) -> None:
    assert key not in KEYS


def test_a_description_has_the_signature_and_the_first_sentence() -> None:
    found = describe(StdlibFunction("textwrap", "shorten"))
    assert found.signature == "shorten(text, width, **kwargs)"
    assert found.summary == "Collapse and truncate the given text to fit in the given width."
    assert [p.required for p in found.parameters] == [True, True, False]


def test_a_c_function_without_signature_is_described_by_its_documentation() -> None:
    found = describe(StdlibFunction("builtins", "max"))
    assert found.parameters[0].required
    assert found.summary


def test_no_description_depends_on_the_process() -> None:
    assert not [f.key for f in discover() if " at 0x" in repr(describe(f))]
