"""The commands together, and how errors end them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from datagen_ray.cli import export, items, look, maintain, repair, run, verify
from datagen_ray.cli.text import shown
from datagen_ray.cluster.termination import was_terminated
from datagen_ray.errors import DatagenError, InputError, LogNotFoundError

app = typer.Typer(
    name="datagen-ray",
    help="Resumable synthetic-data pipelines on Ray, every step an event in one Lance log.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"datagen-ray {version('datagen-ray')}")
        raise typer.Exit()


@app.callback()
def _options(
    show: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="print the version and end"
        ),
    ] = False,
) -> None:
    """Only so that typer knows the option."""


run.add_to(app)
look.add_to(app)
items.add_to(app)
export.add_to(app)
verify.add_to(app)
maintain.add_to(app)
repair.add_to(app)

# Typer brings a click of its own in some versions and uses the installed one in others; what it
# exports is a subclass of the right base either way.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
INTERRUPTED = 130
TERMINATED = 143
_WHEN_INTERRUPTED = {
    "run": "the same command goes on where this one was",
    "maintain": "the log is whole, and the next pass does what was left",
}
_BAD_INPUT = (InputError, LogNotFoundError)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status."""
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. A traceback means a bug of this package or of a step."""
    command = typer.main.get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = command.main(
            args=given,
            prog_name="datagen-ray",
            standalone_mode=False,
        )
    except typer.Exit as exited:
        # Some versions of typer turn the interrupt of the keyboard into an exit of their own.
        return _interrupted(given) if exited.exit_code == INTERRUPTED else int(exited.exit_code)
    except _UsageError as error:
        return _say(f"{_told(error).rstrip('.')}; see {_command_of(error)} --help", 2)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted(given)
    except _BAD_INPUT as error:
        return _say(str(error), 2)
    except DatagenError as error:
        return _say(str(error), 1)
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    status = result if isinstance(result, int) else 0
    return _interrupted(given) if status == INTERRUPTED else status


def _interrupted(given: Sequence[str]) -> int:
    """By Ctrl-C, or by SIGTERM, which a run takes for one."""
    command = next((each for each in given if not each.startswith("-")), "")
    rest = _WHEN_INTERRUPTED.get(command, "nothing was written")
    if was_terminated():
        return _say(f"ended by SIGTERM; {rest}", TERMINATED)
    return _say(f"interrupted; {rest}", INTERRUPTED)


def _command_of(error: Exception) -> str:
    """The command whose help tells more, such as ``datagen-ray export``."""
    return str(getattr(getattr(error, "ctx", None), "command_path", None) or "datagen-ray")


def _told(error: Exception) -> str:
    told = getattr(error, "format_message", None)
    return str(told() if callable(told) else error)


def _say(text: str, status: int) -> int:
    typer.echo(shown(f"datagen-ray: {' '.join(text.split())}"), err=True)
    return status
