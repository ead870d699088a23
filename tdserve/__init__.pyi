# The public names, for type checkers; __init__.py loads each from its home when it is first used.

from tdserve import aio as aio, torchrl as torchrl, torchrun as torchrun
from tdserve.base.errors import (
    CapacityError as CapacityError,
    ClosedError as ClosedError,
    ConnectError as ConnectError,
    CorruptDataError as CorruptDataError,
    DeadlineExceededError as DeadlineExceededError,
    EndOfStreamError as EndOfStreamError,
    ForkedClientError as ForkedClientError,
    HandshakeRefusedError as HandshakeRefusedError,
    InvalidRequestError as InvalidRequestError,
    InvalidSpecError as InvalidSpecError,
    KeyExistsError as KeyExistsError,
    KeyNotFoundError as KeyNotFoundError,
    LocalProtocolError as LocalProtocolError,
    LockedError as LockedError,
    NcclUnavailableError as NcclUnavailableError,
    NotLocalError as NotLocalError,
    NotSupportedError as NotSupportedError,
    PeerLostError as PeerLostError,
    PermissionDeniedError as PermissionDeniedError,
    ProtocolError as ProtocolError,
    ProtocolVersionError as ProtocolVersionError,
    ReadOnlyError as ReadOnlyError,
    RemoteProtocolError as RemoteProtocolError,
    RequestError as RequestError,
    RootInUseError as RootInUseError,
    SelectionError as SelectionError,
    ServerBusyError as ServerBusyError,
    ShardLostError as ShardLostError,
    SpecMismatchError as SpecMismatchError,
    StepForgottenError as StepForgottenError,
    StoreExistsError as StoreExistsError,
    StoreMovedError as StoreMovedError,
    StoreNotCreatedError as StoreNotCreatedError,
    StoreNotFoundError as StoreNotFoundError,
    StructureChangedError as StructureChangedError,
    TDServeError as TDServeError,
    TooLargeError as TooLargeError,
    TransferAbortedError as TransferAbortedError,
    TransportError as TransportError,
    UnansweredPopError as UnansweredPopError,
    UnauthenticatedError as UnauthenticatedError,
    UnsupportedAttributeError as UnsupportedAttributeError,
    VersionConflictError as VersionConflictError,
    VersionNotFoundError as VersionNotFoundError,
    WriterFailedError as WriterFailedError,
    WrongStateError as WrongStateError,
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
from tdserve.client.cluster.sharded_dataset import (
    ShardedDataset as ShardedDataset,
)
from tdserve.client.cluster.sharded_keyed import (
    ShardedKeyedHandle as ShardedKeyedHandle,
)
from tdserve.client.cluster.sharded_queue import (
    ShardedQueueHandle as ShardedQueueHandle,
)
from tdserve.client.cluster.sharded_replay import (
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
from tdserve.client.session.description import (
    StoreDescription as StoreDescription,
    VersionInfo as VersionInfo,
)
from tdserve.client.tables.batches import (
    Batches as Batches,
)
from tdserve.client.tables.nstep import (
    NStep as NStep,
)
from tdserve.client.tables.queue import (
    QueueHandle as QueueHandle,
)
from tdserve.client.tables.replay import (
    ReplayHandle as ReplayHandle,
)
from tdserve.client.tables.taking import (
    Taken as Taken,
    TakenBatches as TakenBatches,
)
from tdserve.client.tables.writer import (
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
from tdserve.rules.replay.order import (
    Fifo as Fifo,
    Lifo as Lifo,
)
from tdserve.rules.replay.prioritized import (
    Prioritized as Prioritized,
)
from tdserve.rules.replay.remover import (
    LowestPriority as LowestPriority,
)
from tdserve.rules.replay.sampler import (
    Uniform as Uniform,
)
from tdserve.rules.replay.slices import (
    Slices as Slices,
)
from tdserve.rules.replay.without_replacement import (
    WithoutReplacement as WithoutReplacement,
)
