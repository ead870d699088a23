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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdserve.base.errors import (
        CapacityError,
        ClosedError,
        ConnectError,
        CorruptDataError,
        DeadlineExceededError,
        EndOfStreamError,
        ForkedClientError,
        InvalidRequestError,
        InvalidSpecError,
        KeyExistsError,
        KeyNotFoundError,
        LocalProtocolError,
        LockedError,
        NcclUnavailableError,
        NotLocalError,
        NotSupportedError,
        PeerLostError,
        ProtocolError,
        ProtocolVersionError,
        ReadOnlyError,
        RemoteProtocolError,
        RequestError,
        RootInUseError,
        SelectionError,
        ServerBusyError,
        SpecMismatchError,
        StoreExistsError,
        StoreNotCreatedError,
        StoreNotFoundError,
        StructureChangedError,
        TDServeError,
        TransferAbortedError,
        TransportError,
        UnauthenticatedError,
        WriterFailedError,
        WrongStateError,
    )
    from tdserve.client.client import Client, connect
    from tdserve.client.groups.group import Group
    from tdserve.client.handles.handle import StoreHandle
    from tdserve.client.session.description import StoreDescription, VersionInfo
    from tdserve.client.tables.batches import Batches
    from tdserve.client.tables.nstep import NStep
    from tdserve.client.tables.queue import QueueHandle
    from tdserve.client.tables.replay import ReplayHandle
    from tdserve.client.tables.taking import Taken, TakenBatches
    from tdserve.client.tables.writer import ReplayWriter
    from tdserve.client.weights.subscription import Subscription
    from tdserve.client.weights.versions import Weights
    from tdserve.launcher import Server
    from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
    from tdserve.rules.replay.order import Fifo, Lifo
    from tdserve.rules.replay.prioritized import Prioritized
    from tdserve.rules.replay.remover import LowestPriority
    from tdserve.rules.replay.sampler import Uniform
    from tdserve.rules.replay.slices import Slices
    from tdserve.rules.replay.without_replacement import WithoutReplacement

_HOMES = {
    "tdserve.client.tables.batches": ("Batches",),
    "tdserve.client.client": ("Client", "connect"),
    "tdserve.client.session.description": ("StoreDescription", "VersionInfo"),
    "tdserve.client.groups.group": ("Group",),
    "tdserve.client.handles.handle": ("StoreHandle",),
    "tdserve.client.tables.nstep": ("NStep",),
    "tdserve.client.tables.queue": ("QueueHandle",),
    "tdserve.client.tables.replay": ("ReplayHandle",),
    "tdserve.client.weights.subscription": ("Subscription",),
    "tdserve.client.tables.taking": ("Taken", "TakenBatches"),
    "tdserve.client.weights.versions": ("Weights",),
    "tdserve.client.tables.writer": ("ReplayWriter",),
    "tdserve.base.errors": (
        "CapacityError",
        "ClosedError",
        "ConnectError",
        "CorruptDataError",
        "DeadlineExceededError",
        "EndOfStreamError",
        "ForkedClientError",
        "InvalidRequestError",
        "InvalidSpecError",
        "KeyExistsError",
        "KeyNotFoundError",
        "LocalProtocolError",
        "LockedError",
        "NcclUnavailableError",
        "NotLocalError",
        "NotSupportedError",
        "PeerLostError",
        "ProtocolError",
        "ProtocolVersionError",
        "ReadOnlyError",
        "RemoteProtocolError",
        "RequestError",
        "RootInUseError",
        "SelectionError",
        "ServerBusyError",
        "SpecMismatchError",
        "StoreExistsError",
        "StoreNotCreatedError",
        "StoreNotFoundError",
        "StructureChangedError",
        "TDServeError",
        "TransferAbortedError",
        "TransportError",
        "UnauthenticatedError",
        "WriterFailedError",
        "WrongStateError",
    ),
    "tdserve.launcher": ("Server",),
    "tdserve.rules.replay.limiter": ("MinSize", "Queue", "SampleToInsertRatio"),
    "tdserve.rules.replay.order": ("Fifo", "Lifo"),
    "tdserve.rules.replay.prioritized": ("Prioritized",),
    "tdserve.rules.replay.remover": ("LowestPriority",),
    "tdserve.rules.replay.sampler": ("Uniform",),
    "tdserve.rules.replay.slices": ("Slices",),
    "tdserve.rules.replay.without_replacement": ("WithoutReplacement",),
}

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

# Written out, because type checkers take only what stands here for exported.
__all__ = [
    "Batches",
    "CapacityError",
    "Client",
    "ClosedError",
    "ConnectError",
    "CorruptDataError",
    "DeadlineExceededError",
    "EndOfStreamError",
    "Fifo",
    "ForkedClientError",
    "Group",
    "InvalidRequestError",
    "InvalidSpecError",
    "KeyExistsError",
    "KeyNotFoundError",
    "Lifo",
    "LocalProtocolError",
    "LockedError",
    "LowestPriority",
    "MinSize",
    "NStep",
    "NcclUnavailableError",
    "NotLocalError",
    "NotSupportedError",
    "PeerLostError",
    "Prioritized",
    "ProtocolError",
    "ProtocolVersionError",
    "Queue",
    "QueueHandle",
    "ReadOnlyError",
    "RemoteProtocolError",
    "ReplayHandle",
    "ReplayWriter",
    "RequestError",
    "RootInUseError",
    "SampleToInsertRatio",
    "SelectionError",
    "Server",
    "ServerBusyError",
    "Slices",
    "SpecMismatchError",
    "StoreDescription",
    "StoreExistsError",
    "StoreHandle",
    "StoreNotCreatedError",
    "StoreNotFoundError",
    "StructureChangedError",
    "Subscription",
    "TDServeError",
    "Taken",
    "TakenBatches",
    "TransferAbortedError",
    "TransportError",
    "UnauthenticatedError",
    "Uniform",
    "VersionInfo",
    "Weights",
    "WithoutReplacement",
    "WriterFailedError",
    "WrongStateError",
    "connect",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tdserve' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
