"""Running a pipeline in one process, without Ray, on a real log.

The same promise as on a cluster, for one machine: what is durable is never run again, and calling
:func:`run_local` once more goes on where the last call, or its crash, left the log. This module
and ``local_run`` are the only ones of the layer that know the store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from datagen_ray.errors import ConfigError
from datagen_ray.pipeline.exhaustion import EXHAUSTED_AFTER
from datagen_ray.pipeline.failures import Redact
from datagen_ray.pipeline.here import HereCalls
from datagen_ray.pipeline.local_run import Hooks, LocalRun, LocalRunSummary
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.placement import refuse_placed
from datagen_ray.sources import (
    Rows,
    RowSource,
    count_keys,
    open_source,
)
from datagen_ray.store.layout import log_uri as log_uri_of


def run_local(
    pipeline: Pipeline,
    rows: str | Path | Rows | RowSource,
    *,
    key: str | None = None,
    root: str | Path | None = None,
    experiment: str = "default",
    log_uri: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    concurrency: int = 64,
    max_threads: int = 64,
    max_root_retries: int = 2,
    exhausted_after: int | None = EXHAUSTED_AFTER,
    retry_exhausted: bool = False,
    seed: int | None = None,
    fsync: bool = True,
    redact: Redact | None = None,
    placed: Literal["refuse", "here"] = "refuse",
    hooks: Hooks | None = None,
) -> LocalRunSummary:
    """Run every root of ``rows`` that has not ended yet, steps of up to ``concurrency`` at once.

    ``rows`` are dicts, a function that returns them, or a path to a file of them; ``key`` names
    the column whose values identify roots, by default the row number. The log is
    ``<root>/datagen_checkpoints/<pipeline>/<experiment>/log.lance``, with ``root`` by default
    ``data``, or lies at ``log_uri``. A root that fails is resumed ``max_root_retries`` times; one
    with ``exhausted_after`` failures in a stream, over all runs, is left alone, unless
    ``retry_exhausted``. Steps that ask for resources or actors are refused, or run in this
    process with ``placed="here"``.
    ``redact`` is by default the pipeline's; ``hooks`` are for :mod:`datagen_ray.testing`.

    Raises ``SourceError``, with nothing written, for keys that are missing, empty or repeated;
    ``RunSupersededError`` or ``WriterFencedError`` when another run took over; ``StorageError``
    when the storage fails. Whatever it raises, the next call goes on.
    """
    if log_uri is not None and root is not None:
        raise ConfigError("give root or log_uri, not both")
    for name, number, least in (
        ("concurrency", concurrency, 1),
        ("max_root_retries", max_root_retries, 0),
    ):
        if type(number) is not int or number < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {number!r}")
    if placed not in ("refuse", "here"):
        raise ConfigError(f"placed={placed!r}; one of 'refuse', 'here'")
    if placed == "refuse":
        refuse_placed(pipeline.steps())
    source = open_source(rows, storage_options=storage_options)
    count_keys(source, key)
    uri = log_uri or log_uri_of(str(root or "data"), pipeline.name, experiment)
    run = LocalRun(
        pipeline=pipeline,
        source=source,
        key=key,
        uri=uri,
        storage_options=storage_options,
        concurrency=concurrency,
        max_root_retries=max_root_retries,
        fsync=fsync,
        hooks=hooks or Hooks(),
    )
    options: dict[str, Any] = {
        "max_in_flight_roots": concurrency,
        "max_threads": max_threads,
        "exhausted_after": None if retry_exhausted else exhausted_after,
        "seed": seed,
        "redact": redact,
        "remote": HereCalls(max_threads) if placed == "here" else None,
    }
    return _in_event_loop(run, options)


def _in_event_loop(run: LocalRun, options: dict[str, Any]) -> LocalRunSummary:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run.run(options))
    # A notebook has a loop already, and one loop cannot run inside another.
    done: list[LocalRunSummary] = []
    failed: list[BaseException] = []

    def in_thread() -> None:
        try:
            done.append(asyncio.run(run.run(options)))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=in_thread, name="datagen-run-local")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


__all__ = ["LocalRunSummary", "run_local"]
