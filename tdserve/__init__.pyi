# The public names, for type checkers; __init__.py loads each from its home when it is first used.

from tdserve import aio as aio, dtensor as dtensor, torchrl as torchrl, torchrun as torchrun
from tdserve.base.errors.request_errors import (
    InvalidRequestError as InvalidRequestError,
    InvalidSpecError as InvalidSpecError,
    KeyExistsError as KeyExistsError,
    KeyNotFoundError as KeyNotFoundError,
    LockedError as LockedError,
    NotSupportedError as NotSupportedError,
    PermissionDeniedError as PermissionDeniedError,
    ReadOnlyError as ReadOnlyError,
    RequestError as RequestError,
    SelectionError as SelectionError,
    ShardLostError as ShardLostError,
    SpecMismatchError as SpecMismatchError,
    StepForgottenError as StepForgottenError,
    StoreExistsError as StoreExistsError,
    StoreMovedError as StoreMovedError,
    StoreNotFoundError as StoreNotFoundError,
    StructureChangedError as StructureChangedError,
    UnauthenticatedError as UnauthenticatedError,
    UnsupportedAttributeError as UnsupportedAttributeError,
    VersionConflictError as VersionConflictError,
    VersionNotFoundError as VersionNotFoundError,
    WrongStateError as WrongStateError,
)
from tdserve.base.errors.state_errors import (
    CapacityError as CapacityError,
    ClosedError as ClosedError,
    CorruptDataError as CorruptDataError,
    DamagedRowError as DamagedRowError,
    DeadlineExceededError as DeadlineExceededError,
    EndOfStreamError as EndOfStreamError,
    ForkedClientError as ForkedClientError,
    RootInUseError as RootInUseError,
    ServerBusyError as ServerBusyError,
    StoreNotCreatedError as StoreNotCreatedError,
    TooLargeError as TooLargeError,
    UnansweredPopError as UnansweredPopError,
    WriterFailedError as WriterFailedError,
)
from tdserve.base.errors.tdserve_error import (
    TDServeError as TDServeError,
)
from tdserve.base.errors.transport_errors import (
    ConnectError as ConnectError,
    HandshakeRefusedError as HandshakeRefusedError,
    LocalProtocolError as LocalProtocolError,
    NcclUnavailableError as NcclUnavailableError,
    NotLocalError as NotLocalError,
    PeerLostError as PeerLostError,
    ProtocolError as ProtocolError,
    ProtocolVersionError as ProtocolVersionError,
    RemoteProtocolError as RemoteProtocolError,
    TransferAbortedError as TransferAbortedError,
    TransportError as TransportError,
)
from tdserve.base.tls import (
    TLS as TLS,
)
from tdserve.client.client import (
    Client as Client,
)
from tdserve.client.cluster.cluster_client import (
    ClusterClient as ClusterClient,
)
from tdserve.client.cluster.stores.sharded_dataset import (
    ShardedDataset as ShardedDataset,
)
from tdserve.client.cluster.stores.sharded_keyed import (
    ShardedKeyedHandle as ShardedKeyedHandle,
)
from tdserve.client.cluster.tables.sharded_queue import (
    ShardedQueueHandle as ShardedQueueHandle,
)
from tdserve.client.cluster.tables.sharded_replay import (
    ShardedReplayHandle as ShardedReplayHandle,
)
from tdserve.client.connecting import (
    connect as connect,
)
from tdserve.client.groups.group import (
    Group as Group,
)
from tdserve.client.handles.handle import (
    StoreHandle as StoreHandle,
)
from tdserve.client.kv.keyed_handle import (
    KeyedHandle as KeyedHandle,
)
from tdserve.client.moves.manifest import Checkpoint as Checkpoint
from tdserve.client.moves.server_checkpoints import list_checkpoints as list_checkpoints
from tdserve.client.session.calls.call_deadline import (
    within as within,
)
from tdserve.client.session.catalog.description import (
    StoreDescription as StoreDescription,
    VersionInfo as VersionInfo,
)
from tdserve.client.tables.draws.batches import (
    Batches as Batches,
)
from tdserve.client.tables.draws.taken_batches import (
    TakenBatches as TakenBatches,
)
from tdserve.client.tables.draws.taking import (
    Taken as Taken,
)
from tdserve.client.tables.queue import (
    QueueHandle as QueueHandle,
)
from tdserve.client.tables.replay import (
    ReplayHandle as ReplayHandle,
)
from tdserve.client.tables.writers.nstep import (
    NStep as NStep,
)
from tdserve.client.tables.writers.writer import (
    ReplayWriter as ReplayWriter,
)
from tdserve.client.weights.pulls import (
    Weights as Weights,
)
from tdserve.client.weights.subscription import (
    Subscription as Subscription,
)
from tdserve.launcher import (
    Server as Server,
)
from tdserve.rules.replay.limiter import (
    MinSize as MinSize,
    Queue as Queue,
    SampleToInsertRatio as SampleToInsertRatio,
)
from tdserve.rules.replay.samplers.order import (
    Fifo as Fifo,
    Lifo as Lifo,
)
from tdserve.rules.replay.samplers.prioritized import (
    Prioritized as Prioritized,
)
from tdserve.rules.replay.samplers.priority_order import (
    HighestPriority as HighestPriority,
    LowestPriority as LowestPriority,
)
from tdserve.rules.replay.samplers.sampler import (
    Uniform as Uniform,
)
from tdserve.rules.replay.samplers.slices import (
    Slices as Slices,
)
from tdserve.rules.replay.samplers.without_replacement import (
    WithoutReplacement as WithoutReplacement,
)
