"""Finding the pipeline that ``FILE.py:NAME`` or ``MODULE:NAME`` names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from datagen_ray.errors import DatagenError, PipelineError
from datagen_ray.pipeline.pipeline import Pipeline

DEFAULT_NAME = "pipeline"


def load_pipeline(target: str) -> tuple[Pipeline, ModuleType]:
    """The pipeline, and the module of the file, which is run to get it.

    The folder of the file goes to the front of the import path, as it does when a script is run;
    for a module it is the working directory, as with ``python -m``.
    Raises :class:`PipelineError`, in one line, for whatever is wrong with the file.
    """
    name, colon, attribute = target.rpartition(":")
    path = Path(name if colon else target)
    attribute = attribute if colon else DEFAULT_NAME
    if path.suffix == ".py":
        if not path.is_file():
            raise PipelineError(f"{path}: no such file; check the path of the pipeline")
        module = _run_file(path)
    elif colon and all(part.isidentifier() for part in name.split(".")):
        module = _import(name)
    else:
        raise PipelineError(
            f"{target!r} names no pipeline; write FILE.py:{DEFAULT_NAME} or MODULE:{DEFAULT_NAME}"
        )
    found = getattr(module, attribute, None)
    if isinstance(found, Pipeline):
        return found, module
    others = sorted(name for name, value in vars(module).items() if isinstance(value, Pipeline))
    has = f"it has {', '.join(others)}" if others else "it has none"
    if found is None:
        raise PipelineError(f"{name or target}: no pipeline named {attribute!r}; {has}")
    raise PipelineError(
        f"{name or target}: {attribute!r} is a {type(found).__name__}, not a Pipeline; {has}"
    )


def _run_file(path: Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A module of the same name that is loaded already must not be taken for this file.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}__pipeline"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PipelineError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except DatagenError as error:
        raise PipelineError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PipelineError(f"{path}{_line(error, path)}: {_said(error)}") from error
    return module


def _import(name: str) -> ModuleType:
    here = str(Path().resolve())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except DatagenError as error:
        raise PipelineError(f"{name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PipelineError(f"{name}: {_said(error)}") from error


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it went wrong."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f", line {lines[-1]}" if lines else ""


def _said(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
