"""What the workers of a run share: actors of placed steps, and the ledger of limits.

The driver makes them when it starts the first worker, and they end with the run. They are
restarted without limit; an instance that is lost is built anew by the next call, a ledger that is
lost learns who holds what from the next word of each worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from datagen_ray.cluster.step_processes import StepActor, StepSource
from datagen_ray.errors import ConfigError
from datagen_ray.pipeline.limits import Ledger, RateLimit
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import Placement
from datagen_ray.pipeline.steps import Step

_LOGGER = logging.getLogger("datagen_ray.limits")

ASK_AGAIN_S = 1.0


@dataclass(frozen=True)
class SharedNames:
    """What the workers of a run share, by the names of the actors: names survive any restart."""

    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ledger: str | None = None


class SharedActors:
    """The driver's side: makes the actors of a run when the first worker is started."""

    def __init__(self, pipeline: Pipeline, source: StepSource, name: str) -> None:
        self._steps = pipeline.steps()
        self._source = source
        self._name = name
        self._actors: dict[str, Any] = {}
        self._names: SharedNames | None = None

    def names(self) -> SharedNames:
        """Make the actors, once, and name them."""
        if self._names is None:
            pools = {step.name: self._pool(step) for step in self._steps if step.needs_pool}
            self._names = SharedNames(pools, self._ledger())
        return self._names

    def check_room(self) -> None:
        """Raise for what this cluster, which never grows, does not have."""
        there = ray.cluster_resources()
        for step in self._steps:
            placement = step.options.placement
            if placement is None:
                continue
            asked = {"GPU": placement.num_gpus or 0, **placement.resources}
            for resource, amount in asked.items():
                if amount > there.get(resource, 0):
                    raise ConfigError(
                        f"step {step.name!r} asks for {placement}, and the Ray of this machine "
                        f"has {there.get(resource, 0):g} {resource}; pass the address of a "
                        "cluster that has them"
                    )

    def close(self) -> None:
        """End the actors; calls that still run there are lost."""
        actors, self._actors = self._actors, {}
        self._names = None
        for actor in actors.values() if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)

    def _pool(self, step: Step) -> tuple[str, ...]:
        placement = step.options.placement or Placement()
        return tuple(
            self._make(
                StepActor,
                f"{step.name}/{number}",
                (self._source, step.name),
                ray_resources(placement),
            )
            for number in range(placement.num_actors or 1)
        )

    def _ledger(self) -> str | None:
        for step in self._steps:
            if step.options.rate_limit is not None or step.options.max_in_flight_run is not None:
                return self._make(Ledger, "limits", (), {"num_cpus": 0})
        return None

    def _make(
        self, actor: type, place: str, args: tuple[Any, ...], resources: dict[str, Any]
    ) -> str:
        name = f"{self._name}/shared/{place}"
        actor_class = cast("Callable[..., Any]", ray.remote)(actor)
        self._actors[name] = actor_class.options(
            name=name, max_restarts=-1, max_task_retries=0, **resources
        ).remote(*args)
        return name


def cpus_for_steps(pipeline: Pipeline, cores: int) -> int:
    """CPUs to give an own cluster beside those of the workers, so that placed steps find room."""
    pools, tasks = 0.0, 0.0
    for step in pipeline.steps():
        placement = step.options.placement
        if placement is None:
            continue
        if step.needs_pool:
            pools += placement.cpus * (placement.num_actors or 1)
        else:
            tasks = max(tasks, placement.cpus * cores)
    return int(-(-(pools + tasks) // 1))


def ray_resources(placement: Placement) -> dict[str, Any]:
    """A placement in Ray's words."""
    return {
        "num_cpus": placement.cpus,
        "num_gpus": placement.num_gpus or 0,
        "resources": dict(placement.resources) or None,
    }


class RayLimits:
    """The run's ledger, asked over Ray; a ledger that is lost is waited for and starts afresh."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    async def reserve(self, name: str, limit: RateLimit, calls: int) -> list[float]:
        waits: list[float] = await self._ask("reserve", name, limit, calls)
        return waits

    async def pause(self, name: str, seconds: float) -> None:
        await self._ask("pause", name, seconds)

    async def take(self, name: str, most: int, holder: str, calls: int) -> int:
        granted: int = await self._ask("take", name, most, holder, calls)
        return granted

    async def give_back(self, name: str, holder: str, calls: int) -> None:
        await self._ask("give_back", name, holder, calls)

    async def renew(self, holder: str, held: Mapping[str, int]) -> None:
        await self._ask("renew", holder, dict(held))

    async def _ask(self, method: str, *args: Any) -> Any:
        while True:
            try:
                return await getattr(self._ledger, method).remote(*args)
            except RayTaskError:
                raise
            except RayError as error:
                _LOGGER.warning("the ledger of limits does not answer: %s", error_line(error))
                await asyncio.sleep(ASK_AGAIN_S)


def error_line(error: BaseException) -> str:
    """The last line of an error of Ray, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
