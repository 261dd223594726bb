"""The same work on many things by a few threads; Arrow and Lance work without Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")

MAX_THREADS = 8


def in_parallel(make: Callable[[_Given], _Made], given: Iterable[_Given]) -> Iterator[_Made]:
    """``map(make, given)`` in its order; holds few of either at once, whatever their number."""
    workers = min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(workers, thread_name_prefix="log-bulk") as pool:
        under_way: deque[Future[_Made]] = deque()
        for one in given:
            under_way.append(pool.submit(make, one))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def all_in_parallel(make: Callable[[_Given], _Made], given: Sequence[_Given]) -> list[_Made]:
    """``[make(one) for one in given]``, which wait for storage rather than for a processor."""
    if len(given) < 2:
        return [make(one) for one in given]
    with ThreadPoolExecutor(min(len(given), MAX_THREADS), thread_name_prefix="log-read") as pool:
        return list(pool.map(make, given))
