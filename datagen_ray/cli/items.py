"""``datagen-ray items``: the ids of the roots in a log, with how each of them stands."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from datagen_ray.cli.look import LogUri, StorageOption, open_log
from datagen_ray.cli.text import shown


class Status(str, Enum):
    """What can be asked for. A damaged root has no status in the log; here it has one."""

    RUNNING = "running"
    COMPLETED = "completed"
    FILTERED = "filtered"
    DAMAGED = "damaged"


def add_to(app: typer.Typer) -> None:
    app.command()(items)


def items(
    log_uri: LogUri,
    status: Annotated[Status | None, typer.Option(help="roots of that status only")] = None,
    storage_option: StorageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
) -> int:
    """The roots of the log, one a line, with their status, in the order of their ids."""
    with open_log(log_uri, storage_option) as store:
        found = store.root_item_statuses()
    for item_id in sorted({*found, *found.violations}, key=by_value):
        known = found.status(item_id)
        stands = "damaged" if known is None else known.value
        if status is not None and stands != status.value:
            continue
        if as_json:
            typer.echo(json.dumps({"item_id": item_id, "status": stands}, ensure_ascii=False))
        else:
            typer.echo(f"{shown(item_id)}  {stands}")
    return 0


def by_value(root_id: str) -> tuple[bool, int, str]:
    """Whole numbers first, by their value, as row numbers are; then all other keys, as text."""
    is_number = (root_id.isascii() and root_id.isdigit() and root_id[:1] != "0") or root_id == "0"
    return not is_number, len(root_id) if is_number else 0, root_id
