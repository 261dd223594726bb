"""The far side of the sandbox: a fork server that runs one call in one throw-away process.

It is started as a script by ``jobs.sandbox``, knows nothing but the standard library, and speaks
JSON lines on its standard streams. Every request is answered by a process forked for it alone:

1. the child leaves for its own session, drops root, takes its resource limits,
2. arms an audit hook that refuses the network, processes and files outside the library,
3. calls the function, checks that the value can be written as a literal, reports, and ends;
4. the server waits for the report until the deadline, kills the child's group, and answers.

Modules are imported once, by the server, before it forks: a call then costs a fork and not the
start of an interpreter.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # nothing beside this file may stand in for a library module

import ast
import collections.abc
import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import math
import os
import resource
import select
import signal
import sysconfig
import time
from typing import Any

MAX_ELEMENTS = 200  # of an iterator that is listed: enough to see that it is endless
REPORT_LIMIT_BYTES = 1 << 20
_NOBODY = 65534
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_LITERAL_TYPES = (int, float, complex, bool, str, bytes, type(None))
_LISTED_TYPES = (
    range,
    collections.abc.Iterator,
    collections.abc.KeysView,
    collections.abc.ValuesView,
    collections.abc.ItemsView,
)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED_PREFIXES = (
    "_posixsubprocess.",
    "_thread.",
    "cpython._",
    "ctypes.",
    "fcntl.",
    "ftplib.",
    "gc.",
    "glob.",
    "http.client.",
    "imaplib.",
    "mmap.",
    "nntplib.",
    "os.",
    "pathlib.",
    "poplib.",
    "pty.",
    "resource.",
    "setopencodehook",
    "shutil.",
    "signal.",
    "smtplib.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "sys.addaudithook",
    "sys.remote_exec",
    "sys.set",
    "syslog.",
    "telnetlib.",
    "tempfile.",
    "time.sleep",
    "urllib.Request",
    "webbrowser.",
)


class RefusedError(BaseException):
    """Raised in the child at a forbidden act; no handler for ``Exception`` swallows it."""


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal down to the types of their parts and the bits of floats."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (set, frozenset)):
        return left == right and {type(x) for x in left} == {type(x) for x in right}
    return isinstance(left, _LITERAL_TYPES) and bool(left == right)


def round_trips(value: Any, text: str) -> bool:
    """Whether ``text``, read as a literal, is exactly ``value``."""
    try:
        return same(ast.literal_eval(text), value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def adapt(value: Any) -> tuple[str, Any]:
    """What to wrap around a call to get a literal from it: the wrapper's name, and its value."""
    kind = type(value)
    if kind in _LITERAL_TYPES or kind in (list, tuple, dict, set):
        return "", value
    if isinstance(value, (bytearray, memoryview)):
        return "bytes", bytes(value)
    if isinstance(value, tuple):
        return "tuple", tuple(value)
    if isinstance(value, dict):
        return "dict", dict(value)
    if kind is frozenset:
        return "sorted", sorted(value)
    if isinstance(value, _LISTED_TYPES):
        listed = list(itertools.islice(value, MAX_ELEMENTS + 1))
        if len(listed) > MAX_ELEMENTS:
            raise OverflowError("more elements than are kept")
        return "list", listed
    if kind.__module__ in {"fractions", "decimal", "datetime", "ipaddress"}:
        return "str", str(value)
    return "", value


def resolve(module: str, qualname: str) -> Any:
    """The object that ``module.qualname`` names."""
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _report(call: dict[str, Any], limit: int) -> dict[str, Any]:
    args = [ast.literal_eval(text) for text in call["args"]]
    kwargs = {name: ast.literal_eval(text) for name, text in call.get("kwargs", {}).items()}
    wrapper, value = adapt(resolve(call["module"], call["qualname"])(*args, **kwargs))
    text = repr(value)
    if len(text) > limit:
        return {"status": "too_long", "detail": f"{len(text)} characters"}
    if not round_trips(value, text):
        return {"status": "no_round_trip", "detail": type(value).__name__}
    return {"status": "ok", "text": text, "type": type(value).__name__, "wrapper": wrapper}


def _guarded(call: dict[str, Any], limit: int, refused: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            report = _report(call, limit)
    except RefusedError as error:
        report = {"status": "refused", "detail": str(error)}
    except MemoryError:
        report = {"status": "memory", "detail": "MemoryError"}
    except Exception as error:  # noqa: BLE001 - whatever a library function raises is its answer
        report = {"status": "raised", "detail": type(error).__name__}
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too
        report = {"status": "raised", "detail": type(error).__name__}
    if refused:  # even when the function caught what the hook raised
        return {"status": "refused", "detail": refused[0]}
    if printed.tell():
        return {"status": "printed", "detail": "wrote to a standard stream"}
    return report


def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths["stdlib"], paths["platstdlib"], *(p for p in sys.path if p)}
    return tuple(sorted(os.path.realpath(root) for root in roots))


def _hook(roots: tuple[str, ...], refused: list[str]) -> Any:
    def in_library(path: object) -> bool:
        return isinstance(path, str) and path.startswith(roots)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            writes = isinstance(args[2], int) and bool(args[2] & _WRITE_FLAGS)
            allowed = not writes and in_library(args[0])
        elif event in {"os.listdir", "os.scandir"}:
            allowed = in_library(args[0])
        else:
            allowed = not event.startswith(_REFUSED_PREFIXES)
        if not allowed:
            refused.append(event)
            raise RefusedError(event)

    return hook


def _limit(limits: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # a user who is not root stays who they are
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(name, (value, value))


def _die_with_parent() -> None:
    # After the change of user, which clears it. A call that sleeps uses up no CPU limit.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(request: dict[str, Any], write_end: int, roots: tuple[str, ...]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    _limit(request["limits"])
    _die_with_parent()
    refused: list[str] = []
    if request.get("batch"):
        # A probe asks only which calls are accepted. A call that does not come back ends the
        # child; what was reported before it stays.
        sys.addaudithook(_hook(roots, refused))
        for call in request["calls"]:
            refused.clear()
            _send(write_end, _guarded(call, request["limit"], refused))
        return
    sys.addaudithook(_hook(roots, refused))
    _send(write_end, _guarded(request["calls"][0], request["limit"], refused))


def _send(fd: int, report: dict[str, Any]) -> None:
    data = memoryview(json.dumps(report).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def _serve_one(request: dict[str, Any], roots: tuple[str, ...]) -> list[dict[str, Any]]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            _child(request, write_end, roots)
            status = 0
        finally:
            os._exit(status)  # never back into the server's loop, whatever was raised
    os.close(write_end)
    deadline = time.monotonic() + request["timeout_s"]
    data, timed_out = bytearray(), False
    while len(data) < REPORT_LIMIT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read_end], [], [], left)[0]:
            timed_out = True
            break
        chunk = os.read(read_end, 65536)
        if not chunk:
            break
        data += chunk
    os.close(read_end)
    for kill in (os.killpg, os.kill):  # the group may not exist yet; the process does
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    reports = [json.loads(line) for line in bytes(data).split(b"\n")[:-1]]
    if len(reports) < len(request["calls"]):
        reports.append(_without_report(timed_out, status))
    return reports


def _without_report(timed_out: bool, status: int) -> dict[str, Any]:
    if timed_out or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return {"status": "timeout", "detail": "no answer in time"}
    if os.WIFSIGNALED(status):
        # The CPU limit's hard value is a SIGKILL; nothing but the limit sends one before ours.
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return {"status": "timeout", "detail": "no answer in time"}
        return {"status": "crashed", "detail": f"signal {number}"}
    return {"status": "crashed", "detail": f"exit {os.WEXITSTATUS(status)}"}


def _leave_network() -> bool:
    """Move to an empty network namespace where the kernel lets us; the hook refuses regardless."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):
        return False
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def main() -> None:
    """Read requests from standard input until it ends; answer each with one line."""
    hello = json.loads(sys.stdin.buffer.readline())
    for module in hello["preload"]:
        with contextlib.suppress(ImportError):  # not in every version of Python
            importlib.import_module(module)
    # A folder that was removed while one stands in it is empty, takes no files, and is no litter
    # when everything here is killed.
    os.rmdir(os.getcwd())
    isolated = _leave_network()
    roots = _library_roots()
    gc.collect()
    gc.freeze()
    gc.disable()
    out = sys.stdout.buffer
    out.write(json.dumps({"ready": True, "network_namespace": isolated}).encode() + b"\n")
    out.flush()
    for line in iter(sys.stdin.buffer.readline, b""):
        out.write(json.dumps(_serve_one(json.loads(line), roots)).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
