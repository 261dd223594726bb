"""A Ray cluster of many nodes on this machine, whose nodes and workers can be killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray._raylet import Config
from ray.cluster_utils import Cluster

from tests.crash.processes import wait_until


class Nodes:
    """A head without CPUs and ``count`` nodes of one CPU each."""

    def __init__(self, count: int) -> None:
        # Ray reads its settings once a process; the test has set the token's by now.
        Config.initialize("")
        # The paths of Ray's sockets must be short, which those of tmp_path are not.
        self.folder = Path(tempfile.mkdtemp(prefix="dgr", dir="/tmp"))
        temp_dir = self.folder / "ray"
        temp_dir.mkdir()
        # Ray notes the address of the latest head for the whole machine, where this one is no
        # business of others, and in a folder that need not be there.
        with warnings.catch_warnings(), patch.dict(os.environ, RAY_TMPDIR=str(self.folder)):
            warnings.simplefilter("ignore")
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "include_dashboard": False,
                    "temp_dir": str(temp_dir),
                },
            )
        self.address: str = self._cluster.address
        self._nodes: list[Any] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._nodes.append(self._cluster.add_node(wait=False, num_cpus=1))

    def kill_node(self, rng: random.Random) -> None:
        """Kill a node at once. Its workers find out by themselves, a little later."""
        node = self._nodes.pop(rng.randrange(len(self._nodes)))
        _kill_all(node)

    def remove_node_of(self, worker: int, *, in_order: bool) -> None:
        """Take a worker's node away, told to end (SIGTERM) or at once (SIGKILL)."""
        node = next(each for each in self._nodes if worker in _children({_raylet_pid(each)}))
        self._nodes.remove(node)
        if in_order:
            raylet = node.all_processes["raylet"][0].process
            raylet.terminate()
            raylet.wait()
        _kill_all(node)

    def kill_worker(self, rng: random.Random) -> None:
        """Kill one worker of ours. Waits for one when none lives just now."""
        wait_until(lambda: bool(self.workers()), "a worker to kill")
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(rng.choice(self.workers()), signal.SIGKILL)

    def kill_head(self) -> None:
        _kill_all(self._cluster.head_node)

    def stop_node_of(self, worker: int) -> None:
        """Stop the raylet of the worker's node, which cuts the worker off from the cluster.

        The worker itself goes on, and reaches its storage, and whoever asks it.
        """
        for node in self._nodes:
            if worker in _children({_raylet_pid(node)}):
                os.kill(_raylet_pid(node), signal.SIGSTOP)

    def workers(self, name: str = "ray::WorkerActor") -> list[int]:
        """The living worker actors of all nodes."""
        raylets = {_raylet_pid(node) for node in self._nodes}
        return sorted(pid for pid in _children(raylets) if _program(pid).startswith(name))

    def close(self) -> None:
        for node in [*self._nodes, self._cluster.head_node]:
            if node is not None:
                _kill_all(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def _raylet_pid(node: Any) -> int:
    processes = node.all_processes.get("raylet")
    return int(processes[0].process.pid) if processes else -1


def _kill_all(node: Any) -> None:
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(ProcessLookupError):
                info.process.kill()
    for infos in node.all_processes.values():
        for info in infos:
            info.process.wait()


def _children(parents: set[int]) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) in parents and state != "Z":
            found.append(int(entry))
    return found


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
