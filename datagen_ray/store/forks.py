"""What a forked process may not do with a store: neither its threads nor Lance's come along.

A store that was opened before the fork has its writer thread in the other process only, so whoever
waits for it in this one waits for ever. Lance's own threads are gone too; a child that writes with
what is left of them hangs or crashes, now and then. So both are refused. Reading starts afresh,
and goes on working.
"""

from __future__ import annotations

import os

from datagen_ray.errors import ConfigError

_CURE = (
    "open the log only after the fork, or start processes by the spawn method of multiprocessing"
)


class _Process:
    """This process, and whether it, or one that it was forked from, has used Lance."""

    used = False
    used_before_fork = False
    forks = 0
    """Forks between the first process and this one. Asking for the process id instead costs a
    system call at each append, which some virtual machines make dear."""


def note_use() -> None:
    """To be called before this process first lets Lance start its threads."""
    _Process.used = True


def _after_fork() -> None:
    _Process.used_before_fork = _Process.used
    _Process.forks += 1


os.register_at_fork(after_in_child=_after_fork)


def check_may_write(uri: str) -> None:
    """Raise ConfigError in a process that was forked from one that had used Lance."""
    if _Process.used_before_fork:
        raise ConfigError(
            f"{uri} cannot be written to in a process that was forked from one that had opened "
            f"a log; {_CURE}"
        )


class HomeProcess:
    """The process that something was opened in."""

    def __init__(self) -> None:
        self._forks = _Process.forks

    @property
    def is_this(self) -> bool:
        return self._forks == _Process.forks

    def check(self, what: str) -> None:
        """Raise ConfigError in every other process."""
        if not self.is_this:
            raise ConfigError(f"{what} was opened in another process, before a fork; {_CURE}")
