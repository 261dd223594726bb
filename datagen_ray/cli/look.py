"""``status``, ``show`` and ``failures``: looking at a log, which writes and claims nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from datagen_ray.cli.run import storage_options
from datagen_ray.cli.text import echo_lines, shown
from datagen_ray.errors import ConfigError, DatagenError, InvalidItemIdError, ItemViolationError
from datagen_ray.log.events import DatagenEvent, DatagenEventType, DatagenStreamPosition
from datagen_ray.log.fold import (
    DatagenFailure,
    DatagenItemTree,
    FoldedDatagenItem,
    fold_tree,
    group_by_item,
    item_failures,
)
from datagen_ray.log.ids import DatagenItemId
from datagen_ray.log.values import DatagenBlobValue, DatagenValue
from datagen_ray.pipeline.exhaustion import EXHAUSTED_AFTER, exhausting_failures, summary_of
from datagen_ray.pipeline.replay import read_tree
from datagen_ray.store.bulk import Overview
from datagen_ray.store.runs import list_runs
from datagen_ray.store.store import DatagenStore

_WIDTH = 100
_MESSAGE_WIDTH = 400
"""Of what was raised, whose cure tends to stand at the end."""
_ROOTS_A_READ = 1000

LogUri = Annotated[str, typer.Argument(help="path or URL of the log, ending in log.lance")]
StorageOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for an object store, repeatable")
]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]


def add_to(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(show)
    app.command()(failures)


def open_log(log_uri: str, options: list[str] | None) -> DatagenStore:
    """The log, to be read only; one that is not there is an error, never an empty log."""
    return DatagenStore.open(log_uri, read_only=True, storage_options=storage_options(options))


def status(log_uri: LogUri, storage_option: StorageOption = None, as_json: AsJson = False) -> int:
    """Roots by status, steps and failures of the whole log."""
    with open_log(log_uri, storage_option) as store:
        found = store.overview()
    if as_json:
        typer.echo(_json(found.to_dict()))
    else:
        echo_lines(_overview_lines(found))
    return 1 if found.violations else 0


def show(
    log_uri: LogUri,
    item: Annotated[str, typer.Argument(help="an item id, such as 5 or 5/solve:0")],
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """One item: its sub-items, fields, steps, open frames and failures."""
    with open_log(log_uri, storage_option) as store:
        try:
            item_id = DatagenItemId.parse(item)
        except InvalidItemIdError:
            # Not an id, but perhaps the key of a row, which a root id is the safe form of.
            item_id = DatagenItemId.from_source_key(item)
        events = store.events_for_root(item_id.root)
    tree = fold_tree(events)
    path = str(item_id)
    damaged = {error.item_id: error for error in tree.violations}
    if path not in tree.nodes and path not in damaged:
        raise ConfigError(_unknown(log_uri, item, tree))
    below = [
        # In tree order already, and with ids in it that need not parse.
        each
        for each in tree.nodes
        if each.startswith(f"{path}/")
    ]
    failed = {
        each: item_failures(stream)
        for each, stream in group_by_item(events).items()
        if (each == path or each.startswith(f"{path}/")) and each not in damaged
    }
    violation = damaged.get(path)
    folded = tree.nodes[path].item if violation is None else None
    end = _end(events, path)
    if as_json:
        data: dict[str, Any] = {
            "item": None if folded is None else folded.to_dict(),
            "ended": None if end is None else _end_dict(end),
            "open_frames": [] if folded is None else _frames(folded),
            "sub_items": [tree.nodes[each].item.to_dict() for each in below],
            "failures": [
                {"item_id": each, **failure.to_dict()}
                for each in sorted(failed)
                for failure in failed[each]
            ],
            "violations": {
                each: {"code": error.code, "message": str(error)}
                for each, error in sorted(damaged.items())
            },
        }
        typer.echo(_json(data))
    else:
        echo_lines(_item_lines(path, folded, end, tree, below, failed, violation))
    return 1 if violation is not None else 0


def failures(
    log_uri: LogUri,
    run_id: Annotated[str | None, typer.Option("--run", help="of one run only")] = None,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="with the traceback of each")
    ] = False,
    exhausted: Annotated[
        bool, typer.Option("--exhausted", help="only the roots that runs leave alone, and why")
    ] = False,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """Every failure that the log holds: which item, where, what. With --json one object a line."""
    if exhausted and (run_id is not None or traceback):
        raise ConfigError(
            "--exhausted is about all runs, a line a root; leave out the other option"
        )
    with open_log(log_uri, storage_option) as store:
        if exhausted:
            return _exhausted(store, as_json)
        found = store.failures(run_id)
        if run_id is not None and not found:
            _check_known_run(store, log_uri, run_id, storage_options(storage_option))
    for failure in found:
        if as_json:
            typer.echo(_json({"item_id": failure.item_id, **failure.to_dict()}))
        else:
            line = f"{failure.item_id}  {_failure_line(failure)}  run {failure.run_id}"
            typer.echo(shown(line))
            if traceback and failure.error.traceback:
                lines = failure.error.traceback.rstrip().expandtabs().splitlines()
                echo_lines(f"    {line}" if line else "" for line in lines)
    if not found and not as_json:
        typer.echo("no failures")
    if found and not as_json and not traceback:
        typer.echo("with --traceback: where in the code each was raised", err=True)
    return 0


def _exhausted(store: DatagenStore, as_json: bool) -> int:
    """A line for each root that is left alone; 1 if the state of one cannot be told."""
    failed = Counter(failure.item_id for failure in store.failures())
    roots = sorted(
        {
            DatagenItemId.parse(item_id).root_key
            for item_id, count in failed.items()
            if count >= EXHAUSTED_AFTER
        }
    )
    listed = unclear = 0
    for start in range(0, len(roots), _ROOTS_A_READ):
        histories = store.events_for_roots(roots[start : start + _ROOTS_A_READ])
        for root_id, history in histories.items():
            try:
                root = read_tree(root_id, history)
            except DatagenError as error:
                typer.echo(shown(f"{root_id}  {error}"), err=True)
                unclear += 1
                continue
            rows = () if root is None else exhausting_failures(root, EXHAUSTED_AFTER)
            if rows:
                listed += 1
                if as_json:
                    typer.echo(_json({"item_id": root_id, "failures": summary_of(rows)}))
                else:
                    typer.echo(shown(f"{root_id}  {summary_of(rows)}"))
    if not listed and not as_json:
        typer.echo("no exhausted roots")
    return 1 if unclear else 0


def _check_known_run(
    store: DatagenStore, log_uri: str, run_id: str, options: dict[str, str] | None
) -> None:
    known = [term.run_id for term in list_runs(log_uri, options)]
    known += [failure.run_id for failure in store.failures(None)]
    if run_id not in known:
        there = ", ".join(dict.fromkeys(known)) or "none"
        raise ConfigError(f"--run {run_id!r}: no such run in {log_uri}; it has {there}")


def _overview_lines(found: Overview) -> Iterator[str]:
    yield (
        f"roots      {found.items}: {found.completed} completed, {found.filtered} filtered, "
        f"{found.running} running"
    )
    if found.completed_steps:
        yield "steps completed"
        width = max(map(len, found.completed_steps))
        for name, count in found.completed_steps.items():
            yield f"  {name:<{width}}  {count}"
    yield f"failures   {found.failures}"
    for error_type, count in found.failures_by_error_type.items():
        yield f"  {error_type}  {count}"
    for run_id, run in found.failures_by_run.items():
        roots = ", ".join(run.sample_root_item_ids)
        yield f"  in run {run_id}: {run.failures}, roots such as {roots}"
    for item_id, error in sorted(found.violations.items()):
        yield f"damaged    {item_id}: {error}"


def _item_lines(
    path: str,
    folded: FoldedDatagenItem | None,
    end: DatagenEvent | None,
    tree: DatagenItemTree,
    below: list[str],
    failed: dict[str, list[DatagenFailure]],
    violation: ItemViolationError | None,
) -> Iterator[str]:
    if folded is None:
        yield f"{path}  damaged: {violation}"
        return
    yield f"{path}  {folded.status.value}, attempt {folded.last_attempt}"
    if end is not None and (end.position is not None or end.error_type or end.error_dump):
        yield _end_line(end)
    elif end is None and failed.get(path):
        count = len(failed[path])
        yield (
            f"failed {count} time{'s' if count > 1 else ''}, see failures below; "
            "'datagen-ray failures --traceback' has more of each"
        )
    yield "fields"
    for name, field in sorted(folded.fields.items()):
        shown = [_shown(value) for value in field.values]
        text = shown[-1] if field.mode == "set" else f"[{', '.join(shown)}]"
        yield f"  {name} ({field.mode}, {field.field_type}) = {_cut(text)}"
    yield "steps"
    for cursor in folded.trajectory.ordered:
        yield f"  {cursor.item_seq:>5}  {_place(cursor.position)}"
    for position in sorted(folded.trajectory.open_frames, key=lambda each: each.step_index):
        yield f"   open  {_place(position)}"
    if below:
        yield "sub-items"
        depth = path.count("/")
        for each in below:
            indent = "  " * (each.count("/") - depth)
            yield f"{indent}{each}  {tree.nodes[each].item.status.value}"
    for error in tree.violations:
        yield f"damaged  {error.item_id}: {error}"
    lines = [
        f"  {each}  {_failure_line(failure)}" for each in sorted(failed) for failure in failed[each]
    ]
    if lines:
        yield "failures"
        yield from lines


def _end(events: list[DatagenEvent], path: str) -> DatagenEvent | None:
    """The event that ended the item, which says of a filtered one where and why."""
    ended = (
        event
        for event in events
        if event.item_id == path and event.event_type == DatagenEventType.TERMINAL
    )
    return next(ended, None)


def _end_dict(end: DatagenEvent) -> dict[str, Any]:
    return {
        "status": None if end.status is None else str(end.status.value),
        "at": None if end.position is None else end.position.to_dict(),
        "error_type": end.error_type,
        "error_dump": end.error_dump,
        "run_id": end.run_id,
    }


def _end_line(end: DatagenEvent) -> str:
    status = "ended" if end.status is None else end.status.value
    where = "" if end.position is None else f" at {_place(end.position)}"
    said = ": ".join(text for text in (end.error_type, end.error_dump) if text)
    return f"{status}{where}{': ' if said else ''}{_cut(said, _MESSAGE_WIDTH)}"


def _frames(folded: FoldedDatagenItem) -> list[dict[str, Any]]:
    frames = sorted(folded.trajectory.open_frames, key=lambda each: each.step_index)
    return [frame.to_dict() for frame in frames]


def _place(position: DatagenStreamPosition) -> str:
    text = f"{position.step_name}[{position.step_index}] {position.step_kind.value}"
    if position.enclosing_step:
        text += f" in {position.enclosing_step}"
    if position.selector_step:
        text += f" by {position.selector_step}"
    return text


def _failure_line(failure: DatagenFailure) -> str:
    where = "?" if failure.at is None else _place(failure.at.position)
    message = (failure.error.error_dump or "").partition("\n")[0]
    said = f"{failure.error.error_type}: {message}" if message else f"{failure.error.error_type}"
    return f"{where}, attempt {failure.attempt}: {_cut(said, _MESSAGE_WIDTH)}"


def _unknown(log_uri: str, path: str, tree: DatagenItemTree) -> str:
    if not tree.nodes and not tree.violations:
        return (
            f"no item {path!r} in {log_uri}; a root id is the key of its row, and "
            "'datagen-ray items' lists those that the log holds"
        )
    known = ", ".join(sorted(tree.nodes)[:5])
    return f"no item {path!r} in {log_uri}; of that root it has {known}"


def _shown(value: DatagenValue) -> str:
    if isinstance(value.raw, DatagenBlobValue):
        return f"<{value.raw.size} bytes>"
    return json.dumps(value.value, ensure_ascii=False, default=str)


def _cut(text: str, width: int = _WIDTH) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, default=str)
