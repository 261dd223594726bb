"""``datagen-ray maintain``: keep a log small and quick to read."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Annotated

import typer

from datagen_ray.cli.look import AsJson, LogUri, StorageOption
from datagen_ray.cli.run import storage_options
from datagen_ray.cli.text import echo_lines
from datagen_ray.clock import new_run_id
from datagen_ray.errors import ConfigError
from datagen_ray.store.bounds import LONGEST_S
from datagen_ray.store.collect import GRACE_S, WAL_RETENTION_S
from datagen_ray.store.compaction import SMALL_FRAGMENTS, VERSION_RETENTION_S
from datagen_ray.store.lease import LEASE_S, MaintenanceLease
from datagen_ray.store.maintenance import (
    MaintenanceOptions,
    MaintenanceReport,
    maintain_once,
    maintain_until,
)

Once = Annotated[bool, typer.Option("--once", help="one pass, then end; else until interrupted")]
Interval = Annotated[float, typer.Option(help="seconds between two passes")]
Grace = Annotated[float, typer.Option(help="seconds that a merged SSTable stays for its readers")]
WalRetention = Annotated[float, typer.Option(help="seconds that a WAL entry stays at least")]
VersionRetention = Annotated[
    float, typer.Option(help="seconds that an old version stays; more than the longest export")
]
SmallFragments = Annotated[int, typer.Option(help="so many small fragments are compacted")]
LeaseTime = Annotated[
    float, typer.Option(help="seconds of silence after which a maintainer is replaced")
]


def add_to(app: typer.Typer) -> None:
    app.command()(maintain)


def maintain(
    log_uri: LogUri,
    once: Once = False,
    interval_s: Interval = 300.0,
    grace_s: Grace = GRACE_S,
    wal_retention_s: WalRetention = WAL_RETENTION_S,
    version_retention_s: VersionRetention = VERSION_RETENTION_S,
    small_fragments: SmallFragments = SMALL_FRAGMENTS,
    lease_s: LeaseTime = LEASE_S,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """Merge, compact, index and collect, beside whatever runs. Takes no shard from anybody.

    Without --once it takes part in the election of one maintainer, and passes until interrupted.
    """
    _check_numbers(
        interval_s=interval_s,
        lease_s=lease_s,
        grace_s=grace_s,
        wal_retention_s=wal_retention_s,
        version_retention_s=version_retention_s,
        small_fragments=small_fragments,
    )
    options = MaintenanceOptions(
        small_fragments=small_fragments,
        version_retention_s=version_retention_s,
        grace_s=grace_s,
        wal_retention_s=wal_retention_s,
    )
    storage = storage_options(storage_option)
    if once:
        report = maintain_once(log_uri, storage_options=storage, options=options)
        _show(report, as_json)
        return 1 if report.failures or report.held_back else 0
    holder = f"{socket.gethostname()}:{os.getpid()}:{new_run_id()}"
    maintain_until(
        threading.Event(),
        log_uri,
        MaintenanceLease(log_uri, holder, lease_s=lease_s, storage_options=storage),
        interval_s=interval_s,
        storage_options=storage,
        options=options,
        on_report=lambda report: _show(report, as_json),
    )
    return 0


def _check_numbers(**numbers: float) -> None:
    """Refuse what no time or count can be, before the log is looked at."""
    for name, value in numbers.items():
        option = f"--{name.replace('_', '-')}"
        above_zero = name in ("interval_s", "lease_s")
        if not 0 <= value <= LONGEST_S or (above_zero and value == 0):
            must = "greater than 0" if above_zero else "0 or more"
            if value > LONGEST_S:
                must = f"at most {LONGEST_S:.0f}"
            raise ConfigError(f"{option} is {value:g}; it must be {must}")
        if name == "small_fragments" and value < 1:
            raise ConfigError(f"{option} is {value:g}; it must be at least 1")


def _show(report: MaintenanceReport, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        echo_lines(_lines(report))


def _lines(report: MaintenanceReport) -> Iterator[str]:
    done = report.to_dict()
    yield (
        f"merged      {done['events_merged']} events of {done['generations_merged']} generations, "
        f"{done['pending_generations']} pending"
    )
    yield f"compacted   {done['fragments_removed']} fragments into {done['fragments_added']}"
    yield (
        f"indexed     {len(done['indexes_created'])} made, {len(done['indexes_extended'])} "
        f"extended, {done['unindexed_rows'] or 0} rows not covered"
    )
    yield (
        f"removed     {done['versions_removed']} versions, {done['wal_entries_removed']} WAL "
        f"entries, {done['sstables_removed']} SSTables, {done['leftovers_removed']} leftovers, "
        f"{done['bytes_removed']} bytes"
    )
    for shard, generations in report.held_back.items():
        yield f"held back   generations {generations} of shard {shard}: events with other content"
    for failure in done["failures"]:
        yield f"failed      {failure}"
