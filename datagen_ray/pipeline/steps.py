"""Leaves: user functions and classes, made into steps of a pipeline by ``step``.

A step is data (a name, options, the callable), so it pickles; whatever runs it keeps its own
state (semaphores, instances of class steps) elsewhere.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    ClassVar,
    TypeAlias,
    get_args,
    get_type_hints,
    is_typeddict,
    overload,
)

from datagen_ray.errors import PipelineError
from datagen_ray.log.events import DatagenStepKind
from datagen_ray.pipeline.codecs import FieldType, FieldTypes, declare_fields
from datagen_ray.pipeline.limits import RateLimit
from datagen_ray.pipeline.placement import Placement, placement_of
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.signature import check_takes

INPUT_STEP = "input"
"""The step name of an item's inputs; no step may carry it."""


class Node:
    """One place in a pipeline: a step or something that holds steps."""

    kind: ClassVar[DatagenStepKind]
    name: str

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes below, in the order in which they are visited or declared."""
        return ()

    @property
    def may_be_silent(self) -> bool:
        """Whether a visit can end without writing a row: only where a selector chooses nothing."""
        return False

    @property
    def policy(self) -> dict[str, Any]:
        """The options that shape a run, JSON-able, for ``tree()``."""
        return {}


class PipelineLike:
    """What a SubPipeline needs to know of a Pipeline, kept below both."""

    body: Node
    types: FieldTypes


@dataclass(frozen=True)
class StepOptions:
    """What the ``step`` decorator was given, checked."""

    retry: Retry | None = None
    timeout_s: float | None = None
    max_in_flight: int | None = None
    batch_size: int | None = None
    max_wait_ms: float = 10.0
    version: str | int | None = None
    fields: Mapping[str, FieldType] = field(default_factory=dict)
    max_in_flight_run: int | None = None
    rate_limit: RateLimit | None = None
    placement: Placement | None = None


class Step(Node):
    """A leaf: a function, or a class whose one instance a process is called for every item."""

    kind = DatagenStepKind.LEAF

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        base_name: str,
        options: StepOptions,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self.function = function
        self.base_name = base_name
        self.options = options
        self.arguments = arguments
        self.__doc__ = getattr(function, "__doc__", None)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The recorded name; a declared version is part of it, so raising it is a rename."""
        version = self.options.version
        return self.base_name if version is None else f"{self.base_name}@{version}"

    @property
    def is_class(self) -> bool:
        return self.arguments is not None

    @property
    def needs_pool(self) -> bool:
        """Whether it is placed on actors; what is placed otherwise runs as tasks."""
        placement = self.options.placement
        return placement is not None and (self.is_class or placement.num_actors is not None)

    @property
    def callable_shown(self) -> Callable[..., Any]:
        """Something with the signature of what is called for every item, nothing being built."""
        return self.function if self.arguments is None else _bound_call(self.function)

    def make(self) -> Callable[..., Any]:
        """What is called for every item: the function, or a new instance of the class."""
        if self.arguments is None:
            return self.function
        args, keywords = self.arguments
        made: Callable[..., Any] = self.function(*args, **keywords)
        return made

    @property
    def policy(self) -> dict[str, Any]:
        options = self.options
        shown: dict[str, Any] = {
            "timeout_s": options.timeout_s,
            "max_in_flight": options.max_in_flight,
            "batch_size": options.batch_size,
            "attempts": options.retry.attempts if options.retry else None,
            "max_in_flight_run": options.max_in_flight_run,
            "rate_limit": str(options.rate_limit) if options.rate_limit else None,
            **(options.placement.shown() if options.placement else {}),
        }
        return {key: value for key, value in shown.items() if value is not None}

    def named(self, name: str) -> Step:
        """The same step under another name, so that it can be placed once more."""
        other = copy.copy(self)
        other.base_name = check_name(name, "step")
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as a test does; no retry, no log."""
        if self.arguments is not None:
            raise TypeError(f"step {self.name!r} is a class step: call an instance of its class")
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<step {self.name}>"


class StepClass:
    """A class under ``@step``: calling it makes a step that builds its instance where it runs."""

    def __init__(self, cls: type, base_name: str, options: StepOptions) -> None:
        self.cls = cls
        self.base_name = base_name
        self.options = options
        self.__doc__ = cls.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Step:
        return Step(
            self.cls, base_name=self.base_name, options=self.options, arguments=(args, kwargs)
        )

    def __repr__(self) -> str:
        return f"<step class {self.base_name}>"


Decorated: TypeAlias = "Step | StepClass"


@overload
def step(function: type, /) -> StepClass: ...  # type: ignore[overload-overlap]
@overload
def step(function: Callable[..., Any], /) -> Step: ...
@overload
def step(
    *,
    name: str | None = ...,
    retry: Retry | None = ...,
    timeout_s: float | None = ...,
    max_in_flight: int | None = ...,
    batch_size: int | None = ...,
    max_wait_ms: float = ...,
    fields: Mapping[str, Any] | type | None = ...,
    version: str | int | None = ...,
    max_in_flight_run: int | None = ...,
    rate_limit: float | RateLimit | None = ...,
    num_cpus: float | None = ...,
    num_gpus: float | None = ...,
    resources: Mapping[str, float] | None = ...,
    num_actors: int | None = ...,
) -> Callable[[Callable[..., Any]], Any]: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout_s: float | None = None,
    max_in_flight: int | None = None,
    batch_size: int | None = None,
    max_wait_ms: float = 10.0,
    fields: Mapping[str, Any] | type | None = None,
    version: str | int | None = None,
    max_in_flight_run: int | None = None,
    rate_limit: float | RateLimit | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    num_actors: int | None = None,
) -> Any:
    """Make a step of a function, an ``async`` function, or a class with ``__call__``.

    The callable takes the item, and ``ctx`` where it has a parameter of that name; it returns a
    dict of fields, or None. Plain functions run in threads. ``retry`` and ``timeout_s`` apply to
    one call; ``max_in_flight`` bounds the calls of this step that one worker makes at a time.
    With ``batch_size`` the callable takes a list of items (and as ``ctx`` that of their
    contexts), which is given ``max_wait_ms`` to fill, and returns a list of the same length.
    ``fields`` declares the types of the fields that it returns, by default the TypedDict that it
    is annotated to return; ``version`` makes items recorded
    under another version a mismatch.

    Shared by all workers of a run: ``max_in_flight_run`` bounds the calls at a time, and
    ``rate_limit`` (calls a second, or a :class:`RateLimit`) how fast they begin.

    With ``num_cpus``, ``num_gpus`` or ``resources`` every call is a Ray task of its own; a class,
    or any step with ``num_actors``, gets a pool of actors that the run's workers share. There
    ``timeout_s`` counts from the start of the call and ends its process.
    """

    def decorate(target: Callable[..., Any]) -> Decorated:
        label = name if name is not None else getattr(target, "__name__", "")
        check_name(label, "step")
        options = _checked(
            label,
            StepOptions(
                retry=retry,
                timeout_s=timeout_s,
                max_in_flight=max_in_flight,
                batch_size=batch_size,
                max_wait_ms=max_wait_ms,
                version=version,
                max_in_flight_run=max_in_flight_run,
                rate_limit=_rate_limit(label, rate_limit),
                placement=placement_of(
                    label,
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    resources=resources,
                    num_actors=num_actors,
                ),
            ),
        )
        declared = _returned_fields(target) if fields is None else fields
        options = replace(options, fields=declare_fields(declared, f"step {label!r}"))
        if not callable(target):
            raise PipelineError(f"step {label!r}: {target!r} cannot be called; decorate a function")
        forms = ("item",) if options.batch_size is None else ("items",)
        if inspect.isclass(target):
            if not any("__call__" in vars(base) for base in target.__mro__):
                raise PipelineError(f"step {label!r}: the class needs a __call__(self, item)")
            check_takes(_bound_call(target), f"step {label!r}", forms)
            return StepClass(target, label, options)
        if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
            raise PipelineError(
                f"step {label!r} is a generator; return one dict of fields, or use MapReduce"
            )
        check_takes(target, f"step {label!r}", forms)
        return Step(target, base_name=label, options=options)

    return decorate if function is None else decorate(function)


def _returned_fields(target: Any) -> type | None:
    """The TypedDict that the callable is annotated to return, if it is one."""
    function = vars(target).get("__call__") if inspect.isclass(target) else target
    try:
        declared = get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return None  # annotations may name what only a type checker sees; they are no declaration
    inner = [arg for arg in get_args(declared) if arg is not type(None)]
    declared = inner[0] if len(inner) == 1 else declared
    return declared if is_typeddict(declared) else None


def _bound_call(cls: Any) -> Callable[..., Any]:
    """``__call__`` as an instance has it, for its signature; there is no instance yet."""
    call = vars(next(base for base in cls.__mro__ if "__call__" in vars(base)))["__call__"]
    if isinstance(call, (staticmethod, classmethod)):
        return call.__func__
    return functools.partial(call, None)


def check_name(name: object, what: str) -> str:
    """``name`` itself, once it can stand in ids and positions."""
    if not isinstance(name, str) or not name.strip():
        raise PipelineError(f"a {what} has the name {name!r}; give it a text that is not empty")
    if "\0" in name or "@" in name:
        raise PipelineError(
            f"the {what} name {name!r} holds a NUL or an '@' (which marks versions); rename it"
        )
    if name.encode("utf-8", "replace").decode() != name:
        raise PipelineError(f"the {what} name {name!r} holds a lone surrogate; rename it")
    if name == INPUT_STEP:
        raise PipelineError(
            f"the {what} name {INPUT_STEP!r} is reserved for an item's inputs; rename it"
        )
    return name


def _checked(label: str, options: StepOptions) -> StepOptions:
    if options.retry is not None and not isinstance(options.retry, Retry):
        raise PipelineError(f"step {label!r}: retry={options.retry!r}; give a Retry(...)")
    if options.timeout_s is not None and not _positive(options.timeout_s):
        raise PipelineError(f"step {label!r}: timeout_s must be a number of seconds above 0")
    for option in ("max_in_flight", "max_in_flight_run", "batch_size"):
        value = getattr(options, option)
        if value is not None and (type(value) is not int or value < 1):
            raise PipelineError(f"step {label!r}: {option} must be a whole number of at least 1")
    if not _positive(options.max_wait_ms) and options.max_wait_ms != 0:
        raise PipelineError(f"step {label!r}: max_wait_ms must be a number of at least 0")
    version = options.version
    if version is not None and (isinstance(version, bool) or not isinstance(version, (str, int))):
        raise PipelineError(f"step {label!r}: version must be a text or a whole number")
    if isinstance(version, str) and (not version or "\0" in version):
        raise PipelineError(f"step {label!r}: version must be a text that is not empty")
    return options


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _rate_limit(label: str, given: object) -> RateLimit | None:
    if given is None or isinstance(given, RateLimit):
        return given
    if not _positive(given):
        raise PipelineError(
            f"step {label!r}: rate_limit={given!r}; give calls a second, or a RateLimit(...)"
        )
    return RateLimit(float(given))  # type: ignore[arg-type]  # a number, as was just seen
