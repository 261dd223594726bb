"""Lance's error texts, turned into types: the only code that reads them.

Lance raises ``OSError`` (sometimes ``ValueError``) for everything, and says what happened in the
text. Each phrase below stands in the pin test, so a version that words it otherwise is noticed.
"""

from __future__ import annotations

import re

from datagen_ray.errors import (
    DamagedLogError,
    DatagenError,
    InternalError,
    LogNotFoundError,
    StorageError,
    WriterFencedError,
    WriterPoisonedError,
)


class LancePanicError(RuntimeError):
    """Lance met a state that it does not handle, such as a file that was cut in the middle."""


LANCE_ERRORS = (OSError, RuntimeError, ValueError)
"""What a Lance call raises when it fails."""

FENCED_PHRASES = ("peer claimed epoch", "another writer claimed", "WAL replay aborted")
POISONED_PHRASE = "persistence failure"
TAIL_TOO_LONG_PHRASE = "past what the memtable replaying it can hold"
NOT_FOUND_PHRASE = "was not found"
EXISTS_PHRASE = "Dataset already exists"
INITIALIZED_PHRASE = "MemWAL is already initialized"
CONFLICT_PHRASE = "commit conflict"
INCOMPATIBLE_PHRASE = "Incompatible transaction"
REFUSED_PHRASE = "Invalid user input"
CLOSED_PHRASE = "is already closed"
STALE_PHRASE = "Stale SSTable compaction"
CONTENTION_PHRASE = "Too many concurrent writers"
CUT_OFF_PHRASES = (
    "failed to fill whole buffer",
    "file size is too small",
    "of size 0 bytes",
    "does not have sufficient data",
    "failed to decode Protobuf message",
)

_CREATION_RACE_PHRASES = (
    EXISTS_PHRASE,
    INITIALIZED_PHRASE,
    CONFLICT_PHRASE,
    INCOMPATIBLE_PHRASE,
)

# "Writer fenced (<reason>)" comes in front of whatever follows, which may quote other reasons
_REASON = re.compile(r"Writer fenced \(([^)]*)\)")
_SOURCE_LOCATION = re.compile(r",?\s*/?[\w./-]+\.rs:\d+:\d+")


def is_tail_too_long(error: Exception) -> bool:
    """Whether a claim failed because its MemTable limits cannot hold the shard's WAL tail."""
    return TAIL_TOO_LONG_PHRASE in str(error)


def is_not_found(error: Exception) -> bool:
    return NOT_FOUND_PHRASE in str(error)


def is_creation_race(error: BaseException) -> bool:
    """Whether creating or initialising a log failed because somebody else just did it."""
    text = str(error)
    return any(phrase in text for phrase in _CREATION_RACE_PHRASES)


def is_vanished(error: Exception) -> bool:
    """Whether a file that a dataset lists was gone when it was to be read."""
    return "not found" in str(error).lower()


def is_merged_already(error: Exception) -> bool:
    """Whether a merge was refused because its generation, or a later one, is marked as merged."""
    return STALE_PHRASE in str(error)


def is_commit_conflict(error: Exception) -> bool:
    """Whether a commit failed only because another came first, so that it can be tried again."""
    text = str(error)
    return CONFLICT_PHRASE in text or CONTENTION_PHRASE in text


def is_cut_off(error: Exception) -> bool:
    """Whether a file was shorter than what lists it says, as a power loss leaves it."""
    if isinstance(error, LancePanicError):
        return True
    return any(phrase in str(error) for phrase in CUT_OFF_PHRASES)


def translate(error: Exception, doing: str) -> DatagenError:
    """The type for what a Lance call raised; ``doing`` says which call, and on what."""
    text = str(error)
    detail = _SOURCE_LOCATION.sub("", text.strip().splitlines()[0] if text.strip() else "")
    reason = _REASON.search(text)
    subject = reason.group(1) if reason else text
    if any(phrase in subject for phrase in FENCED_PHRASES):
        return WriterFencedError(
            f"another writer took over while {doing}; nothing written since then was "
            f"acknowledged, so stop this process ({detail})"
        )
    if POISONED_PHRASE in subject:
        return WriterPoisonedError(
            f"the storage failed while {doing}; reopen the writer and append the same rows "
            f"again ({detail})"
        )
    if is_not_found(error):
        return LogNotFoundError(f"no log was found while {doing}; check the path ({detail})")
    if is_cut_off(error):
        return DamagedLogError(
            f"a file is cut off, found while {doing}; if the machine lost power, run "
            f"`datagen-ray repair`, else restore it ({detail})"
        )
    if REFUSED_PHRASE in text:
        return InternalError(f"Lance refused what it was given while {doing}: {detail}")
    return StorageError(f"Lance failed while {doing}: {detail}; check the storage and try again")
