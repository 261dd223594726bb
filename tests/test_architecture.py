"""The layers import downward only, also inside functions; the public surface is explicit."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import datagen_ray
from datagen_ray import errors

PACKAGE = Path(datagen_ray.__file__).parent
LAYERS = ("log", "store", "pipeline", "cluster", "cli")
# What belongs to no layer: values and hooks that all of them may use.
SHARED = {"errors", "clock", "crashpoints", "waiting"}
# A module outside a layer folder stands in the layer named here.
PLACED = {"sources": "store", "testing": "pipeline", "__main__": "cli", "__init__": "cli"}
# Only these layers may import the package.
OWNERS = {"ray": {"cluster"}, "lance": {"store"}, "obstore": {"store"}, "typer": {"cli"}}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def layer_of(module: str) -> str | None:
    first = module.split(".")[0]
    return first if first in LAYERS else PLACED.get(first)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "datagen_ray":
                yield from (f"datagen_ray.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_layers_import_downward_only(module: str, path: Path) -> None:
    layer = layer_of(module)
    if layer is None:
        assert module.split(".")[0] in SHARED, f"{module} belongs to no layer"
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root == "datagen_ray" and rest and hasattr(datagen_ray, rest) is False:
            target = layer_of(rest)
            if target is None:
                assert rest.split(".")[0] in SHARED, f"{module} imports {name}"
            else:
                assert layer is not None, f"{module} imports {name}"
                assert LAYERS.index(target) <= LAYERS.index(layer), f"{module} imports {name}"
        elif root in OWNERS:
            assert layer in OWNERS[root], f"{module} imports {name}"


def test_pyarrow_is_used_in_one_module_of_the_log_layer() -> None:
    users = {
        module
        for module, path in modules()
        if layer_of(module) == "log" and any(n.split(".")[0] == "pyarrow" for n in imports(path))
    }
    assert users == {"log.schema"}


def test_public_names_are_listed_once_and_real() -> None:
    names = datagen_ray.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(datagen_ray, name) for name in names)


def every_error() -> list[type[errors.DatagenError]]:
    found, waiting = [], [errors.DatagenError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return sorted(set(found), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_errors_pickle_with_all_they_carry(cls: type[errors.DatagenError]) -> None:
    extra = {"code": "c", "item_id": "5", "event_ids": ("e",), "index": 3}
    error = cls.__new__(cls)
    error.args = ("what is wrong; what to do",)
    error.__dict__.update(extra)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.args == error.args
    assert copy.__dict__ == error.__dict__
