"""A Ray head of a test's own, as ``ray start`` makes it: own ports, own folder, own token."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.crash.processes import Session, wait_until

TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
RAY = str(Path(sys.executable).with_name("ray"))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RayHead:
    """A head that wants a token; ``env`` has it. The node's processes end with :meth:`close`."""

    def __init__(self, *, num_cpus: int = 2) -> None:
        # The paths of Ray's sockets must be short, which those of tmp_path are not.
        self.folder = Path(tempfile.mkdtemp(prefix="dgr", dir="/tmp"))
        token = self.folder / "token"
        token.write_text("5" * 64)
        gcs, dashboard, client, agent = free_ports(4)
        self.url = f"http://127.0.0.1:{dashboard}"
        self.address = f"127.0.0.1:{gcs}"
        self.env = self.env_with(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        command = [
            RAY, "start", "--head", "--block", f"--num-cpus={num_cpus}",
            "--node-ip-address=127.0.0.1", f"--port={gcs}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
            "--min-worker-port=0", "--max-worker-port=0",
            f"--temp-dir={self.folder / 'ray'}",
        ]  # fmt: skip
        self._session = Session(command, self.env, self.folder / "output")
        try:
            wait_until(lambda: self._listens(dashboard), "the head of Ray to listen")
        except BaseException:
            self.close()
            raise

    def env_with(self, **more: str) -> dict[str, str]:
        """The environment of a command, with these words about tokens alone.

        The home folder is an empty one, so that no token of the machine's is found there.
        """
        kept = {k: v for k, v in os.environ.items() if k not in (*TOKEN_VARIABLES, "RAY_ADDRESS")}
        return {**kept, "HOME": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", **more}

    def job(
        self, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``ray job`` with these arguments, to its end."""
        verb, *rest = arguments
        return subprocess.run(
            [RAY, "job", verb, "--address", self.url, *rest],
            env=self.env if env is None else env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def output(self) -> str:
        return self._session.output()

    def close(self) -> None:
        self._session.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listens(self, port: int) -> bool:
        assert self._session.running, self.output()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0
