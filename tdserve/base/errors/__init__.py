"""The one exception tree of tdserve. Imports nothing, so that every floor may raise from it, and by this name alone.

::

    TDServeError                      never raised itself
    ├── RequestError                  the request was invalid; nothing was changed
    │   ├── InvalidSpecError          INVALID_ARGUMENT     store, reason
    │   ├── InvalidRequestError       INVALID_ARGUMENT     argument, reason
    │   │   └── VersionNotFoundError  NOT_FOUND            (the same)
    │   ├── SpecMismatchError         INVALID_ARGUMENT     store, key, expected, actual  also a RuntimeError
    │   │   └── StructureChangedError FAILED_PRECONDITION  (the same)
    │   ├── StoreNotFoundError        NOT_FOUND            name, near, listing
    │   ├── StoreMovedError           FAILED_PRECONDITION  name, server, move           retryable
    │   ├── KeyNotFoundError          NOT_FOUND            store, key, listing, entry, elsewhere  also a KeyError
    │   ├── StoreExistsError          ALREADY_EXISTS       name, reason
    │   ├── KeyExistsError            ALREADY_EXISTS       store, key           also a KeyError
    │   ├── VersionConflictError      FAILED_PRECONDITION  store, key, expected, actual, elsewhere
    │   ├── SelectionError            OUT_OF_RANGE         selection, reason    also an IndexError
    │   ├── StepForgottenError        OUT_OF_RANGE         store, step, kept, next
    │   ├── WrongStateError           FAILED_PRECONDITION  state, event
    │   ├── ShardLostError            FAILED_PRECONDITION  name, shard, server, address, elsewhere
    │   ├── ReadOnlyError             PERMISSION_DENIED    store, reason
    │   ├── LockedError               FAILED_PRECONDITION  store, key           also a RuntimeError
    │   ├── UnauthenticatedError      UNAUTHENTICATED      address, reason
    │   ├── PermissionDeniedError     PERMISSION_DENIED    role, call, store, needed, scope
    │   └── NotSupportedError         UNIMPLEMENTED        feature, reason
    │       └── UnsupportedAttributeError                  (the same)           also an AttributeError
    ├── CapacityError                 RESOURCE_EXHAUSTED   what, asked, free            retryable
    │   └── TooLargeError                                  (the same)                   not retryable
    ├── ServerBusyError               RESOURCE_EXHAUSTED   what, asked, free, limit     retryable
    ├── DeadlineExceededError         DEADLINE_EXCEEDED    what, timeout_s      also a TimeoutError
    │   ├── StoreNotCreatedError                           what, timeout_s, name, near
    │   └── UnansweredPopError                             (the same)                   not retryable
    ├── TransportError                UNAVAILABLE          bytes did not arrive         retryable
    │   ├── ConnectError                                   address, reason
    │   │   ├── HandshakeRefusedError                      (the same)                   not retryable
    │   │   ├── NotLocalError                              (the same)
    │   │   └── NcclUnavailableError                       (the same)
    │   ├── PeerLostError                                  peer, reason
    │   └── TransferAbortedError      ABORTED              transfer, reason
    ├── ProtocolError                 INTERNAL             a message broke the protocol book
    │   ├── LocalProtocolError                             reason: our own bug
    │   ├── RemoteProtocolError       INVALID_ARGUMENT     expected, received: the peer's bug
    │   └── ProtocolVersionError      FAILED_PRECONDITION  address, expected, actual
    ├── CorruptDataError              DATA_LOSS            path, expected, actual
    │   └── DamagedRowError                            store, row, expected, actual
    ├── EndOfStreamError              OUT_OF_RANGE         name, num_left, num_needed
    ├── RootInUseError                FAILED_PRECONDITION  root, holder
    ├── WriterFailedError             UNAVAILABLE          store, num_acknowledged, num_unknown, num_unsent, reason
    └── ClosedError                   UNAVAILABLE          what
        └── ForkedClientError                              what, pid

Every class is built from keyword fields, renders its own message from them, survives pickling, and crosses the wire by
``(class name, fields)``: see ``tdserve.control.status``. ``code`` is the gRPC status name. ``retryable`` is true if
the same call may succeed later without being changed; which of these calls clients make again by themselves is
``REPEATED`` in ``tdserve.client.session.calls.call_conditions``.

``tdserve_error`` has the base class. The others are in ``request_errors``, ``state_errors`` and ``transport_errors``.
"""

from __future__ import annotations

from tdserve.base.errors.request_errors import (
    InvalidRequestError,
    InvalidSpecError,
    KeyExistsError,
    KeyNotFoundError,
    LockedError,
    NotSupportedError,
    PermissionDeniedError,
    ReadOnlyError,
    RequestError,
    SelectionError,
    ShardLostError,
    SpecMismatchError,
    StepForgottenError,
    StoreExistsError,
    StoreMovedError,
    StoreNotFoundError,
    StructureChangedError,
    UnauthenticatedError,
    UnsupportedAttributeError,
    VersionConflictError,
    VersionNotFoundError,
    WrongStateError,
)
from tdserve.base.errors.state_errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    DamagedRowError,
    DeadlineExceededError,
    EndOfStreamError,
    ForkedClientError,
    RootInUseError,
    ServerBusyError,
    StoreNotCreatedError,
    TooLargeError,
    UnansweredPopError,
    WriterFailedError,
)
from tdserve.base.errors.tdserve_error import Field, TDServeError
from tdserve.base.errors.transport_errors import (
    ConnectError,
    HandshakeRefusedError,
    LocalProtocolError,
    NcclUnavailableError,
    NotLocalError,
    PeerLostError,
    ProtocolError,
    ProtocolVersionError,
    RemoteProtocolError,
    TransferAbortedError,
    TransportError,
)

__all__ = [
    "CapacityError",
    "ClosedError",
    "ConnectError",
    "CorruptDataError",
    "DamagedRowError",
    "DeadlineExceededError",
    "EndOfStreamError",
    "Field",
    "ForkedClientError",
    "HandshakeRefusedError",
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
    "PermissionDeniedError",
    "ProtocolError",
    "ProtocolVersionError",
    "ReadOnlyError",
    "RemoteProtocolError",
    "RequestError",
    "RootInUseError",
    "SelectionError",
    "ServerBusyError",
    "ShardLostError",
    "SpecMismatchError",
    "StepForgottenError",
    "StoreExistsError",
    "StoreMovedError",
    "StoreNotCreatedError",
    "StoreNotFoundError",
    "StructureChangedError",
    "TDServeError",
    "TooLargeError",
    "TransferAbortedError",
    "TransportError",
    "UnansweredPopError",
    "UnauthenticatedError",
    "UnsupportedAttributeError",
    "VersionConflictError",
    "VersionNotFoundError",
    "WriterFailedError",
    "WrongStateError",
    "list_error_classes",
]


def list_error_classes() -> dict[str, type[TDServeError]]:
    """Returns every class of this tree by name, for decoding. Subclasses defined elsewhere do not cross the wire."""
    found = [TDServeError]
    for each in found:  # it grows meanwhile
        found.extend(each.__subclasses__())
    return {each.__name__: each for each in found if each.__module__.startswith(f"{__name__}.")}
