"""datagen_ray: synthetic-data pipelines on Ray that cannot be lost.

Layers, each importing only those below it::

    cli, jobs      talk to a person
    cluster        Ray: driver, worker, maintainer      the only importer of ray
    pipeline       step kinds, replay, execution of one item
    store          where the log is kept                the only importer of lance and obstore
    log            what the log is: ids, events, fold   pure
"""

from datagen_ray.errors import (
    ClusterLostError,
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
    LeaseLostError,
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
from datagen_ray.log.violations import LogViolation, LogViolationKind
from datagen_ray.pipeline.codec import Codec
from datagen_ray.pipeline.context import StepContext
from datagen_ray.pipeline.item import Item, LazyBlob, SubItem
from datagen_ray.pipeline.limits import RateLimit
from datagen_ray.pipeline.local import LocalRunSummary, run_local
from datagen_ray.pipeline.nodes import (
    Branch,
    Conditional,
    Loop,
    MapReduce,
    Router,
    Sequence,
    SubPipeline,
)
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.ready_codecs import codec_for, numpy_codec, stored
from datagen_ray.pipeline.results import Append, Filtered, Permanent
from datagen_ray.pipeline.retry import Retry
from datagen_ray.pipeline.steps import step
from datagen_ray.store.bulk import Overview, RootStatuses
from datagen_ray.store.cleanup import CleanupOptions, PeriodicCleanup
from datagen_ray.store.lease import MaintenanceLease
from datagen_ray.store.lookup import Damaged, DatagenItemLookup, Found, NeverStarted
from datagen_ray.store.maintenance import MaintenanceReport, maintain_once
from datagen_ray.store.statistics import StoreStatistics
from datagen_ray.store.store import DatagenStore
from datagen_ray.store.verify import LogReport
from datagen_ray.store.writer import WriterOptions

__all__ = [
    "DATAGEN_SCHEMA_VERSION",
    "Append",
    "Branch",
    "CleanupOptions",
    "ClusterLostError",
    "Codec",
    "CodecError",
    "Conditional",
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
    "Filtered",
    "FoldedDatagenItem",
    "Found",
    "InputError",
    "InternalError",
    "InvalidEventError",
    "InvalidItemIdError",
    "Item",
    "ItemViolationError",
    "LazyBlob",
    "LeaseLostError",
    "LocalRunSummary",
    "LogNotFoundError",
    "LogReport",
    "LogViolation",
    "LogViolationKind",
    "Loop",
    "MaintenanceLease",
    "MaintenanceReport",
    "MapReduce",
    "NeverStarted",
    "Overview",
    "PeriodicCleanup",
    "Permanent",
    "Pipeline",
    "PipelineError",
    "PipelineMismatchError",
    "RateLimit",
    "Retry",
    "RootStatuses",
    "Router",
    "RunSupersededError",
    "Sequence",
    "SourceError",
    "StepContext",
    "StorageError",
    "StoreStatistics",
    "SubItem",
    "SubPipeline",
    "ValueTooLargeError",
    "WriterFencedError",
    "WriterOptions",
    "WriterPoisonedError",
    "codec_for",
    "datagen_event_id",
    "fold_datagen_events",
    "maintain_once",
    "numpy_codec",
    "run_local",
    "step",
    "stored",
]
