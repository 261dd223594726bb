"""``datagen-ray verify``: look at a whole log and list what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from datagen_ray.cli.look import AsJson, LogUri, StorageOption, open_log
from datagen_ray.cli.text import echo_lines, shown
from datagen_ray.errors import DatagenError
from datagen_ray.store.verify import LogReport

_SHOWN = 50

Blobs = Annotated[bool, typer.Option("--blobs", help="read and check the bytes of all blobs too")]


def add_to(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    log_uri: LogUri,
    blobs: Blobs = False,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """Check every row and item. Exit status: 0 clean, 1 with violations, 2 it cannot be read."""
    try:
        with open_log(log_uri, storage_option) as store:
            report = store.verify(blobs=blobs)
    except DatagenError as error:
        typer.echo(shown(f"datagen-ray: {' '.join(str(error).split())}"), err=True)
        return 2
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        echo_lines(_lines(report))
    return 0 if report.is_clean else 1


def _lines(report: LogReport) -> Iterator[str]:
    by_status = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    yield f"events      {report.events}"
    yield f"items       {report.items} ({report.roots} roots): {by_status}"
    yield f"rows        {', '.join(f'{count} in {level}' for level, count in report.rows.items())}"
    if report.copies:
        yield f"copies      {report.copies} rows repeat an event"
    if report.blobs is not None:
        yield f"blobs       {report.blobs} checked"
    yield f"shards      {len(report.shards)}"
    for shard in report.shards:
        yield f"  {shard.shard_id}  epoch {shard.epoch}, {shard.sstables} SSTables"
    if report.is_clean:
        yield "clean"
        return
    yield f"violations  {sum(report.violation_counts.values())}"
    for violation in report.violations[:_SHOWN]:
        yield f"  {violation.kind}  {violation.message}"
    if len(report.violations) > _SHOWN:
        yield f"  ... and more; --json lists {len(report.violations)} of them"
    for kind in dict.fromkeys(violation.kind for violation in report.violations):
        yield f"{kind}: {kind.meaning}. Cure: {kind.cure}."
