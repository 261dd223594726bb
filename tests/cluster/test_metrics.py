"""What a worker counts, and the dashboard that shows it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datagen_ray.cluster import metrics
from datagen_ray.cluster.metrics import MEASURES, Measure, WorkerMetrics
from datagen_ray.log.events import DatagenEvent
from datagen_ray.pipeline.executor import Executor, RootTask
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.steps import step

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana-dashboard.json"


class KeptMeter:
    def __init__(self) -> None:
        self.sums: Counter[tuple[str, str]] = Counter()
        self.times: dict[tuple[str, str], list[float]] = {}
        self.gauges: dict[str, float] = {}

    def add(self, measure: Measure, amount: float, step: str = "") -> None:
        self.sums[measure.name, step] += amount

    def put(self, measure: Measure, value: float) -> None:
        self.gauges[measure.name] = value

    def observe(self, measure: Measure, value: float, step: str = "") -> None:
        self.times.setdefault((measure.name, step), []).append(value)


class AtOnce:
    writer_epoch = "here:1"

    def append_async(self, events: Sequence[DatagenEvent]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class NoBlobs:
    async def load(self, event_id: str) -> bytes:
        raise KeyError(event_id)


def test_steps_checkpoints_retries_and_failures_are_counted() -> None:
    meter = KeptMeter()
    tried: list[int] = []

    @step
    async def first(item: Any) -> dict[str, Any]:
        return {"a": 1}

    @step(retry=Retry(attempts=3, on=(KeyError,), wait_s=0))
    async def flaky(item: Any) -> dict[str, Any]:
        tried.append(1)
        if len(tried) < 3:
            raise KeyError("again")
        return {"b": 1}

    @step
    async def failing(item: Any) -> dict[str, Any]:
        raise ValueError("never")

    async def scene() -> None:
        counted = WorkerMetrics(meter)
        executor = Executor(
            Pipeline("p", [first, flaky, failing]),
            counted.sink(AtOnce()),
            run_id="r",
            blobs=NoBlobs(),
            observe=counted.call,
            sleep=counted.pause,
        )
        await executor.start()
        result = await executor.run(RootTask("x", {"n": 1}))
        counted.root_ended("x", failed=result.status == "failed")
        await asyncio.sleep(0)
        counted.publish({metrics.QUEUED: 3})
        counted.publish({})
        await executor.close()

    asyncio.run(scene())
    assert {step: meter.sums[metrics.STEPS.name, step] for step in ("first", "flaky")} == {
        "first": 1,
        "flaky": 1,
    }
    assert meter.sums[metrics.RETRIES.name, ""] == 2
    assert meter.sums[metrics.FAILURES.name, "failing"] == 1
    assert meter.sums[metrics.CHECKPOINTS.name, ""] == len(meter.times[metrics.COMMIT.name, ""])
    assert meter.sums[metrics.CHECKPOINTS.name, ""] >= 2
    assert len(meter.times[metrics.LATENCY.name, "first"]) == 1
    assert (metrics.LATENCY.name, "failing") not in meter.times
    assert meter.sums[metrics.ROOTS.name, ""] == meter.sums[metrics.ROOTS_FAILED.name, ""] == 1
    assert meter.gauges == {metrics.QUEUED.name: 3}


def test_names_carry_their_unit_or_say_what_they_count() -> None:
    for measure in MEASURES:
        assert re.fullmatch(r"datagen_ray_[a-z_]+", measure.name)
        assert (measure.kind == "histogram") == measure.name.endswith("_seconds")


def test_the_dashboard_shows_every_measure_and_no_other() -> None:
    # Ray puts its name before each, and Prometheus the kind behind.
    shown = set(re.findall(r"ray_(datagen_ray_[a-z_]+)", DASHBOARD.read_text()))
    endings = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    assert shown == {measure.name + endings[measure.kind] for measure in MEASURES}
