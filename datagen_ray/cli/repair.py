"""``datagen-ray repair``: set aside what a power loss left cut off."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from datagen_ray.cli.look import AsJson, LogUri
from datagen_ray.store.repair import repair_log
from datagen_ray.store.storage import LogStorage

DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and do nothing")]


def add_to(app: typer.Typer) -> None:
    app.command()(repair)


def repair(log_uri: LogUri, dry_run: DryRun = False, as_json: AsJson = False) -> int:
    """Set aside files that a power loss left cut off. Stop all that uses the log first.

    For logs on a local disk. Exit status: 0 the log is whole (now), 1 acknowledged rows may be
    lost, so nothing was done.
    """
    repairs = repair_log(LogStorage(log_uri), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "repairs": [asdict(each) for each in repairs]}))
        return 0
    done = "would be set aside" if dry_run else "set aside"
    for each in repairs:
        typer.echo(f"{each.kind} {each.number}  {done}: {each.path}\n  {each.reason}")
    if not repairs:
        typer.echo("nothing to repair")
    return 0
