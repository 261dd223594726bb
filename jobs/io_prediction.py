"""Makes a "predict the output of this code" data set from the installed standard library.

    python jobs/io_prediction.py [--limit N] [--workers N] [--root DIR] [--seed N] ...
    ray job submit --working-dir . -- python jobs/io_prediction.py

Every pure function that is found becomes a root, keyed ``module.qualname``; what happens to it is
told in ``jobs.io_pipeline``. The run can be killed at any moment: the same command goes on where
it was, and ends with the same rows. A command that finds all roots done skips every one.

Exit status: 0 all is well, 1 some functions failed or the run broke off, 2 the command is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

# As a script this file has its own folder first on the path, and workers import what the pipeline
# names as ``jobs.<module>``: so it is the folder above that has to be there, and only that one.
_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _FOLDER]
if str(_FOLDER.parent) not in sys.path:
    sys.path.insert(0, str(_FOLDER.parent))

from rich.console import Console  # noqa: E402

import datagen_ray as dg  # noqa: E402
from datagen_ray.cli.progress import RunDisplay  # noqa: E402
from datagen_ray.cluster.run import run  # noqa: E402
from jobs.io_pipeline import PIPELINE_NAME, make_pipeline, pipeline, row_of  # noqa: E402
from jobs.output import Written, rows_of_root, write_rows  # noqa: E402
from jobs.stdlib_functions import StdlibFunction, discover  # noqa: E402

__all__ = ["PIPELINE_NAME", "main", "pipeline"]


def select(functions: Sequence[StdlibFunction], limit: int | None) -> list[StdlibFunction]:
    """``limit`` of the functions, or all: always the same ones, from all over the library.

    The order is that of a hash of the key, so that a smaller limit takes a part of a larger one
    and long-running neighbours do not follow one another.
    """
    mixed = sorted(functions, key=lambda f: hashlib.sha256(f.key.encode()).digest())
    return mixed if limit is None else mixed[:limit]


def completed_rows(log_uri: str) -> Iterator[dict[str, str]]:
    """The rows of every completed root of the log."""
    with dg.DatagenStore.open(log_uri, read_only=True) as store:
        statuses = store.root_item_statuses(None)
        done = [i for i in statuses if statuses.status(i) is dg.DatagenItemStatus.COMPLETED]
        lookups = store.fold_items(sorted(done))
    for lookup in lookups.values():
        folded = lookup.folded()
        if folded is not None:
            yield from rows_of_root({k: v.value.value for k, v in folded.fields.items()})


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="io_prediction.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=_positive, help="take this many functions only")
    parser.add_argument("--workers", type=_positive, help="worker processes (default: one a CPU)")
    parser.add_argument("--root", default="data", help="folder or URI for the log (default: data)")
    parser.add_argument("--experiment", help="name of the log below the root (default: seed-N)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn follows from it")
    parser.add_argument("--address", help="a running Ray cluster (default: start one here)")
    parser.add_argument("--output", help="folder for the data set (default: ROOT/io_prediction)")
    options = parser.parse_args(arguments)
    # Items remember what was drawn for them, so another seed must not go on in the same log.
    options.experiment = options.experiment or f"seed-{options.seed}"
    remote = "://" in options.root
    if options.output is None:
        options.output = os.path.join("data" if remote else options.root, PIPELINE_NAME)
    if not remote:
        # Workers may stand in another folder than this process.
        options.root = os.path.abspath(options.root)
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _check_folder(folder: str, option: str) -> None:
    place = Path(folder).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise dg.ConfigError(f"{place} is no folder that can be written to; pass another {option}")


def _report(summary: Any, written: Written) -> None:
    if summary.skipped == summary.roots_total:
        print(f"all {summary.roots_total} functions were done already: every root was skipped")
    else:
        print(
            f"{summary.roots_total} functions: {summary.completed} completed, "
            f"{summary.filtered} filtered, {summary.failed} failed, {summary.skipped} skipped, "
            f"{summary.resumed} resumed, in {summary.elapsed_s:.1f} s "
            f"({summary.steps_executed} steps, {summary.checkpoints} checkpoints)"
        )
    print(f"{written.rows} examples of {written.functions} functions written to")
    print(f"  {written.jsonl}")
    print(f"  {written.parquet}")
    print(f"log: {summary.log_uri}")
    example = "math.gcd" if written.item is None else written.item
    print(f"look at an item: {_command()} show {summary.log_uri} {example}")


def _command() -> str:
    """The command line as this shell can call it: its name alone where it is on the path."""
    if shutil.which("datagen-ray"):
        return "datagen-ray"
    beside = Path(sys.executable).with_name("datagen-ray")
    if not beside.exists():
        return f"{sys.executable} -m datagen_ray"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _run(options: argparse.Namespace) -> int:
    if "://" not in options.root:
        _check_folder(options.root, "--root")
    _check_folder(options.output, "--output")
    rows = [row_of(function) for function in select(discover(), options.limit)]
    with RunDisplay(Console(stderr=True)) as display:
        summary = run(
            make_pipeline(options.seed),
            rows,
            key="function",
            root=options.root,
            experiment=options.experiment,
            workers=options.workers,
            address=options.address,
            listener=display,
        )
    written = write_rows(completed_rows(summary.log_uri), Path(options.output), options.experiment)
    _report(summary, written)
    for failure in summary.failures:
        print(f"failed: {failure.root_id}: {failure.error}", file=sys.stderr)
    return 0 if summary.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the exit status."""
    options = _parse(arguments)
    try:
        return _run(options)
    except dg.InputError as error:
        print(f"io_prediction: {error}", file=sys.stderr)
        return 2
    except dg.DatagenError as error:
        print(f"io_prediction: {error}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("io_prediction: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
