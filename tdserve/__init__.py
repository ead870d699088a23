"""tdserve: a distributed data plane for TensorDicts.

A server process owns named, memory-mapped TensorDict stores; clients exchange metadata, then stream the content over
gloo or NCCL, or read and write the mapped files themselves on the server's machine.

>>> import tdserve
>>> server = tdserve.Server("./data").start()
>>> client = server.client()

Names are loaded when they are first used: importing tdserve imports neither torch nor grpc, opens no socket, starts
nothing.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

_HOMES = {
    "tdserve.client.tables.draws.batches": ("Batches",),
    "tdserve.client.client": ("Client",),
    "tdserve.client.cluster.cluster_client": ("ClusterClient",),
    "tdserve.client.cluster.stores.sharded_dataset": ("ShardedDataset",),
    "tdserve.client.cluster.stores.sharded_keyed": ("ShardedKeyedHandle",),
    "tdserve.client.cluster.tables.sharded_queue": ("ShardedQueueHandle",),
    "tdserve.client.cluster.tables.sharded_replay": ("ShardedReplayHandle",),
    "tdserve.client.connecting": ("connect",),
    "tdserve.client.session.calls.call_deadline": ("within",),
    "tdserve.client.session.catalog.description": ("StoreDescription", "VersionInfo"),
    "tdserve.client.moves.manifest": ("Checkpoint",),
    "tdserve.client.moves.server_checkpoints": ("list_checkpoints",),
    "tdserve.client.groups.group": ("Group",),
    "tdserve.client.handles.handle": ("StoreHandle",),
    "tdserve.client.kv.keyed_handle": ("KeyedHandle",),
    "tdserve.client.tables.writers.nstep": ("NStep",),
    "tdserve.client.tables.queue": ("QueueHandle",),
    "tdserve.client.tables.replay": ("ReplayHandle",),
    "tdserve.client.weights.subscription": ("Subscription",),
    "tdserve.client.tables.draws.taking": ("Taken",),
    "tdserve.client.tables.draws.taken_batches": ("TakenBatches",),
    "tdserve.client.weights.pulls": ("Weights",),
    "tdserve.client.tables.writers.writer": ("ReplayWriter",),
    "tdserve.base.errors.request_errors": (
        "InvalidRequestError",
        "InvalidSpecError",
        "KeyExistsError",
        "KeyNotFoundError",
        "LockedError",
        "NotSupportedError",
        "PermissionDeniedError",
        "ReadOnlyError",
        "RequestError",
        "SelectionError",
        "ShardLostError",
        "SpecMismatchError",
        "StepForgottenError",
        "StoreExistsError",
        "StoreMovedError",
        "StoreNotFoundError",
        "StructureChangedError",
        "UnauthenticatedError",
        "UnsupportedAttributeError",
        "VersionConflictError",
        "VersionNotFoundError",
        "WrongStateError",
    ),
    "tdserve.base.errors.state_errors": (
        "CapacityError",
        "ClosedError",
        "CorruptDataError",
        "DamagedRowError",
        "DeadlineExceededError",
        "EndOfStreamError",
        "ForkedClientError",
        "RootInUseError",
        "ServerBusyError",
        "StoreNotCreatedError",
        "TooLargeError",
        "UnansweredPopError",
        "WriterFailedError",
    ),
    "tdserve.base.errors.tdserve_error": ("TDServeError",),
    "tdserve.base.errors.transport_errors": (
        "ConnectError",
        "HandshakeRefusedError",
        "LocalProtocolError",
        "NcclUnavailableError",
        "NotLocalError",
        "PeerLostError",
        "ProtocolError",
        "ProtocolVersionError",
        "RemoteProtocolError",
        "TransferAbortedError",
        "TransportError",
    ),
    "tdserve.base.tls": ("TLS",),
    "tdserve.launcher": ("Server",),
    "tdserve.rules.replay.limiter": ("MinSize", "Queue", "SampleToInsertRatio"),
    "tdserve.rules.replay.samplers.order": ("Fifo", "Lifo"),
    "tdserve.rules.replay.samplers.prioritized": ("Prioritized",),
    "tdserve.rules.replay.samplers.priority_order": ("HighestPriority", "LowestPriority"),
    "tdserve.rules.replay.samplers.sampler": ("Uniform",),
    "tdserve.rules.replay.samplers.slices": ("Slices",),
    "tdserve.rules.replay.samplers.without_replacement": ("WithoutReplacement",),
}

_MODULES = ("aio", "dtensor", "torchrl", "torchrun")
"""Modules with names of their own: ``tdserve.aio.connect``."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 (type checkers read __init__.pyi)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tdserve.{name}")
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tdserve' has no attribute {name!r}")
    is_collecting = gc.isenabled()
    gc.disable()  # collections find nothing, and take a sixth of the time in which torch and tensordict are imported
    try:
        value = globals()[name] = getattr(importlib.import_module(module), name)
    finally:
        if is_collecting:
            gc.enable()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
