"""Runs single calls of library functions in processes that can do no harm.

    sandbox = Sandbox()
    outcome = sandbox.run(Call("math", "gcd", ("12", "18")))
    outcome.text                        # '6'

One call is run twice, in two processes whose string hashes differ, and is accepted only if it
did the same both times. A refused call is an ordinary ``Outcome`` that names the reason; only
a sandbox that does not work at all raises.

The children come from two fork servers (see ``sandbox_child``), one for each hash seed. The
interpreter is not started with ``-I``, because that ignores ``PYTHONHASHSEED``, and a seed drawn
at random would make the choice of examples differ between runs. The rest of ``-I`` is had by
an environment that holds nothing else, ``-s`` and a cleaned ``sys.path``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.stdlib_functions import PRELOAD

_HASH_SEEDS = ("1", "2")
_CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxError(RuntimeError):
    """The sandbox itself does not work; says nothing about the call."""


@dataclass(frozen=True)
class Call:
    """``module.qualname(*args, **kwargs)`` with every argument as the text of a literal."""

    module: str
    qualname: str
    args: tuple[str, ...] = ()
    kwargs: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "qualname": self.qualname,
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
        }


@dataclass(frozen=True)
class Limits:
    """What one call may use. Memory is address space, which an interpreter starts with 50 MB of."""

    timeout_s: float = 10.0
    cpu_s: int = 2
    memory_bytes: int = 512 << 20
    text_chars: int = 300


@dataclass(frozen=True)
class Outcome:
    """What a call did. ``ok`` alone has a ``text``, the exact literal of its value.

    ``reason`` is one of ok, raised, refused, printed, timeout, memory, crashed, too_long,
    no_round_trip, not_deterministic. ``wrapper`` is the name to wrap around the call to get
    the literal (``list``, ``str``, ...), or empty.
    """

    reason: str
    detail: str = ""
    text: str = ""
    type: str = ""
    wrapper: str = ""

    @property
    def ok(self) -> bool:
        return self.reason == "ok"


class _Server:
    """One fork server. Not for two threads at a time."""

    def __init__(self, hash_seed: str) -> None:
        # Empty; the server removes it once it stands in it.
        self._cwd = tempfile.mkdtemp(prefix="datagen-sandbox-")
        self._process = subprocess.Popen(  # noqa: S603 - our own file, no shell
            [sys.executable, "-s", "-S", "-B", "-W", "ignore", "-X", "utf8", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._cwd,
            env={"PYTHONHASHSEED": hash_seed},
            start_new_session=True,
        )
        try:
            self.send({"preload": list(PRELOAD)})
            hello = self.receive()
        except BaseException:
            self.close()
            raise
        self.network_namespace = bool(hello["network_namespace"])

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SandboxError(f"the sandbox server is gone: {error}") from error

    def receive(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - opened as a pipe above
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise SandboxError(f"the sandbox server ended: exit status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # a broken pipe is closed all the same
                    stream.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._cwd, ignore_errors=True)


class Sandbox:
    """A pool of server pairs, started when first needed. Safe for threads."""

    def __init__(self, limits: Limits | None = None, *, pairs: int = 2) -> None:
        self.limits = limits or Limits()
        self._idle: queue.LifoQueue[tuple[_Server, ...] | None] = queue.LifoQueue()
        for _ in range(pairs):
            self._idle.put(None)  # a place that is not filled yet

    def run(self, call: Call) -> Outcome:
        """Run ``call`` twice and say what came of it."""
        first, second = self._ask([call], batch=False, servers=2)
        if first[0] != second[0]:
            both = f"{first[0]['status']}, then {second[0]['status']}"
            # Out of time once and not twice tells of a busy machine, which is the worse answer.
            if "timeout" in both:
                return Outcome("timeout", both)
            return Outcome("not_deterministic", both)
        return _outcome(first[0])

    def probe(self, calls: Sequence[Call]) -> list[Outcome]:
        """What each call does, once. Several share a process, so none of it is an example.

        A call that brings its process down is reported, and the rest goes on in a new one.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(calls):
            (reports,) = self._ask(calls[len(outcomes) :], batch=True, servers=1)
            outcomes += map(_outcome, reports)
        return outcomes

    @property
    def network_namespace(self) -> bool:
        """Whether the children are in a network namespace of their own."""
        with self._pair() as pair:
            return all(server.network_namespace for server in pair)

    def close(self) -> None:
        """End the servers that are idle. The sandbox starts new ones if it is used again."""
        # All are taken out before any place is put back, or the last one put back comes out again.
        idle = [self._idle.get() for _ in range(self._idle.qsize())]
        for pair in idle:
            if pair is not None:
                _close(pair)
            self._idle.put(None)

    def _ask(self, calls: Sequence[Call], *, batch: bool, servers: int) -> list[list[Any]]:
        request = {
            "calls": [call.to_json() for call in calls],
            "batch": batch,
            "timeout_s": self.limits.timeout_s,
            "limit": self.limits.text_chars,
            "limits": {"cpu_s": self.limits.cpu_s, "memory_bytes": self.limits.memory_bytes},
        }
        with self._pair() as pair:
            for server in pair[:servers]:
                server.send(request)
            return [server.receive() for server in pair[:servers]]

    @contextlib.contextmanager
    def _pair(self) -> Iterator[tuple[_Server, ...]]:
        pair = self._idle.get()
        try:
            if pair is None:
                pair = tuple(_Server(seed) for seed in _HASH_SEEDS)
            yield pair
        except BaseException:
            # An answer may be on its way that would be read as that of the next request.
            if pair is not None:
                _close(pair)
                pair = None
            raise
        finally:
            self._idle.put(pair)


def _close(pair: tuple[_Server, ...]) -> None:
    for server in pair:
        server.close()


def _outcome(report: dict[str, Any]) -> Outcome:
    return Outcome(
        reason=report["status"],
        detail=report.get("detail", ""),
        text=report.get("text", ""),
        type=report.get("type", ""),
        wrapper=report.get("wrapper", ""),
    )


_shared: Sandbox | None = None
_shared_lock = threading.Lock()


def shared_sandbox() -> Sandbox:
    """The sandbox of this process, started when first asked for and ended with the process."""
    global _shared
    with _shared_lock:
        if _shared is None:
            # Two, so that one call that runs into its limits does not hold up all others; a
            # process for each CPU is what a run has already.
            _shared = Sandbox(pairs=2)
            atexit.register(_shared.close)
        return _shared
