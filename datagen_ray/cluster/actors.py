"""The one file that makes workers Ray actors: their names, restarts and resources are decided here.

What a call to a worker means. A reply: it was done. ``ActorUnavailableError``: it may or may not
have been done, on a worker that may still be alive; asking it to start tells which life of it
answers. ``ActorDiedError``: Ray will not bring this actor back. Calls are never repeated by Ray
(``max_task_retries=0``), since only the log knows what was done; actors are restarted without
limit (``max_restarts=-1``) and then wait to be told to start: no process claims a shard by itself.

A worker that is sent SIGTERM drains while it still answers calls, and then exits as Ray would have
had it exit at once; see ``termination``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from datagen_ray.clock import new_run_id
from datagen_ray.cluster.driver import WorkerHandle, WorkerLostError
from datagen_ray.cluster.maintainer import Maintainer, MaintainerConfig, MaintainerStatus
from datagen_ray.cluster.messages import Assignment, Collected, WorkerConfig, WorkerReport
from datagen_ray.cluster.ray_meter import RayMeter
from datagen_ray.cluster.remote_steps import RayCalls
from datagen_ray.cluster.shared_actors import RayLimits, SharedActors, SharedNames
from datagen_ray.cluster.step_processes import StepSource
from datagen_ray.cluster.termination import SigtermAsInterrupt, before_exit_by_sigterm
from datagen_ray.cluster.worker import NotStartedError, Worker
from datagen_ray.errors import ClusterLostError, ConfigError, DatagenError, InternalError
from datagen_ray.store.shared_compaction import RewriteTask, rewrite
from datagen_ray.waiting import within

T = TypeVar("T")

_LOGGER = logging.getLogger("datagen_ray.cluster")

_CHECK_S = 20.0
MAINTAINER_NICE = 10
"""What a maintainer does can wait for whatever else wants its CPU."""
REWRITE_TIMEOUT_S = 1800.0
STOP_MAINTAINER_S = 20.0
_CONNECT_S = 10.0
START_ATTEMPTS = 2
"""How often a Ray of our own is started before the run gives up."""


class WorkerActor:
    """A :class:`Worker` in a process of its own. Success and failure of calls: see above."""

    def __init__(self, config: WorkerConfig) -> None:
        context = ray.get_runtime_context()
        shared: SharedNames = config.shared or SharedNames()
        self._drain_s = config.drain_s
        self._slot = config.slot
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._told_to_end = False
        self._worker = Worker(
            config,
            load_pipeline=cloudpickle.loads,
            incarnation=context.get_worker_id(),
            remote=RayCalls(StepSource(config.pipeline, config.import_paths), shared),
            limits=None if shared.ledger is None else RayLimits(ray.get_actor(shared.ledger)),
            meter=RayMeter(config.labels),
        )

    async def start(self) -> WorkerReport:
        self._loop = asyncio.get_running_loop()
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave_when_abandoned())
            before_exit_by_sigterm(self._begin_to_leave)
        return await self._worker.start()

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        await self._worker.offer(chunk, acknowledged)

    async def collect(self, acknowledged: int) -> Collected:
        return await self._worker.collect(acknowledged)

    async def withdraw(self, most: int) -> tuple[str, ...]:
        return await self._worker.withdraw(most)

    async def stop(self, grace_s: float) -> None:
        await self._worker.drain(grace_s)

    async def _leave_when_abandoned(self) -> None:
        """End a process that can do no more and that the driver does not reach to end it."""
        reason = await self._worker.abandoned()
        _LOGGER.error("%s was left alone and ends: %s", self._slot, reason)
        # At once: an end in order would wait for a cluster that is not there.
        os._exit(1)

    def _begin_to_leave(self) -> bool:
        """At the first SIGTERM: let running steps end. At the next: exit."""
        if self._told_to_end or self._loop is None or not self._loop.is_running():
            return False
        self._told_to_end = True
        leaving = asyncio.run_coroutine_threadsafe(self._worker.drain(self._drain_s), self._loop)
        leaving.add_done_callback(self._leave)
        return True

    def _leave(self, drained: Future[None]) -> None:
        error = drained.exception()
        if error is not None:
            _LOGGER.error("%s did not close in order: %s", self._slot, error)
        os.kill(os.getpid(), signal.SIGTERM)


class MaintainerActor:
    """A :class:`Maintainer` in a process of its own; it begins as soon as the process is there."""

    def __init__(self, config: MaintainerConfig) -> None:
        os.nice(MAINTAINER_NICE)
        self._maintainer = Maintainer(
            config,
            holder=f"{socket.gethostname()}:{os.getpid()}:{config.term.run_id}:{new_run_id()}",
            pid=os.getpid(),
            rewriter=_rewrite_on_free_cpus,
        )
        self._maintainer.start()

    def status(self) -> MaintainerStatus:
        return self._maintainer.status()

    def stop(self) -> None:
        self._maintainer.stop()


def _rewrite_on_free_cpus(tasks: Sequence[RewriteTask]) -> list[str]:
    """As many Ray tasks as there are CPUs that nobody uses; without any, here, one by one.

    Rewriting never waits for the CPU of a worker, which might be held for the whole run. What is
    lost on the way is left out of the commit, and planned again at the next pass.
    """
    free = int(ray.available_resources().get("CPU", 0))
    if free < 1 or len(tasks) == 1:
        return [rewrite(task) for task in tasks]
    remote = cast("Callable[..., Any]", ray.remote)(rewrite).options(
        num_cpus=1, max_retries=2, name="compaction"
    )
    done: list[str] = []
    for start in range(0, len(tasks), free):
        for result in [remote.remote(task) for task in tasks[start : start + free]]:
            try:
                done.append(ray.get(result, timeout=REWRITE_TIMEOUT_S))
            except RayError as error:
                ray.cancel(result, force=True)
                _LOGGER.warning("a part of a compaction was lost: %s", _reason(error))
    return done


class RayWorker:
    """The handle of one worker actor, as the driver knows it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self) -> WorkerReport:
        return await self._call(self._actor.start.remote())

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        await self._call(self._actor.offer.remote(tuple(chunk), acknowledged))

    async def collect(self, acknowledged: int) -> Collected:
        return await self._call(self._actor.collect.remote(acknowledged))

    async def withdraw(self, most: int) -> tuple[str, ...]:
        return await self._call(self._actor.withdraw.remote(most))

    async def stop(self, grace_s: float) -> None:
        await self._call(self._actor.stop.remote(grace_s))

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor, no_restart=True)

    async def _call(self, reply: Awaitable[T]) -> T:
        try:
            return await reply
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NotStartedError):
                raise WorkerLostError(str(cause), gone=False) from None
            if isinstance(cause, DatagenError):
                raise cause from None
            raise
        except ActorUnavailableError as error:
            raise WorkerLostError(_reason(error), gone=False) from None
        except RayActorError as error:
            raise WorkerLostError(_reason(error), gone=True) from None
        except RayError as error:
            raise WorkerLostError(_reason(error), gone=True) from None


@dataclass(frozen=True)
class RayOptions:
    """Where and with what workers run. ``address=None`` starts a cluster of this process's own.

    ``num_cpus`` is what one worker reserves; ``cluster_cpus`` the size of an own cluster.
    """

    address: str | None = None
    num_cpus: float = 1.0
    cluster_cpus: int | None = None
    temp_dir: str | None = None
    dashboard: bool = False
    worker_logs: bool = False
    runtime_env: dict[str, Any] | None = None


class RayFleet:
    """Starts worker actors on a Ray cluster, its own or one that runs already.

    ``config`` is given to every worker, with its slot; ``name`` begins the names of the actors.
    Both are set by whoever took the run term, as is ``shared``, what the workers of a run share.
    """

    def __init__(self, options: RayOptions) -> None:
        self.config: WorkerConfig | None = None
        self.shared: SharedActors | None = None
        self.maintenance: MaintainerConfig | None = None
        self.name = ""
        self._options = options
        self._lives = 0
        self._started_ray = False
        self._maintainer: Any = None
        self._sigterm: SigtermAsInterrupt | None = None

    def open(self) -> None:
        """Start or join Ray, unless this process did already."""
        if ray.is_initialized():
            return
        sigterm = SigtermAsInterrupt()
        options = self._options
        common: dict[str, Any] = {
            "log_to_driver": options.worker_logs,
            "logging_level": "ERROR",
            "runtime_env": options.runtime_env,
            "namespace": "datagen_ray",
        }
        if options.address is None:
            _start_ray(
                address="local",
                num_cpus=options.cluster_cpus,
                include_dashboard=options.dashboard,
                _temp_dir=options.temp_dir,
                **common,
            )
        else:
            try:
                _check_reachable(options.address)
                ray.init(address=options.address, **common)
            except (OSError, ValueError, RuntimeError, RayError) as error:
                raise ConfigError(
                    f"no Ray cluster can be joined at {options.address!r}: {_reason(error)}; "
                    "check --address, and that this machine has the cluster's token "
                    "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token), or leave --address "
                    "out to start one here"
                ) from error
        self._started_ray = True
        sigterm.take()
        self._sigterm = sigterm

    def close(self) -> None:
        """End what the workers shared, leave Ray, and with that end a cluster of our own."""
        self._stop_maintainer()
        if self.shared is not None:
            self.shared.close()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False
        if self._sigterm is not None:
            self._sigterm.close()
            self._sigterm = None

    def spawn(self, slot: str) -> WorkerHandle:
        """A new actor for the slot; it stays pending until the cluster has room for it."""
        if self.config is None:
            raise InternalError("a worker was spawned before the run term was taken")
        if self.shared is not None and self.config.shared is None:
            if self._options.address is None and self._started_ray:
                self.shared.check_room()
            self.config = replace(self.config, shared=self.shared.names())
        self._lives += 1
        actor_class = cast("Callable[..., Any]", ray.remote)(WorkerActor)
        actor = actor_class.options(
            name=f"{self.name}/{slot}/{self._lives}",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=self._options.num_cpus,
        ).remote(replace(self.config, slot=slot, labels={**self.config.labels, "slot": slot}))
        return RayWorker(actor)

    def start_maintainer(self) -> None:
        """Start the maintainer, if the run has one: near the driver, away from most workers."""
        if self.maintenance is None or self._maintainer is not None:
            return
        here = ray.get_runtime_context().get_node_id()
        actor_class = cast("Callable[..., Any]", ray.remote)(MaintainerActor)
        self._maintainer = actor_class.options(
            name=f"{self.name}/maintainer",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,
            num_cpus=self.maintenance.options.num_cpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        ).remote(self.maintenance)

    def _stop_maintainer(self) -> None:
        """Have it leave office, so that the next one need not wait; end it in any case."""
        maintainer, self._maintainer = self._maintainer, None
        if maintainer is None or not ray.is_initialized():
            return
        try:
            ray.get(maintainer.stop.remote(), timeout=STOP_MAINTAINER_S)
        except RayError as error:
            _LOGGER.info("the maintainer did not end in order: %s", _reason(error))
        ray.kill(maintainer, no_restart=True)

    async def check(self) -> None:
        """Raises ClusterLostError when no node is left that could run a worker."""
        try:
            nodes = await within(asyncio.to_thread(ray.nodes), _CHECK_S)
        except (asyncio.TimeoutError, RayError, ConnectionError, RuntimeError) as error:
            raise ClusterLostError(
                f"the Ray cluster does not answer ({_reason(error)}); run the same command again"
            ) from error
        if not any(node["Alive"] for node in nodes):
            raise ClusterLostError(
                "every node of the Ray cluster is dead; run the same command again to go on"
            )


def _start_ray(**options: Any) -> None:
    """Start a Ray of our own; on a machine that is busy it may need a second try."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                # Ray forks only to execute its own programs at once; no Lance call runs in between.
                warnings.filterwarnings("ignore", message="lance is not fork-safe")
                ray.init(**options)
            return
        except Exception as error:  # Ray raises no narrower one when it is too slow to start
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise ClusterLostError(
                    f"Ray did not start here in {attempt} attempts ({_reason(error)}); see that "
                    "the machine has memory, disk and CPU to spare, or name a running cluster "
                    "with --address, and run the same command again"
                ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError where nobody listens; Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return


def pickle_pipeline(pipeline: Any, by_value: Sequence[Any] = ()) -> bytes:
    """A pipeline as bytes. The code of modules in ``by_value`` travels along."""
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cast("bytes", cloudpickle.dumps(pipeline))
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the pipeline cannot be sent to workers: {_reason(error)}; build what cannot be "
            "pickled (clients, locks, files) inside a class step"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = next((line for line in reversed(lines) if line.startswith("The actor is dead")), None)
    return said or lines[0]
