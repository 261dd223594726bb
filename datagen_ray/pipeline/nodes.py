"""What holds steps: drivers, fan-outs and selectors.

Every callable given here gets the item first, and ``ctx`` too where it has a parameter of that
name. Predicates, keys and loop tests are called in the event loop and so must be quick, or
``async``; splits and reducers that are plain functions run in threads, as steps do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal, TypeAlias

from datagen_ray.errors import PipelineError
from datagen_ray.log.events import DatagenStepKind
from datagen_ray.pipeline.signature import check_takes
from datagen_ray.pipeline.steps import Node, PipelineLike, Step, StepClass, check_name, step

Placeable: TypeAlias = "Node | StepClass | Callable[..., Any]"
OnFailure: TypeAlias = Literal["fail", "drop", "keep"]


class Sequence(Node):
    """Its children one after the other."""

    kind = DatagenStepKind.SEQUENCE

    def __init__(self, name: str, steps: SequenceOf[Placeable]) -> None:
        self.name = check_name(name, "Sequence")
        if not isinstance(steps, (list, tuple)):
            raise PipelineError(f"Sequence {name!r}: give its steps as a list, not {steps!r}")
        self.steps = tuple(as_node(child, f"Sequence {name!r}") for child in steps)
        if not self.steps:
            raise PipelineError(f"Sequence {name!r} is empty; give it at least one step")

    @property
    def children(self) -> tuple[Node, ...]:
        return self.steps


class Loop(Node):
    """Its body again and again, until ``until(item, round)`` holds or ``max_rounds`` were made.

    ``round`` is 0 for the first round of this entry. The body runs once at least, unless
    ``max_rounds`` is 0, or ``check_first`` has ``until`` asked before any round, with round -1.
    """

    kind = DatagenStepKind.LOOP

    def __init__(
        self,
        name: str,
        body: Placeable,
        *,
        until: Callable[..., Any],
        max_rounds: int,
        check_first: bool = False,
    ) -> None:
        self.name = check_name(name, "Loop")
        self.body = as_node(body, f"Loop {name!r}")
        self.until = _check_callable(until, f"Loop {name!r}", "until", "item", "item, round")
        if type(max_rounds) is not int or max_rounds < 0:
            raise PipelineError(f"Loop {name!r}: max_rounds must be a whole number of at least 0")
        if type(check_first) is not bool:
            raise PipelineError(f"Loop {name!r}: check_first must be True or False")
        self.max_rounds = max_rounds
        self.check_first = check_first

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.body,)

    @property
    def policy(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"max_rounds": self.max_rounds}
        return {**shown, "check_first": True} if self.check_first else shown


class FanOut(Node):
    """Makes sub-items, each with a stream of its own, and reduces them to fields of the item."""

    on_failure: OnFailure = "fail"

    @property
    def policy(self) -> dict[str, Any]:
        return {"on_failure": self.on_failure}


class MapReduce(FanOut):
    """``split`` makes the sub-items' inputs, ``each`` runs on every one, ``reduce`` joins them.

    ``reduce(item, results)`` (or ``reduce(results)``) gets a list of :class:`SubItem` in the order
    of the split and returns fields as a step does. A sub-item that fails fails the item
    (``on_failure="fail"``), is dropped with its reason (``"drop"``), or is handed on with the
    fields that it has (``"keep"``).
    """

    kind = DatagenStepKind.MAP_REDUCE

    def __init__(
        self,
        name: str,
        *,
        split: Callable[..., Any],
        each: Placeable,
        reduce: Callable[..., Any],
        on_failure: OnFailure = "fail",
    ) -> None:
        self.name = check_name(name, "MapReduce")
        self.split = _check_callable(split, f"MapReduce {name!r}", "split", "item")
        self.each = as_node(each, f"MapReduce {name!r}")
        self.reduce = _check_reduce(reduce, f"MapReduce {name!r}")
        self.on_failure = _check_on_failure(on_failure, f"MapReduce {name!r}")

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.each,)


class Branch(FanOut):
    """Every branch on a sub-item of its own, side by side.

    Without ``reduce`` the item gets one field a branch, named for it and holding the fields that
    the branch set (null where it was dropped).
    """

    kind = DatagenStepKind.BRANCH

    def __init__(
        self,
        name: str,
        branches: Mapping[str, Placeable],
        *,
        reduce: Callable[..., Any] | None = None,
        on_failure: OnFailure = "fail",
    ) -> None:
        self.name = check_name(name, "Branch")
        self.branches = _named_children(branches, f"Branch {name!r}", "branch")
        self.reduce = None if reduce is None else _check_reduce(reduce, f"Branch {name!r}")
        self.on_failure = _check_on_failure(on_failure, f"Branch {name!r}")

    @property
    def children(self) -> tuple[Node, ...]:
        return tuple(self.branches.values())

    @property
    def policy(self) -> dict[str, Any]:
        return {"on_failure": self.on_failure, "branches": list(self.branches)}


class SubPipeline(FanOut):
    """Another pipeline on one sub-item; ``outputs`` are the fields that come back.

    A sub-item that is filtered filters the item.
    """

    kind = DatagenStepKind.SUB_PIPELINE

    def __init__(
        self, name: str, pipeline: PipelineLike | Placeable, *, outputs: SequenceOf[str]
    ) -> None:
        self.name = check_name(name, "SubPipeline")
        self.pipeline = pipeline if isinstance(pipeline, PipelineLike) else None
        body = pipeline.body if isinstance(pipeline, PipelineLike) else pipeline
        self.body = as_node(body, f"SubPipeline {name!r}")
        if isinstance(outputs, str) or not all(isinstance(o, str) and o for o in outputs):
            raise PipelineError(f"SubPipeline {name!r}: outputs must be a list of field names")
        self.outputs = tuple(outputs)

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.body,)

    @property
    def policy(self) -> dict[str, Any]:
        return {"outputs": list(self.outputs)}


class Selector(Node):
    """Passes its place on to one of its children, or to none."""


class Conditional(Selector):
    """``then`` where ``when(item)`` holds, else ``otherwise``, which may be missing."""

    kind = DatagenStepKind.CONDITIONAL

    def __init__(
        self,
        name: str,
        *,
        when: Callable[..., Any],
        then: Placeable,
        otherwise: Placeable | None = None,
    ) -> None:
        self.name = check_name(name, "Conditional")
        self.when = _check_callable(when, f"Conditional {name!r}", "when", "item")
        self.then = as_node(then, f"Conditional {name!r}")
        self.otherwise = None if otherwise is None else as_node(otherwise, f"Conditional {name!r}")

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.then,) if self.otherwise is None else (self.then, self.otherwise)

    @property
    def may_be_silent(self) -> bool:
        return self.otherwise is None or any(child.may_be_silent for child in self.children)


class Router(Selector):
    """The route that ``key(item)`` names, else ``default``; without one an unknown key fails."""

    kind = DatagenStepKind.ROUTER

    def __init__(
        self,
        name: str,
        *,
        key: Callable[..., Any],
        routes: Mapping[Any, Placeable],
        default: Placeable | None = None,
    ) -> None:
        self.name = check_name(name, "Router")
        self.key = _check_callable(key, f"Router {name!r}", "key", "item")
        if not isinstance(routes, Mapping) or not routes:
            raise PipelineError(
                f"Router {name!r}: routes must be a mapping with one route at least"
            )
        self.routes = {key: as_node(child, f"Router {name!r}") for key, child in routes.items()}
        self.default = None if default is None else as_node(default, f"Router {name!r}")

    @property
    def children(self) -> tuple[Node, ...]:
        routes = tuple(self.routes.values())
        return routes if self.default is None else (*routes, self.default)

    @property
    def may_be_silent(self) -> bool:
        return any(child.may_be_silent for child in self.children)

    @property
    def policy(self) -> dict[str, Any]:
        return {"routes": [str(key) for key in self.routes], "default": self.default is not None}


def as_node(child: Any, where: str) -> Node:
    """A node for what a user placed: a node, a class step without arguments, a bare function."""
    if isinstance(child, Node):
        return child
    if isinstance(child, StepClass):
        return child()
    if isinstance(child, list):
        raise PipelineError(f"{where} holds a bare list; name it: Sequence('...', [...])")
    if isinstance(child, PipelineLike):
        raise PipelineError(
            f"{where} holds a Pipeline; wrap it in SubPipeline(name, pipeline, ...)"
        )
    if callable(child) and not inspect.isclass(child):
        made = step(child)
        if isinstance(made, Step):
            return made
    raise PipelineError(f"{where} holds {child!r}, which is no step; decorate it with @step")


def _named_children(children: Any, where: str, what: str) -> dict[str, Node]:
    if not isinstance(children, Mapping) or not children:
        raise PipelineError(f"{where}: give a mapping with at least one {what}")
    for name in children:
        if not isinstance(name, str) or not name or not _is_utf8(name):
            raise PipelineError(f"{where}: the {what} name {name!r} is not a text; rename it")
    return {name: as_node(child, where) for name, child in children.items()}


def _is_utf8(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


def _check_reduce(function: Any, where: str) -> Callable[..., Any]:
    return _check_callable(function, where, "reduce", "results", "item, results")


def _check_callable(function: Any, where: str, what: str, *forms: str) -> Callable[..., Any]:
    if isinstance(function, (Node, StepClass)):
        raise PipelineError(f"{where}: {what} must be a plain function, not a step")
    if not callable(function):
        raise PipelineError(f"{where}: {what}={function!r} cannot be called; give a function")
    checked: Callable[..., Any] = function
    check_takes(checked, f"{where}: {what}", forms)
    return checked


def _check_on_failure(policy: str, where: str) -> OnFailure:
    if policy not in ("fail", "drop", "keep"):
        raise PipelineError(f"{where}: on_failure={policy!r}; one of 'fail', 'drop', 'keep'")
    return policy  # type: ignore[return-value]
