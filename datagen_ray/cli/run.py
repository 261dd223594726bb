"""``datagen-ray run``: a pipeline over a source, on Ray."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.console import Console

from datagen_ray.cli.load import load_pipeline
from datagen_ray.cli.progress import RunDisplay, summary_lines
from datagen_ray.cli.text import shown
from datagen_ray.cluster.actors import RayOptions
from datagen_ray.cluster.maintainer import MaintainerOptions
from datagen_ray.cluster.run import run as run_pipeline
from datagen_ray.cluster.summary import RunSummary
from datagen_ray.errors import ConfigError

_MAX_LISTED_FAILURES = 10


def add_to(app: typer.Typer) -> None:
    app.command()(run)


def run(
    pipeline: Annotated[str, typer.Argument(help="FILE.py:NAME or MODULE:NAME of the pipeline")],
    source: Annotated[
        str, typer.Option(help="rows: .parquet, .jsonl, .csv or .lance, a file or a folder")
    ],
    root: Annotated[str, typer.Option(help="durable folder or URL that logs are kept under")],
    experiment: Annotated[str, typer.Option(help="name of the experiment; again: goes on")],
    key: Annotated[
        str | None, typer.Option(help="column that names the rows; default: the row number")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "--max-workers", help="worker processes, at the most")
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="workers at first; more follow while there is more to do")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="roots whose steps one worker runs at once")
    ] = 64,
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster; default: one of its own")
    ] = None,
    storage_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for an object store, repeatable")
    ] = None,
    max_retries: Annotated[int, typer.Option(help="how often a root that fails is resumed")] = 2,
    max_failures: Annotated[
        int | None, typer.Option(help="end early when more roots than this failed")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="as --max-failures 0")] = False,
    retry_exhausted: Annotated[
        bool, typer.Option("--retry-exhausted", help="also run roots that failed in too many runs")
    ] = False,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="exit with 0 though roots failed")
    ] = False,
    drain_s: Annotated[float, typer.Option(help="seconds that running steps get to end")] = 20,
    silence_s: Annotated[
        float, typer.Option(help="seconds without an answer after which a worker counts as lost")
    ] = 60,
    no_maintainer: Annotated[
        bool, typer.Option("--no-maintainer", help="tidy the log at the end of the run only")
    ] = False,
    maintainer_cpus: Annotated[
        float, typer.Option(help="CPUs that the maintainer reserves; 0: it takes no worker's place")
    ] = 0,
    no_fsync: Annotated[
        bool, typer.Option("--no-fsync", help="faster, but a power loss can take back steps")
    ] = False,
    worker_logs: Annotated[
        bool, typer.Option("--worker-logs", help="show what workers print")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="the summary as JSON, the last line of the output")
    ] = False,
) -> int:
    """Run a pipeline over a source; run it again to go on where it was."""
    if fail_fast and max_failures is not None:
        raise ConfigError("--fail-fast is --max-failures 0; give one of the two")
    if key == "":
        raise ConfigError("--key is empty; name a column, or leave --key out for the row number")
    loaded, module = load_pipeline(pipeline)
    # Ray tells of workers that died on standard output, which is for the summary.
    with RunDisplay(Console(stderr=True)) as display, redirect_stdout(sys.stderr):
        summary = run_pipeline(
            loaded,
            source,
            root=root,
            experiment=experiment,
            key=key,
            workers=workers,
            min_workers=min_workers,
            concurrency=concurrency,
            address=address,
            storage_options=storage_options(storage_option),
            max_root_retries=max_retries,
            max_failures=0 if fail_fast else max_failures,
            retry_exhausted=retry_exhausted,
            drain_s=drain_s,
            silence_s=silence_s,
            maintainer=None if no_maintainer else MaintainerOptions(num_cpus=maintainer_cpus),
            fsync=not no_fsync,
            ray_options=RayOptions(worker_logs=worker_logs),
            listener=display,
            by_value=(module,),
        )
    show_summary(summary, as_json=as_json)
    return 0 if summary.ok or allow_failures else 1


def show_summary(summary: RunSummary, *, as_json: bool) -> None:
    """Failures on standard error, the summary on standard output."""
    for failure in summary.failures[:_MAX_LISTED_FAILURES]:
        typer.echo(shown(f"failed: {failure.root_id}: {failure.error}"), err=True)
    if summary.failed > _MAX_LISTED_FAILURES:
        more = summary.failures[_MAX_LISTED_FAILURES:]
        ids = ", ".join(shown(failure.root_id) for failure in more)
        rest = ", ..." if summary.failed > len(summary.failures) else ""
        typer.echo(
            f"failed, too: {ids}{rest}\n{summary.failed} failed; "
            f"what steps raised: datagen-ray failures {summary.log_uri}",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
    else:
        typer.echo("\n".join(summary_lines(summary)))


def storage_options(pairs: list[str] | None) -> dict[str, str] | None:
    """``NAME=VALUE`` texts as a mapping."""
    options = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(f"--storage-option {pair!r} is not NAME=VALUE")
        options[name] = value
    return options or None
