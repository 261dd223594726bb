"""The measures of a worker as Ray's own metrics, which each node exports for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from datagen_ray.cluster.metrics import MEASURES, Measure


class RayMeter:
    """Keeps Ray's metric objects of one process; ``labels`` are put on all of them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._metrics = {measure: self._made(measure) for measure in MEASURES}

    def add(self, measure: Measure, amount: float, step: str = "") -> None:
        self._metrics[measure].inc(amount, tags=self._tags(measure, step))

    def put(self, measure: Measure, value: float) -> None:
        self._metrics[measure].set(value, tags=self._labels)

    def observe(self, measure: Measure, value: float, step: str = "") -> None:
        self._metrics[measure].observe(value, tags=self._tags(measure, step))

    def _tags(self, measure: Measure, step: str) -> dict[str, str]:
        return {**self._labels, "step": step} if measure.by_step else self._labels

    def _made(self, measure: Measure) -> Any:
        keys = (*self._labels, "step") if measure.by_step else tuple(self._labels)
        if measure.kind == "histogram":
            return Histogram(
                measure.name, measure.about, boundaries=list(measure.boundaries), tag_keys=keys
            )
        kind = Counter if measure.kind == "counter" else Gauge
        return kind(measure.name, measure.about, tag_keys=keys)
