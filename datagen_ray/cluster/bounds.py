"""Which numbers the options of a run may be; looked at before anything else is."""

from __future__ import annotations

import math

from datagen_ray.cluster.actors import RayOptions
from datagen_ray.cluster.maintainer import MaintainerOptions
from datagen_ray.errors import ConfigError


def check_numbers(
    *,
    workers: int | None,
    min_workers: int | None,
    concurrency: int,
    max_root_retries: int,
    max_failures: int | None,
    drain_s: float,
    silence_s: float,
    ray_options: RayOptions,
    maintainer: MaintainerOptions | None,
) -> None:
    """Raises ConfigError that names the first option which is out of its range."""
    _at_least(1, workers=workers, min_workers=min_workers, concurrency=concurrency)
    _at_least(0, max_retries=max_root_retries, max_failures=max_failures, drain_s=drain_s)
    _above_zero(silence_s=silence_s)
    _at_least(0, num_cpus=ray_options.num_cpus)
    _at_least(1, cluster_cpus=ray_options.cluster_cpus)
    if workers is not None and min_workers is not None and min_workers > workers:
        raise ConfigError(
            f"min_workers is {min_workers}; it must be at most the number of workers, {workers}"
        )
    if maintainer is not None:
        _at_least(0, maintainer_cpus=maintainer.num_cpus, maintainer_after_s=maintainer.after_s)
        _above_zero(
            maintainer_interval_s=maintainer.interval_s, maintainer_lease_s=maintainer.lease_s
        )


def _at_least(least: int, **numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} is {value:g}; it must be at least {least}")


def _above_zero(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}; it must be greater than 0")
