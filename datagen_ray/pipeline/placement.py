"""Steps that do not run in the worker itself: what they need, and who runs them.

This layer knows no cluster. A step that asks for resources or actors is *placed*; whoever runs the
pipeline hands in a :class:`RemoteCalls` that can do that, or placed steps are refused when the
executor starts, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from datagen_ray.errors import PipelineError

if TYPE_CHECKING:
    from datagen_ray.pipeline.steps import Step


@dataclass(frozen=True)
class Placement:
    """What one call (a task) or one actor of the step's pool needs; ``num_actors`` asks for a pool.

    The pool belongs to the run: all workers share its actors.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    num_actors: int | None = None

    @property
    def cpus(self) -> float:
        """One CPU unless said otherwise, none where a GPU or a resource of its own is asked for."""
        if self.num_cpus is not None:
            return self.num_cpus
        return 0.0 if self.num_gpus or self.resources else 1.0

    def shown(self) -> dict[str, Any]:
        """The options that were given, for ``tree()`` and for messages."""
        given = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources) or None,
            "num_actors": self.num_actors,
        }
        return {name: value for name, value in given.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.shown().items())


def placement_of(
    label: str,
    *,
    num_cpus: float | None,
    num_gpus: float | None,
    resources: Mapping[str, float] | None,
    num_actors: int | None,
) -> Placement | None:
    """The options of a step as a placement; None where none was given."""
    if num_cpus is None and num_gpus is None and resources is None and num_actors is None:
        return None
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if value is not None and not _is_amount(value):
            raise PipelineError(f"step {label!r}: {name} must be a number of at least 0")
    if num_actors is not None and (type(num_actors) is not int or num_actors < 1):
        raise PipelineError(f"step {label!r}: num_actors must be a whole number of at least 1")
    named = dict(resources or {})
    if not all(isinstance(name, str) and name for name in named) or not all(
        map(_is_amount, named.values())
    ):
        raise PipelineError(
            f"step {label!r}: resources must map names to numbers of at least 0, such as "
            '{"accelerator": 1}'
        )
    if {"CPU", "GPU"} & set(named):
        raise PipelineError(f"step {label!r}: give CPUs and GPUs as num_cpus and num_gpus")
    return Placement(num_cpus, num_gpus, named, num_actors)


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


class Call(NamedTuple):
    """One call of a placed step: everything in it can be sent to another process."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    timeout_s: float | None


class RemoteCalls(Protocol):
    """Runs placed steps somewhere else. One object serves one executor.

    ``call`` returns what the step returned and raises what it raised, ``Filtered`` among it, or
    ``TimeoutError`` once the step has *run* for ``timeout_s``, after ending its process; the wait
    for a place does not count. A process that is lost is replaced and the call made again, a few
    times; then ``StepProcessDied`` is raised.
    """

    async def set_up(self, steps: Sequence[Step]) -> None:
        """Get ready for these steps; raises ``PipelineError`` for what can never be placed."""
        ...

    async def call(self, step: Step, call: Call) -> Any: ...

    async def close(self) -> None: ...


class StepProcessDied(RuntimeError):
    """The process that ran a placed step died, each time that it was tried."""


def refuse_placed(steps: Sequence[Step]) -> None:
    """Say which steps need a cluster, where there is none."""
    for step in steps:
        if step.options.placement is not None:
            raise PipelineError(
                f"step {step.name!r} asks for {step.options.placement}, which takes a Ray cluster: "
                "run the pipeline with datagen-ray run or datagen_ray.cluster.run, or pass "
                'placed="here" to run the step in this process'
            )
