"""The one file that makes workers Ray actors: their names, restarts and resources are decided here.

What a call to a worker means. A reply: it was done. ``ActorUnavailableError``: it may or may not
have been done, on a worker that may still be alive; asking it to start tells which life of it
answers. ``ActorDiedError``: Ray will not bring this actor back. Calls are never repeated by Ray
(``max_task_retries=0``), since only the log knows what was done; actors are restarted without
limit (``max_restarts=-1``) and then wait to be told to start: no process claims a shard by itself.

Ray ends an actor that is sent SIGTERM (by hand, or as its node is drained) only after its pending
calls have ended, then runs ``__ray_shutdown__``, which is where a worker drains.
"""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from datagen_ray.cluster.driver import WorkerHandle, WorkerLostError
from datagen_ray.cluster.messages import Assignment, Collected, WorkerConfig, WorkerReport
from datagen_ray.cluster.remote_steps import RayCalls
from datagen_ray.cluster.shared_actors import RayLimits, SharedActors, SharedNames
from datagen_ray.cluster.step_processes import StepSource
from datagen_ray.cluster.worker import NotStartedError, Worker
from datagen_ray.errors import ClusterLostError, ConfigError, DatagenError, InternalError

T = TypeVar("T")

_CHECK_S = 20.0
_CONNECT_S = 10.0


class WorkerActor:
    """A :class:`Worker` in a process of its own. Success and failure of calls: see above."""

    def __init__(self, config: WorkerConfig) -> None:
        context = ray.get_runtime_context()
        shared: SharedNames = config.shared or SharedNames()
        self._drain_s = config.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker = Worker(
            config,
            load_pipeline=cloudpickle.loads,
            incarnation=context.get_worker_id(),
            remote=RayCalls(StepSource(config.pipeline, config.import_paths), shared),
            limits=None if shared.ledger is None else RayLimits(ray.get_actor(shared.ledger)),
        )

    async def start(self) -> WorkerReport:
        self._loop = asyncio.get_running_loop()
        return await self._worker.start()

    async def offer(self, chunk: Sequence[Assignment], acknowledged: int) -> None:
        await self._worker.offer(chunk, acknowledged)

    async def collect(self, acknowledged: int) -> Collected:
        return await self._worker.collect(acknowledged)

    async def withdraw(self, most: int) -> tuple[str, ...]:
        return await self._worker.withdraw(most)

    async def stop(self, grace_s: float) -> None:
        await self._worker.drain(grace_s)

    def __ray_shutdown__(self) -> None:
        # Ray calls this on its main thread while the event loop of the actor's methods still runs.
        if self._loop is None or self._loop.is_closed() or not self._loop.is_running():
            return
        asyncio.run_coroutine_threadsafe(self._worker.drain(self._drain_s), self._loop).result()


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
        self.name = ""
        self._options = options
        self._lives = 0
        self._started_ray = False

    def open(self) -> None:
        """Start or join Ray, unless this process did already."""
        if ray.is_initialized():
            return
        options = self._options
        common: dict[str, Any] = {
            "log_to_driver": options.worker_logs,
            "logging_level": "ERROR",
            "runtime_env": options.runtime_env,
            "namespace": "datagen_ray",
        }
        if options.address is None:
            with warnings.catch_warnings():
                # Ray forks only to execute its own programs at once; no Lance call runs in between.
                warnings.filterwarnings("ignore", message="lance is not fork-safe")
                ray.init(
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
                    "check --address and RAY_AUTH_MODE, or leave --address out to start one here"
                ) from error
        self._started_ray = True

    def close(self) -> None:
        """End what the workers shared, leave Ray, and with that end a cluster of our own."""
        if self.shared is not None:
            self.shared.close()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

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
        ).remote(replace(self.config, slot=slot))
        return RayWorker(actor)

    async def check(self) -> None:
        """Raises ClusterLostError when no node is left that could run a worker."""
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(ray.nodes), _CHECK_S)
        except (asyncio.TimeoutError, RayError, ConnectionError, RuntimeError) as error:
            raise ClusterLostError(
                f"the Ray cluster does not answer ({_reason(error)}); run the same command again"
            ) from error
        if not any(node["Alive"] for node in nodes):
            raise ClusterLostError(
                "every node of the Ray cluster is dead; run the same command again to go on"
            )


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
