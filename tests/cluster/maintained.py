"""A run with a maintainer that is always at work, for tests."""

from __future__ import annotations

from datagen_ray.cluster.maintainer import MaintainerOptions
from datagen_ray.store.maintenance import MaintenanceOptions

EAGER = MaintainerOptions(
    after_s=0,
    interval_s=0.2,
    lease_s=2.0,
    passes=MaintenanceOptions(small_fragments=2, grace_s=0, wal_retention_s=0),
)
