"""A pipeline: a tree of steps under one name, checked when it is built.

Vocabulary: a *node* is one place in the tree; the *tree* is its JSON form; the *fingerprint* is a
hash of that. Bodies of functions are in neither: they may change between runs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from datagen_ray.errors import PipelineError
from datagen_ray.log.values import json_text
from datagen_ray.pipeline.codec import Codec
from datagen_ray.pipeline.codecs import FieldType, FieldTypes, declare_fields
from datagen_ray.pipeline.failures import Redact, redact_secrets
from datagen_ray.pipeline.limits import asked_limits
from datagen_ray.pipeline.nodes import (
    Branch,
    Conditional,
    Placeable,
    Router,
    Sequence,
    SubPipeline,
    as_node,
)
from datagen_ray.pipeline.steps import Node, PipelineLike, Step, check_name


class Pipeline(PipelineLike):
    """A named tree of steps; a list stands for ``Sequence(name, [...])``.

    ``fields`` declares types of fields by name, inputs among them (``Append`` for those that
    grow). ``codecs`` are further codecs to read a log with. ``seed`` goes into every ``ctx.seed``.
    ``redact`` takes secrets out of the messages and tracebacks that are recorded of failures.
    Raises :class:`PipelineError`, naming the step and the cure, for a tree that cannot run.
    """

    def __init__(
        self,
        name: str,
        body: SequenceOf[Placeable] | Placeable,
        *,
        fields: Mapping[str, Any] | type | None = None,
        codecs: Iterable[Codec] = (),
        seed: int = 0,
        redact: Redact = redact_secrets,
    ) -> None:
        self.name = check_name(name, "pipeline")
        if isinstance(body, (list, tuple)):
            body = Sequence(name, body)
        self.body: Node = as_node(body, f"pipeline {name!r}")
        if type(seed) is not int:
            raise PipelineError(f"pipeline {name!r}: seed must be a whole number, not {seed!r}")
        self.seed = seed
        if not callable(redact):
            raise PipelineError(f"pipeline {name!r}: redact={redact!r}; give a function of a text")
        self.redact = redact
        _check_places(self.body, self.name)
        asked_limits(self.steps())
        own = declare_fields(fields, f"pipeline {name!r}")
        joined = _join_fields(self.name, own, self.body)
        self.types = FieldTypes(joined, _codecs_by_id(self.name, codecs, self.body))

    def redacting(self, redact: Redact) -> Pipeline:
        """The same pipeline with another ``redact``."""
        other = copy.copy(self)
        other.redact = redact
        return other

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        return walk(self.body)

    def steps(self) -> list[Step]:
        """Every leaf."""
        return [node for node in self.nodes() if isinstance(node, Step)]

    def tree(self) -> dict[str, Any]:
        """The tree as JSON: per node its name, kind, options that shape a run, and children."""
        return {"pipeline": self.name, "body": _tree(self.body)}

    def fingerprint(self) -> str:
        """64 hex digits, equal for equal trees; the first 8 are enough for a run id."""
        return hashlib.sha256(json_text(self.tree()).encode()).hexdigest()

    def describe(self) -> str:
        """The tree for people, one line a node."""
        lines = [f"{self.name}  ({self.fingerprint()[:8]})"]
        _describe(self.body, "", "", True, lines)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<pipeline {self.name} {self.fingerprint()[:8]}>"


def walk(node: Node) -> Iterator[Node]:
    """``node`` and all below it, parents first."""
    yield node
    for child in node.children:
        yield from walk(child)


def tree_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two ``tree()`` results, one line a change, for a report at start-up."""
    before, after = _flatten(old["body"]), _flatten(new["body"])
    changes = [f"removed: {name} ({before[name][0]})" for name in before if name not in after]
    changes += [f"added: {name} ({after[name][0]})" for name in after if name not in before]
    for name in before:
        if name in after and before[name] != after[name]:
            for label, was, now in zip(
                ("kind", "place", "options"), before[name], after[name], strict=True
            ):
                if was != now:
                    changes.append(f"changed: {name}: {label} {was} -> {now}")
    return changes


def _flatten(tree: Mapping[str, Any], place: str = "top") -> dict[str, tuple[str, str, str]]:
    shape = json_text(tree.get("policy", {}))
    found = {tree["name"]: (tree["kind"], place, shape)}
    for index, child in enumerate(tree.get("children", [])):
        for name, node in _flatten(child, f"{tree['name']}[{index}]").items():
            # A SubPipeline and the Sequence of its pipeline may share a name.
            found[name if name not in found else f"{name} within"] = node
    return found


def _tree(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": node.name, "kind": node.kind.value}
    if node.policy:
        shown["policy"] = node.policy
    if node.children:
        shown["children"] = [_tree(child) for child in node.children]
    return shown


def _describe(node: Node, label: str, indent: str, last: bool, lines: list[str]) -> None:
    options = ", ".join(f"{key}={value}" for key, value in node.policy.items())
    text = f"{label}{node.name}: {node.kind.value}" + (f" ({options})" if options else "")
    lines.append(f"{indent}{'`-' if last else '|-'} {text}")
    labels = _child_labels(node)
    for index, child in enumerate(node.children):
        at_end = index == len(node.children) - 1
        _describe(child, labels[index], indent + ("   " if last else "|  "), at_end, lines)


def _child_labels(node: Node) -> list[str]:
    if isinstance(node, Branch):
        return [f"[{name}] " for name in node.branches]
    if isinstance(node, Router):
        return [f"[{key}] " for key in node.routes] + (["[else] "] if node.default else [])
    if isinstance(node, Conditional):
        return ["[then] ", "[else] "]
    return [""] * len(node.children)


def _check_places(body: Node, pipeline: str) -> None:
    placed: dict[int, Node] = {}
    names: dict[str, Node] = {}
    # A pipeline's own Sequence may share the name of the SubPipeline that runs it: their rows are
    # in different streams, so nothing can be taken for the other.
    namesakes = {
        id(node.body): node.name
        for node in _walk_once(body, pipeline, placed)
        if isinstance(node, SubPipeline) and node.body.name == node.name
    }
    for node in placed.values():
        if namesakes.get(id(node)) == node.name:
            continue
        if node.name in names:
            cure = f"{node.name}.named('...')" if isinstance(node, Step) else "another name"
            raise PipelineError(
                f"pipeline {pipeline!r} has two steps named {node.name!r} "
                f"({names[node.name].kind.value} and {node.kind.value}); give one {cure}"
            )
        names[node.name] = node


def _walk_once(node: Node, pipeline: str, placed: dict[int, Node]) -> list[Node]:
    if id(node) in placed:
        cure = "place step.named('...') instead" if isinstance(node, Step) else "build another one"
        raise PipelineError(
            f"pipeline {pipeline!r} holds the same {node.kind.value} {node.name!r} twice; {cure}"
        )
    placed[id(node)] = node
    found = [node]
    for child in node.children:
        found += _walk_once(child, pipeline, placed)
    return found


def _join_fields(pipeline: str, own: Mapping[str, FieldType], body: Node) -> dict[str, FieldType]:
    """One table for all steps: a field has one type, whichever step writes it."""
    sources = [(f"pipeline {pipeline!r}", own)]
    for node in walk(body):
        if isinstance(node, Step):
            sources.append((f"step {node.name!r}", node.options.fields))
        elif isinstance(node, SubPipeline) and node.pipeline is not None:
            sources.append((f"SubPipeline {node.name!r}", node.pipeline.types.declared))
    joined: dict[str, tuple[FieldType, str]] = {}
    for where, fields in sources:
        for name, declared in fields.items():
            kept, first = joined.setdefault(name, (declared, where))
            if kept != declared:
                raise PipelineError(
                    f"field {name!r} is {kept.label} in {first} and {declared.label} in {where}; "
                    "declare one type for it"
                )
    return {name: declared for name, (declared, _) in joined.items()}


def _codecs_by_id(pipeline: str, codecs: Iterable[Codec], body: Node) -> dict[str, Codec]:
    found: dict[str, Codec] = {}
    for node in walk(body):
        if isinstance(node, SubPipeline) and node.pipeline is not None:
            found.update(node.pipeline.types.codecs)
    inner = set(found.values())
    for codec in codecs:
        if not isinstance(codec, Codec):
            raise PipelineError(f"pipeline {pipeline!r}: {codec!r} in codecs is not a Codec")
        if codec.id in found and codec not in inner:
            raise PipelineError(f"pipeline {pipeline!r} has two codecs with the id {codec.id!r}")
        found[codec.id] = codec
    return found
