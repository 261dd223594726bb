"""datagen_ray: synthetic-data pipelines on Ray that cannot be lost.

Layers, each importing only those below it::

    cli, jobs      talk to a person
    cluster        Ray: driver, worker, maintainer      the only importer of ray
    pipeline       step kinds, replay, execution of one item
    store          where the log is kept                the only importer of lance and obstore
    log            what the log is: ids, events, fold   pure
"""

from datagen_ray.errors import (
    CodecError,
    ConfigError,
    CorruptWalError,
    DamagedLogError,
    DatagenError,
    InputError,
    InternalError,
    InvalidEventError,
    InvalidItemIdError,
    ItemViolationError,
    LogNotFoundError,
    PipelineError,
    PipelineMismatchError,
    RunSupersededError,
    SourceError,
    StorageError,
    ValueTooLargeError,
    WriterFencedError,
    WriterPoisonedError,
)
from datagen_ray.log.events import (
    DATAGEN_SCHEMA_VERSION,
    DatagenEvent,
    DatagenEventType,
    DatagenItemStatus,
    DatagenStepKind,
    DatagenStreamPosition,
)
from datagen_ray.log.fold import (
    DatagenErrorInfo,
    DatagenFailure,
    DatagenField,
    DatagenItemNode,
    DatagenItemTree,
    DatagenStepCursor,
    DatagenTrajectory,
    FoldedDatagenItem,
    fold_datagen_events,
)
from datagen_ray.log.ids import DatagenItemId, datagen_event_id
from datagen_ray.log.stream import DatagenStreamWriter
from datagen_ray.log.values import DatagenBlobValue, DatagenFieldUpdate, DatagenValue
from datagen_ray.store.bulk import Overview, RootStatuses
from datagen_ray.store.lookup import Damaged, DatagenItemLookup, Found, NeverStarted
from datagen_ray.store.store import DatagenStore

__all__ = [
    "DATAGEN_SCHEMA_VERSION",
    "CodecError",
    "ConfigError",
    "CorruptWalError",
    "Damaged",
    "DamagedLogError",
    "DatagenBlobValue",
    "DatagenError",
    "DatagenErrorInfo",
    "DatagenEvent",
    "DatagenEventType",
    "DatagenFailure",
    "DatagenField",
    "DatagenFieldUpdate",
    "DatagenItemId",
    "DatagenItemLookup",
    "DatagenItemNode",
    "DatagenItemStatus",
    "DatagenItemTree",
    "DatagenStepCursor",
    "DatagenStepKind",
    "DatagenStore",
    "DatagenStreamPosition",
    "DatagenStreamWriter",
    "DatagenTrajectory",
    "DatagenValue",
    "FoldedDatagenItem",
    "Found",
    "InputError",
    "InternalError",
    "InvalidEventError",
    "InvalidItemIdError",
    "ItemViolationError",
    "LogNotFoundError",
    "NeverStarted",
    "Overview",
    "PipelineError",
    "PipelineMismatchError",
    "RootStatuses",
    "RunSupersededError",
    "SourceError",
    "StorageError",
    "ValueTooLargeError",
    "WriterFencedError",
    "WriterPoisonedError",
    "datagen_event_id",
    "fold_datagen_events",
]
