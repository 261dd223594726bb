"""What a FAILED row tells of an exception: its type, message and traceback, without secrets."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from datagen_ray.errors import DatagenError, StorageError
from datagen_ray.pipeline.results import Filtered, Permanent

Redact = Callable[[str], str]

MAX_MESSAGE_CHARS = 16_384
MAX_TRACEBACK_CHARS = 65_536

_HERE = str(Path(__file__).parent)

# Every repetition that something must follow is bounded, so that no text takes quadratic time.
_SECRETS = (
    (
        re.compile(
            r"(?i)(['\"]?\b[\w-]{0,40}(?:api[_-]?key|secret|token|password|passwd|access[_-]?key)"
            r"[\w-]{0,40}['\"]?\s{0,8}[=:]\s{0,8}['\"]?)[^\s'\",;&)}\]]{4,}"
        ),
        r"\1[redacted]",
    ),
    (re.compile(r"\b(sk|pk|rk)-[A-Za-z0-9_-]{12,}"), r"\1-[redacted]"),
    (
        re.compile(r"\b(ghp|gho|ghs|ghu|github_pat|hf|xox[abprs])[_-][A-Za-z0-9_-]{12,}"),
        r"\1-[redacted]",
    ),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}"), r"\1[redacted]"),
    (re.compile(r"\beyJ[\w-]{8,2048}\.[\w-]{8,4096}\.[\w-]*"), "[redacted]"),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,8}[A-Za-z0-9._~+/=-]{8,}"), r"\1 [redacted]"),
    (re.compile(r"\b(\w{1,16}://[^\s/:@]{1,256}:)[^\s/@]{1,512}@"), r"\1[redacted]@"),
)


def redact_secrets(text: str) -> str:
    """``text`` without what looks like a key, a token, or a password."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class StepAborted(RuntimeError):
    """User code raised what would end more than its step (``SystemExit``, ``StopIteration``)."""


class FarError(Exception):
    """Stands for an exception of another process that could not come here itself."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name

    def __str__(self) -> str:
        return str(self.args[1])


class FarTraceback(Exception):
    """Shows, as a cause, the traceback that an exception had in the process where it was raised."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class FailureDetails(NamedTuple):
    """The columns of a FAILED row; ``final`` where the same call would raise the same again."""

    error_type: str
    error_dump: str
    traceback: str
    final: bool = False

    @property
    def summary(self) -> str:
        """One line for a report."""
        first = self.error_dump.partition("\n")[0]
        return f"{self.error_type}: {first}" if first else self.error_type


def is_final(error: BaseException) -> bool:
    """Whether an error is never worth another call: control flow, or one that names its own cure.

    ``StorageError`` alone says that trying again may help: of another log, which a step reads.
    """
    return isinstance(error, (Filtered, Permanent, DatagenError)) and not isinstance(
        error, StorageError
    )


def describe_failure(error: BaseException, retries: int, redact: Redact) -> FailureDetails:
    """The columns for ``error``, raised after ``retries`` retries of its step."""
    if isinstance(error, StepAborted) and error.__cause__ is not None:
        error = error.__cause__
    kind = type(error)
    name = error.type_name if isinstance(error, FarError) else kind.__name__
    # A type of another module that only shares the name must not read as a filter.
    if name == Filtered.__name__ and kind is not Filtered:
        name = f"{kind.__module__}.{kind.__qualname__}"
    message = text_of(error)
    if retries:
        message = f"{message}\nretries: {retries}"
    return FailureDetails(
        name,
        redacted(message, redact, MAX_MESSAGE_CHARS),
        redacted(_traceback_of(error), redact, MAX_TRACEBACK_CHARS),
        is_final(error),
    )


def redacted(text: str, redact: Redact, limit: int) -> str:
    """``text`` redacted and of bounded length; of a long one only what may be kept is looked at.

    It is cut before it is redacted, and again after, closer in: a secret that the first cut
    halved, so that it no longer looks like one, is not among what the second one leaves.
    """
    short = storable(text, 2 * limit)
    clean: object
    try:
        clean = redact(short)
    except Exception as error:  # noqa: BLE001 - users may pass their own filter
        clean = error
    if not isinstance(clean, str):
        # Never the text itself: the filter is there because it may hold what must not be stored.
        return f"(left out: the redact filter gave {type(clean).__name__}, not a text)"
    return storable(clean, limit)


def text_of(value: object) -> str:
    """The message of an exception, or any value as text, whatever its ``__str__`` does."""
    try:
        return str(value)
    except Exception as inner:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its message could not be made: {type(inner).__name__})"


def repr_of(value: object) -> str:
    """A value for a message, whatever its ``__repr__`` does."""
    try:
        return repr(value)
    except Exception as inner:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"a {type(value).__name__} (its repr raised {type(inner).__name__})"


def _traceback_of(error: BaseException) -> str:
    """The traceback from the first frame of user code on."""
    tb = error.__traceback__
    while (
        tb is not None and tb.tb_next is not None and _is_plumbing(tb.tb_frame.f_code.co_filename)
    ):
        tb = tb.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, tb))
    except Exception as inner:  # noqa: BLE001 - formatting calls a user's __str__ and __repr__
        return f"(the traceback could not be made: {type(inner).__name__})"


def _is_plumbing(filename: str) -> bool:
    return filename.startswith(_HERE) or "/tenacity/" in filename or "/asyncio/" in filename


def storable(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """UTF-8 text of bounded length, its middle cut out: both ends tell more."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
