"""Running a pipeline on Ray: the one call that a job makes.

A cluster is found in this order: the one that this process joined already, the ``address`` given,
the one named by ``RAY_ADDRESS`` (which ``ray job submit`` sets), and else one is started for this
run, on this machine alone, and ended with it.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from datagen_ray.clock import new_run_id
from datagen_ray.cluster.actors import RayFleet, RayOptions, pickle_pipeline
from datagen_ray.cluster.bounds import check_numbers
from datagen_ray.cluster.driver import Driver, DriverConfig
from datagen_ray.cluster.maintainer import MaintainerConfig, MaintainerOptions
from datagen_ray.cluster.messages import RunCounts, WorkerConfig
from datagen_ray.cluster.shared_actors import SharedActors, cpus_for_steps
from datagen_ray.cluster.step_processes import StepSource
from datagen_ray.cluster.summary import ProgressListener, RunSummary, Silent
from datagen_ray.errors import ConfigError, DatagenError, SourceError
from datagen_ray.log.events import DatagenItemStatus
from datagen_ray.pipeline.exhaustion import EXHAUSTED_AFTER
from datagen_ray.pipeline.failures import Redact
from datagen_ray.pipeline.pipeline import Pipeline, tree_changes
from datagen_ray.sources import Rows, RowSource, count_keys, open_source, source_rows
from datagen_ray.store.bulk import RootStatuses
from datagen_ray.store.layout import log_uri as log_uri_of
from datagen_ray.store.maintenance import finish_log
from datagen_ray.store.runs import (
    RunTerm,
    begin_run,
    check_not_superseded,
    check_roots_by,
    claim_all_shards,
    latest_run,
    roots_by,
)
from datagen_ray.store.store import DatagenStore

_JOB_FOLDER = "runtime_resources"
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
DEFAULT_MAINTAINER = MaintainerOptions()


def run(
    pipeline: Pipeline,
    source: str | Path | Rows | RowSource,
    *,
    root: str | Path,
    experiment: str,
    key: str | None = None,
    workers: int | None = None,
    min_workers: int | None = None,
    concurrency: int = 64,
    address: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    max_root_retries: int = 2,
    max_failures: int | None = None,
    retry_exhausted: bool = False,
    drain_s: float = 20.0,
    silence_s: float = 60.0,
    fsync: bool = True,
    ray_options: RayOptions | None = None,
    maintainer: MaintainerOptions | None = DEFAULT_MAINTAINER,
    listener: ProgressListener | None = None,
    by_value: Sequence[ModuleType] = (),
    redact: Redact | None = None,
) -> RunSummary:
    """Run every root of ``source`` that has not ended yet, and say how it went.

    The log is ``<root>/datagen_checkpoints/<pipeline>/<experiment>/log.lance``; calling this again
    with the same names goes on where it was. ``key`` is the column whose values name the roots,
    by default the row number. ``workers`` (by default one a CPU of an own cluster, else 2) are
    processes that own a shard each and run steps of up to ``concurrency`` roots at once; with
    ``min_workers`` so many are asked for at first, and one more, up to ``workers``, whenever all of
    them are at work and there are roots that none has in hand. A root that fails
    is resumed ``max_root_retries`` times, then counted as failed; the next run tries it again,
    until it failed too often over all runs, and with ``retry_exhausted`` even then. More than
    ``max_failures`` such roots end the run early.
    ``maintainer`` says when a run that goes on for long has one; None: never.
    A worker that answers nothing for ``silence_s`` counts as lost.
    ``by_value`` are modules whose code is sent to the workers. ``redact`` is by default the
    pipeline's.

    Raises an ``InputError``, with nothing written, for what cannot be right;
    ``RunSupersededError`` when a later run took over; ``ClusterLostError`` when Ray went away. All
    of them leave a log from which the next call goes on.
    """
    began = time.monotonic()
    said = listener or Silent()
    check_numbers(
        workers=workers,
        min_workers=min_workers,
        concurrency=concurrency,
        max_root_retries=max_root_retries,
        max_failures=max_failures,
        drain_s=drain_s,
        silence_s=silence_s,
        ray_options=ray_options or RayOptions(),
        maintainer=maintainer,
    )
    uri = log_uri_of(_durable_root(str(root)), pipeline.name, experiment)
    said.phase("checking the source")
    rows = open_source(source)
    total = count_keys(rows, key)
    if not total and isinstance(source, str | Path):
        raise SourceError(f"{source}: the source has no rows, so there is nothing to run")
    _check_writable(uri)
    if redact is not None:
        pipeline = pipeline.redacting(redact)
    pickled = pickle_pipeline(pipeline, by_value)
    options = _ray_options(ray_options or RayOptions(), address, workers)
    count = workers or options.cluster_cpus or 2
    if options.cluster_cpus is not None:
        more = cpus_for_steps(pipeline, os.cpu_count() or 1)
        options = replace(options, cluster_cpus=options.cluster_cpus + more)
    fingerprint = pipeline.fingerprint()
    run_id = f"{new_run_id()}-{fingerprint[:8]}"
    fleet = RayFleet(options)
    if options.address is not None:
        # An address that is wrong is found out before anything is written.
        fleet.open()
    said.phase(f"claiming {uri}")
    with DatagenStore.open(uri, storage_options=storage_options, fsync=fsync) as store:
        previous = latest_run(uri, storage_options)
        check_roots_by(previous, key)
        term = begin_run(
            uri,
            run_id,
            pipeline_tree=pipeline.tree(),
            fingerprint=fingerprint,
            storage_options=storage_options,
            origin=f"{socket.gethostname()}:{os.getpid()}",
            roots_by=roots_by(key),
            fsync=fsync,
        )
        claim_all_shards(uri, storage_options, fsync=fsync)
        said.phase("reading the log")
        statuses = store.root_item_statuses(None)
    _report_changes(said, previous, pipeline, statuses)
    fleet.name = f"datagen_ray/{pipeline.name}/{experiment}/{run_id}"
    fleet.config = WorkerConfig(
        log_uri=uri,
        slot="",
        term=replace(term, pipeline_tree=None),
        pipeline=pickled,
        import_paths=import_paths(),
        concurrency=concurrency,
        exhausted_after=None if retry_exhausted else max(EXHAUSTED_AFTER, max_root_retries + 1),
        storage_options=storage_options,
        fsync=fsync,
        drain_s=drain_s,
        labels={"pipeline": pipeline.name, "experiment": experiment},
    )
    fleet.shared = SharedActors(pipeline, StepSource(pickled, import_paths()), fleet.name)
    slots = tuple(f"worker-{number}" for number in range(count))
    if maintainer is not None:
        fleet.maintenance = MaintainerConfig(
            log_uri=uri,
            term=fleet.config.term,
            slots=slots,
            options=maintainer,
            storage_options=storage_options,
            fsync=fsync,
        )
    ownership = LogOwnership(uri, term, storage_options, fsync)
    driver = Driver(
        DriverConfig(
            slots=slots,
            least=min_workers,
            concurrency=concurrency,
            max_root_retries=max_root_retries,
            max_failures=max_failures,
            drain_s=drain_s,
            silence_s=silence_s,
            maintain_after_s=math.inf if maintainer is None else maintainer.after_s,
        ),
        fleet=fleet,
        ownership=ownership,
        rows=source_rows(rows, key),
        statuses=LogStatuses(statuses),
        total=total,
        listener=said,
    )
    try:
        counts = _run_to_end(driver)
    finally:
        fleet.close()
    _report_early_end(said, counts, max_failures)
    said.phase("tidying the log")
    ownership.finish(said)
    return RunSummary.of(counts, run_id=run_id, log_uri=uri, elapsed_s=time.monotonic() - began)


class LogOwnership:
    """The driver's own acts on the log."""

    def __init__(
        self, uri: str, term: RunTerm, storage_options: Mapping[str, str] | None, fsync: bool
    ) -> None:
        self._uri = uri
        self._term = term
        self._storage_options = storage_options
        self._fsync = fsync

    def claim_shard(self, slot: str) -> None:
        """Take the shard from whoever holds it, and let it go again, flushed."""
        DatagenStore.open(
            self._uri,
            shard_id=slot,
            storage_options=self._storage_options,
            create=False,
            fsync=self._fsync,
        ).close()

    def finish(self, said: ProgressListener) -> None:
        """Leave the log small and whole for plain readers.

        The run has ended well by now, so what cannot be tidied is said and left to the next one.
        """
        try:
            report = finish_log(
                self._uri,
                storage_options=self._storage_options,
                fsync=self._fsync,
                check_not_superseded=self.check_not_superseded,
            )
        except DatagenError as error:
            said.note(f"the log was not tidied: {error}")
            return
        for failure in report.failures:
            said.note(f"the log was not tidied, {failure.part}: {failure.error}")

    def check_not_superseded(self) -> None:
        check_not_superseded(self._uri, self._term, self._storage_options)


class LogStatuses:
    """What the log knew of each root when the run began."""

    def __init__(self, statuses: RootStatuses) -> None:
        self._statuses = statuses

    def is_terminated(self, root_id: str) -> bool:
        return self._statuses.is_terminated(root_id)

    def known(self, root_id: str) -> bool:
        """Damaged roots are known too: they must not be run from scratch."""
        return root_id in self._statuses or root_id in self._statuses.violations

    def running(self) -> Iterator[str]:
        return iter(self._statuses.with_status(DatagenItemStatus.RUNNING))


def import_paths() -> tuple[str, ...]:
    """The folders of this process's own modules, so that workers find them too.

    Those below the working directory are relative to it, as it may lie elsewhere on other nodes.
    """
    here = os.path.realpath(os.getcwd())
    kept_by_python = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [os.path.realpath(sysconfig.get_paths()[name]) for name in kept_by_python]
    found: list[str] = []
    for entry in sys.path:
        path = os.path.realpath(entry or here)
        if not os.path.isdir(path) or any(_is_below(path, each) for each in installed):
            continue
        found.append(os.path.relpath(path, here) if _is_below(path, here) else path)
    return tuple(dict.fromkeys(found))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _durable_root(root: str) -> str:
    """The root as every worker can use it: absolute, whatever its own working directory is."""
    if not root or "://" in root:
        return root
    if not os.path.isabs(root) and _JOB_FOLDER in os.getcwd():
        raise ConfigError(
            f"the root {root!r} would lie in the working directory that Ray made for this job and "
            "will remove; pass an absolute path that all nodes share, or a URL"
        )
    return os.path.abspath(root)


def _check_writable(uri: str) -> None:
    """Refuse a local place that cannot be written to, by trying, and leave no trace."""
    if "://" in uri:
        return
    place = Path(uri).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ConfigError(
            f"{place} is not a folder, so no log can be kept at {uri}; pass another root"
        )
    try:
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written to ({error.strerror}), so no log can be kept at {uri}; "
            "pass another root or change its permissions"
        ) from error


def _ray_options(options: RayOptions, address: str | None, workers: int | None) -> RayOptions:
    address = address or options.address or os.environ.get("RAY_ADDRESS") or None
    if address not in (None, "local"):
        return replace(options, address=address)
    _keep_token_in_memory()
    cpus = options.cluster_cpus or max(os.cpu_count() or 1, workers or 1)
    return replace(options, address=None, cluster_cpus=cpus)


def _keep_token_in_memory() -> None:
    """A cluster of our own is guarded by a token that nobody else knows and no file holds.

    Ray listens on every interface, so an own cluster without a token would run anybody's code.
    Left alone, Ray would write a token into the home folder, which may not be writable.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if any(os.environ.get(name) for name in _TOKEN_VARIABLES):
        return
    if not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _report_changes(
    said: ProgressListener, previous: RunTerm | None, pipeline: Pipeline, statuses: RootStatuses
) -> None:
    if previous is None or not isinstance(previous.pipeline_tree, Mapping):
        return
    if previous.fingerprint == pipeline.fingerprint():
        return
    said.note(f"the pipeline changed since run {previous.run_id}:")
    for change in tree_changes(previous.pipeline_tree, pipeline.tree()):
        said.note(f"  {change}")
    running = statuses.counts()[DatagenItemStatus.RUNNING.value]
    said.note(
        f"  running roots that were begun before: {running}; roots that ended stay as they are"
    )


def _report_early_end(said: ProgressListener, counts: RunCounts, most: int | None) -> None:
    left = counts.roots_total - counts.ended
    if most is not None and counts.failed > most and left > 0:
        said.note(
            f"ended early: {counts.failed} root(s) failed, and max_failures is {most}; {left} of "
            f"{counts.roots_total} roots have not ended, the same command goes on with them"
        )


def _run_to_end(driver: Driver) -> RunCounts:
    """Runs the driver, also for a caller who is inside an event loop of their own."""
    if not _inside_a_loop():
        return asyncio.run(driver.run())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, driver.run()).result()


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


__all__ = ["MaintainerOptions", "RayOptions", "import_paths", "run"]
