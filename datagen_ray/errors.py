"""Every error of the package, grouped by what the caller must do about it.

    DatagenError
    +-- StorageError                retry: the storage did not answer or refused
    |   +-- LogNotFoundError        no log at that place
    +-- WriterFencedError           stop: another writer owns the shard now
    +-- WriterPoisonedError         reopen: our own write failed; what was in flight is unknown
    +-- RunSupersededError          stop: a later run took over the experiment
    +-- LeaseLostError              stop maintaining: another maintainer was elected
    +-- ClusterLostError            run again: the Ray cluster went away, the log is whole
    +-- InputError (ValueError)     fix the input; nothing was written
    |   +-- InvalidItemIdError
    |   +-- InvalidEventError
    |   +-- CodecError
    |   +-- ValueTooLargeError
    |   +-- PipelineError
    |   +-- SourceError
    |   +-- ConfigError
    +-- DamagedLogError             the log holds what no writer of ours can have written
    |   +-- ItemViolationError      one item cannot be folded
    |   +-- PipelineMismatchError   an item's rows are not the ones this pipeline would write
    |   +-- CorruptWalError         a WAL entry cannot be decoded
    +-- InternalError               a bug in this package

Messages are one line that names the thing and the cure. Every error pickles, since errors cross
process borders on their way from a worker to a driver.
"""

from __future__ import annotations


class DatagenError(Exception):
    """Base of all errors that the package raises on purpose."""

    # An exception pickles by calling its class with ``self.args``, which loses keyword arguments;
    # rebuilding from the instance's state keeps whatever a subclass added.
    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    cls: type[DatagenError], args: tuple[object, ...], state: dict[str, object]
) -> DatagenError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class StorageError(DatagenError):
    """The storage did not answer, or refused. Nothing is known to be lost; try again."""


class LogNotFoundError(StorageError):
    """There is no log at the place that was named. Never to be read as 'an empty log'."""


class WriterFencedError(DatagenError):
    """Another writer claimed the shard. Nothing handed in since then was acknowledged.

    The holder of a fenced writer reports and stops; claiming again would let two incarnations
    of one slot fence each other for ever.
    """


class WriterPoisonedError(DatagenError):
    """A write of our own failed, so the writer refuses all that follows until it is reopened.

    Whether the rows in flight are durable is unknown until the shard is claimed and read.
    """


class RunSupersededError(DatagenError):
    """A later run took over the experiment; this one must stop."""


class LeaseLostError(DatagenError):
    """Another maintainer was elected for the experiment. Writers are not concerned."""


class ClusterLostError(DatagenError):
    """The Ray cluster went away. What was acknowledged is in the log; the same command goes on."""


class InputError(DatagenError, ValueError):
    """What was handed in cannot be accepted. Nothing was written."""


class InvalidItemIdError(InputError):
    """A text is not an item id. ``code`` names the rule that it breaks."""

    def __init__(self, message: str, *, code: str = "item_id") -> None:
        super().__init__(message)
        self.code = code


class InvalidEventError(InputError):
    """An event, or a batch of them, breaks a rule of the log. ``code`` names the rule.

    ``index`` is the position of the offending event in the batch, where one event is to blame.
    """

    def __init__(self, message: str, *, code: str, index: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.index = index


class CodecError(InputError):
    """A value cannot be encoded or decoded, or its codec is not registered."""


class ValueTooLargeError(InputError):
    """A value, or a batch, is larger than the log accepts."""


class PipelineError(InputError):
    """A pipeline is not well formed. The message names the step and the cure."""


class SourceError(InputError):
    """The rows of a source cannot be used: file missing, key missing, empty or repeated."""


class ConfigError(InputError):
    """An option, a path or an environment cannot be used as given."""


class DamagedLogError(DatagenError):
    """The log holds something that no correct writer writes."""


class ItemViolationError(DamagedLogError):
    """The events of one item cannot be folded. ``code`` names the rule, ``item_id`` the item."""

    def __init__(
        self, message: str, *, code: str, item_id: str, event_ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.item_id = item_id
        self.event_ids = event_ids


class PipelineMismatchError(DamagedLogError):
    """The recorded rows of an item are not the ones that the pipeline would have written."""


class CorruptWalError(DamagedLogError):
    """A WAL entry cannot be decoded.

    ``last`` tells the newest entry of a shard, which a lost machine can leave half written and
    which was never acknowledged, from one that others follow.
    """

    def __init__(
        self, message: str, *, shard_id: str = "", position: int = 0, last: bool = False
    ) -> None:
        super().__init__(message)
        self.shard_id = shard_id
        self.position = position
        self.last = last


class InternalError(DatagenError):
    """A state that the package holds to be impossible. Please report it."""
