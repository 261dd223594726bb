"""Hosts on this machine, each with a network of its own and a Ray node, joined by a switch.

A host is a network namespace with its own address and loopback; the switch is one more, with a
bridge to which every host has a cable. A host whose cable is cut reaches no other host, and nobody
reaches it, while its processes go on and share the file system with all: a worker cut off from its
cluster, not from its storage. Everything vanishes with the processes that keep the namespaces.

It needs root (or what stands for it) and the commands ``ip``, ``unshare`` and ``nsenter``. Where
they are refused, :class:`HostsRefusedError` says why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.crash.processes import Session, wait_until

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
NETWORK = "10.77.0"
COMMAND_S = 20
START_S = 180
OBJECT_STORE_BYTES = 100_000_000

KEEP = "ip link set lo up && echo ready && exec cat"
"""What keeps a namespace: it ends with its standard input, which ends with whoever made it."""


class HostsRefusedError(Exception):
    """This machine lets us make no networks."""


class _Namespace:
    """A network and a host name of its own, for as long as it is not closed."""

    def __init__(self, name: str) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && {KEEP}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline()
        if said != "ready\n":
            self.close()
            raise HostsRefusedError(f"no network namespace can be made here: {said.strip()}")

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one inside."""
        ours = f"/proc/{self.pid}/ns"
        return ["nsenter", f"--net={ours}/net", f"--uts={ours}/uts", "--", *command]

    def run(self, command: str) -> None:
        _run(self.inside(command.split()))

    def close(self) -> None:
        with self._keeper:
            self._keeper.kill()


class Host:
    """One host and, once it was started, its Ray node."""

    def __init__(self, number: int, switch: _Namespace, folder: Path) -> None:
        self.ip = f"{NETWORK}.{number}"
        self.name = f"host-{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.node: Session | None = None
        self._switch = switch
        self._port = f"port-{number}"
        self._namespace = _Namespace(self.name)
        try:
            self._plug_in()
        except BaseException:
            self._namespace.close()
            raise

    def _plug_in(self) -> None:
        inside, switch = self._namespace, self._switch
        _run(
            f"ip link add eth0 netns {inside.pid} type veth "
            f"peer name {self._port} netns {switch.pid}".split()
        )
        inside.run(f"ip address add {self.ip}/24 dev eth0")
        inside.run("ip link set eth0 up")
        # Ray finds out its own address by looking where a packet to this one would leave. With no
        # route to anything else, look-ups of names fail at once and not after seconds.
        inside.run("ip route add 8.8.8.8 dev eth0")
        switch.run(f"ip link set {self._port} master bridge up")

    def cut(self) -> None:
        """Pull the cable: nothing comes in or goes out, and nobody is told."""
        self._switch.run(f"ip link set {self._port} down")

    def mend(self) -> None:
        self._switch.run(f"ip link set {self._port} up")

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one on the host."""
        return self._namespace.inside(command)

    def log_of(self, pid: int) -> str:
        """What a worker process of this host wrote to its standard error."""
        logs = (self.folder / "ray").glob(f"session_*/logs/worker-*-{pid}.err")
        return "".join(each.read_text(errors="replace") for each in logs)

    def start_node(self, *arguments: str, env: dict[str, str]) -> None:
        """Begin to start Ray here, in place of the node that was here before, if any."""
        if self.node is not None:
            self.node.kill_all()
        output = self.folder / "ray start"
        output.unlink(missing_ok=True)
        command = [
            RAY, "start", "--block", f"--node-ip-address={self.ip}",
            f"--temp-dir={self.folder / 'ray'}", f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--include-log-monitor=false", "--disable-usage-stats", *arguments,
        ]  # fmt: skip
        self.node = Session(self.inside(command), env, output)

    def wait_for_node(self) -> None:
        """Return once Ray says that it runs here."""
        node = self.node
        assert node is not None

        def started() -> bool:
            assert node.running, node.output()
            return "Ray runtime started" in node.output()

        wait_until(started, f"the Ray node of {self.name}", START_S)

    def workers(self, name: str = "ray::WorkerActor") -> list[int]:
        return [] if self.node is None else self.node.members(name)

    def close(self) -> None:
        if self.node is not None:
            self.node.kill_all()
        self._namespace.close()


class Hosts:
    """A head without CPUs, and ``count`` hosts whose nodes have one CPU each.

    ``env`` is the environment of the nodes, and so of the workers.
    """

    def __init__(self, count: int, env: dict[str, str]) -> None:
        for command in ("ip", "unshare", "nsenter", "hostname"):
            if shutil.which(command) is None:
                raise HostsRefusedError(f"there is no command {command!r}")
        # The paths of Ray's sockets must be short, which those of tmp_path are not.
        self.folder = Path(tempfile.mkdtemp(prefix="dgr", dir="/tmp"))
        self.address = f"{NETWORK}.1:{PORT}"
        self.workers: list[Host] = []
        self._env = env
        self._switch: _Namespace | None = None
        self._hosts: list[Host] = []
        try:
            self._switch = switch = _Namespace("switch")
            switch.run("ip link add bridge type bridge")
            switch.run("ip link set bridge up")
            for number in range(1, count + 2):
                self._hosts.append(Host(number, switch, self.folder))
            self.head, *self.workers = self._hosts
            self.head.start_node(
                "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", env=env
            )
            self.head.wait_for_node()
            self.join(*self.workers)
        except BaseException:
            self.close()
            raise

    def join(self, *hosts: Host) -> None:
        """Start the Ray nodes of hosts, anew if they had one."""
        for host in hosts:
            host.start_node(f"--address={self.address}", "--num-cpus=1", env=self._env)
        for host in hosts:
            host.wait_for_node()

    def of(self, worker: int) -> Host:
        """The host on which a worker runs."""
        return next(host for host in self.workers if worker in host.workers())

    def close(self) -> None:
        for host in reversed(self._hosts):
            host.close()
        if self._switch is not None:
            self._switch.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise HostsRefusedError(f"`{' '.join(command)}` was refused: {said}")
