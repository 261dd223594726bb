"""Giving memory back to the system after large passing work, such as a merge.

glibc serves large blocks straight from the system and returns them when they are freed; smaller
ones come from heaps, one a thread or so, where a block that is still in use keeps everything
below it. Freeing a large block raises the limit between the two, up to 32 MB, so after one merge
the next ones live in the heaps, whose holes add up: a backlog of generations of 64 MB was seen to
hold 550 MB where one merge needs 220. With the limit fixed at where glibc begins, it does not
grow from one generation to the next; what is free in the heaps is handed back after each.

Does nothing where there is no glibc, or where its environment variables set the limit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 128 << 10


def return_large_blocks() -> None:
    """From now on, have every large block returned to the system as soon as it is freed."""
    glibc = _glibc()
    if glibc is not None and not _set_by_environment():
        glibc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def return_free_memory() -> None:
    """Hand what is free in the heaps back to the system. Takes milliseconds."""
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


def _set_by_environment() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc.mmap_threshold" in tunables


@functools.cache
def _glibc() -> Any | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    return library
