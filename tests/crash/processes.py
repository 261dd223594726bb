"""A command with all the processes that it starts, found by their session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.01


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 150) -> None:
    """Return as soon as the condition holds; fail, naming it, when it never does."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"still waiting for: {what}")
        time.sleep(POLL_S)


class Session:
    """A command in a session of its own. Ray's processes stay in it, so all can be found."""

    def __init__(self, command: list[str], env: dict[str, str], output: Path) -> None:
        self._output = output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=env, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def members(self, name: str = "") -> list[int]:
        """The living processes of the session whose command line starts or ends its program so."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # it ended meanwhile
            state, _, _, session = stat.rpartition(")")[2].split()[:4]
            program = command.decode(errors="replace").partition(" ")[0]
            ours = int(session) == self.process.pid and state != "Z"
            if ours and (program.startswith(name) or program.endswith(name)):
                found.append(int(entry))
        return sorted(found)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End whatever is left of the session, and wait until nothing is."""
        self.kill(self.process.pid)
        self.process.wait()

        def gone() -> bool:
            members = self.members()
            self.kill(*members)
            return not members

        wait_until(gone, "the killed session to be gone")

    def output(self) -> str:
        return self._output.read_text(errors="replace")
