"""The one exception tree of tdserve. Imports nothing, so that every floor may raise from it.

::

    TDServeError                      never raised itself
    ├── RequestError                  the request was invalid; nothing was changed
    │   ├── InvalidSpecError          INVALID_ARGUMENT     store, reason
    │   ├── InvalidRequestError       INVALID_ARGUMENT     argument, reason
    │   │   └── VersionNotFoundError  NOT_FOUND            (the same)
    │   ├── SpecMismatchError         INVALID_ARGUMENT     store, key, expected, actual  also a RuntimeError
    │   │   └── StructureChangedError FAILED_PRECONDITION  (the same)
    │   ├── StoreNotFoundError        NOT_FOUND            name, near
    │   ├── StoreMovedError           FAILED_PRECONDITION  name, server, move           retryable
    │   ├── KeyNotFoundError          NOT_FOUND            store, key, listing  also a KeyError
    │   ├── StoreExistsError          ALREADY_EXISTS       name, reason
    │   ├── KeyExistsError            ALREADY_EXISTS       store, key           also a KeyError
    │   ├── VersionConflictError      FAILED_PRECONDITION  store, key, expected, actual
    │   ├── SelectionError            OUT_OF_RANGE         selection, reason    also an IndexError
    │   ├── StepForgottenError        OUT_OF_RANGE         store, step, kept, next
    │   ├── WrongStateError           FAILED_PRECONDITION  state, event
    │   ├── ShardLostError            FAILED_PRECONDITION  name, shard, server, address
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
    ├── EndOfStreamError              OUT_OF_RANGE         name
    ├── RootInUseError                FAILED_PRECONDITION  root, holder
    ├── WriterFailedError             UNAVAILABLE          store, num_acknowledged, num_unknown, num_unsent, reason
    └── ClosedError                   UNAVAILABLE          what
        └── ForkedClientError                              what, pid

Every class is built from keyword fields, renders its own message from them, survives pickling, and crosses the wire by
``(class name, fields)``: see ``tdserve.control.status``. ``code`` is the gRPC status name. ``retryable`` is true if
the same call may succeed later without being changed.
"""

from __future__ import annotations

from typing import Any, ClassVar

Field = str | int | float | bool | None  # so that every error crosses the wire without pickle


class TDServeError(Exception):
    """Base of every exception that tdserve raises on purpose; never raised itself.

    Attributes:
        code: gRPC status name of this class.
        retryable: Whether repeating the same call may succeed.
        fields: The offending values, by name; also readable as attributes.
        request_id: Of the request that a server has answered so: its log has the same id. "" for any other error.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    template: ClassVar[str] = "{reason}"
    defaults: ClassVar[dict[str, Field]] = {"reason": ""}

    def __init__(self, **fields: Field) -> None:
        if unknown := fields.keys() - self.defaults.keys():
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        self.fields: dict[str, Field] = {**self.defaults, **fields}
        self.request_id = ""
        super().__init__(self._message())

    def _message(self) -> str:
        return self.template.format(**self.fields)

    def __getattr__(self, name: str) -> Any:
        fields: dict[str, Field] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields, self.request_id))

    def note_request(self, request_id: str) -> None:
        """Notes by which id the server's log has the request. The text of an error that is a bug repeats it."""
        self.request_id = request_id
        if request_id and self.code == "INTERNAL":
            self.args = (f"{self._message()} (request {request_id} in the server's log)",)


def _rebuild(cls: type[TDServeError], fields: dict[str, Field], request_id: str) -> TDServeError:
    (error := cls(**fields)).note_request(request_id)
    return error


class RequestError(TDServeError):
    """The caller asked for something impossible; nothing was changed anywhere."""

    code = "INVALID_ARGUMENT"


class InvalidSpecError(RequestError, ValueError):
    """The structure contradicts itself or cannot be stored. Nothing was created."""

    template = "invalid structure for store {store!r}: {reason}"
    defaults = {"store": "", "reason": ""}


class InvalidRequestError(RequestError, ValueError):
    """An argument has a value that no call accepts. Nothing was changed."""

    template = "invalid {argument}: {reason}"
    defaults = {"argument": "", "reason": ""}


class VersionNotFoundError(InvalidRequestError):
    """These weights have no such version: it is not kept any more, or was not published yet. Nothing was changed."""

    code = "NOT_FOUND"


class SpecMismatchError(RequestError, ValueError, RuntimeError):
    """A tensordict does not fit the store. This is checked before the first byte moves: nothing was written.

    Also a RuntimeError, since tensordict raises one.
    """

    template = "store {store!r}, key {key!r}: expected {expected}, got {actual}"
    defaults = {"store": "", "key": "", "expected": "", "actual": ""}

    def _message(self) -> str:
        is_whole = self.fields["store"] and not self.fields["key"]
        template = self.template.replace(", key {key!r}", "") if is_whole else self.template
        return template.format(**self.fields)


class StructureChangedError(SpecMismatchError):
    """The keys of a store have changed since the caller looked. Nothing was changed; handles look again and retry."""

    code = "FAILED_PRECONDITION"


class StoreNotFoundError(RequestError, LookupError):
    """No store has this name (any more)."""

    code = "NOT_FOUND"
    template = "there is no store {name!r}{near}; client.stores() lists the stores"
    defaults = {"name": "", "near": ""}


class StoreMovedError(RequestError):
    """The store has moved to another server of its cluster, where the cluster's client asks; or it is at rest for a
    move or a checkpoint, and clients ask again."""

    code = "FAILED_PRECONDITION"
    retryable = True
    template = "store {name!r} is at rest, for a checkpoint or because it is moving to another server; ask again"
    defaults = {"name": "", "server": None, "move": ""}

    def _message(self) -> str:
        if self.fields["server"] is None:
            return super()._message()
        where = "store {name!r} has moved to server {server} of its cluster (move {move}); connect to all of them"
        return where.format(**self.fields)


class KeyNotFoundError(RequestError, KeyError):
    """The store has no such key; where ``key`` is empty, it has none at all."""

    code = "NOT_FOUND"
    template = "store {store!r} has no key {key!r}; {listing} lists its keys"
    defaults = {"store": "", "key": "", "listing": ""}

    def _message(self) -> str:
        store = self.fields["store"]
        listing = self.fields["listing"] or (store and f"client.keys({store!r})")
        template = "store {store!r} has no keys" if store and not self.fields["key"] else self.template
        return template.format(**{**self.fields, "listing": listing})

    __str__ = _message  # KeyError would show the repr of the message


class KeyExistsError(RequestError, KeyError):
    """The store already has this key, and the call asked not to replace it. Nothing was changed."""

    code = "ALREADY_EXISTS"
    template = "store {store!r} already has key {key!r}; leave out safe=True to replace it"
    defaults = {"store": "", "key": ""}
    __str__ = TDServeError._message  # KeyError would show the repr of the message


class StoreExistsError(RequestError):
    """A store of this name exists: ``exists_ok=True`` was not passed, or the store differs from what was asked for."""

    code = "ALREADY_EXISTS"
    template = "store {name!r} exists already: {reason}"
    defaults = {"name": "", "reason": "pass exists_ok=True, delete it, or choose another name"}


class VersionConflictError(RequestError):
    """An entry of a keyed store has another version than the caller expected; 0 stands for an absent entry. Nothing was
    changed."""

    code = "FAILED_PRECONDITION"
    template = "store {store!r}, key {key!r}: expected version {expected}, it has {actual}"
    defaults = {"store": "", "key": "", "expected": 0, "actual": 0}


class SelectionError(RequestError, IndexError):
    """An index selects something that does not exist. Nothing was read or written."""

    code = "OUT_OF_RANGE"
    template = "index {selection} does not fit: {reason}"
    defaults = {"selection": "", "reason": ""}


class StepForgottenError(RequestError):
    """The draw that a rank asks for is not kept any more. Nothing was drawn."""

    code = "OUT_OF_RANGE"
    template = (
        "the draw of step {step} of table {store!r} was forgotten (kept are: {kept}); pass step={next} in all ranks, "
        "whose calls without step= then go on behind it; a new run that begins at step 0 has a name of its own (run=), "
        "or calls forget_draws() once before"
    )
    defaults = {"store": "", "step": 0, "kept": "", "next": 0}


class WrongStateError(RequestError):
    """The object is in a state that does not allow this; its state is unchanged."""

    code = "FAILED_PRECONDITION"
    template = "{event} is not possible while {state}"
    defaults = {"state": "", "event": ""}


class ShardLostError(RequestError):
    """The server of a shard answers, but has no such part of the store: its disk was lost, or the creation was cut
    short. Nothing was changed there."""

    code = "FAILED_PRECONDITION"
    template = "server {server} ({address}) has lost shard {shard} of {name!r}; exists_ok=True creates it anew, empty"
    defaults = {"name": "", "shard": 0, "server": 0, "address": ""}


class ReadOnlyError(RequestError):
    """The store can only be read. Nothing was written."""

    code = "PERMISSION_DENIED"
    template = "store {store!r} is read-only: {reason}"
    defaults = {"store": "", "reason": ""}


class LockedError(RequestError, RuntimeError):
    """A store, or a part of it, is locked: its keys cannot change. Nothing was changed."""

    code = "FAILED_PRECONDITION"
    template = (
        "store {store!r} is locked as a whole: no entry may be added, replaced or removed; call unlock_() first, or "
        "write over existing content with set_(), set_at_() or update_()"
    )
    defaults = {"store": "", "key": ""}

    def _message(self) -> str:
        template = self.template.replace(" as a whole", " at {key!r}") if self.fields["key"] else self.template
        return template.format(**self.fields)


class UnauthenticatedError(RequestError):
    """The server asked for a token and got none, a wrong one, or one that has ended; ``reason`` is why it has."""

    code = "UNAUTHENTICATED"
    template = "the server at {address} refused the token; use one of --token-file/--tokens (token=/TDSERVE_TOKEN_FILE)"
    defaults = {"address": "", "reason": ""}

    def _message(self) -> str:
        since = ", since {reason}; get a new one from whoever runs the server (tdserve token new)"
        template = self.template.partition(";")[0] + since if self.fields["reason"] else self.template
        return template.format(**self.fields)


class PermissionDeniedError(RequestError):
    """The token does not grant this call. Nothing was changed.

    ``needed`` is the role that it needs. It is empty if the token does not include a store of this name, whether or not
    there is one. ``scope`` is ``"of all stores"`` if the token has to include all, and includes some; else empty.
    """

    code = "PERMISSION_DENIED"
    template = "the token includes no store {store!r}, so {call!r} is refused; its entry in --tokens lists them"
    defaults = {"role": "", "call": "", "store": "", "needed": "", "scope": ""}

    def _message(self) -> str:
        if not self.fields["needed"]:
            return super()._message()
        what = "{call!r} on store {store!r}" if self.fields["store"] else "{call!r}"
        needed, own = ("{needed!r} {scope}", "{role!r} of some") if self.fields["scope"] else ("{needed!r}", "{role!r}")
        return f"{what} needs a token of role {needed}, and this one has {own}".format(**self.fields)


class NotSupportedError(RequestError, NotImplementedError):
    """tdserve cannot do this, or not yet. Nothing was changed."""

    code = "UNIMPLEMENTED"
    template = "{feature} is not supported: {reason}"
    defaults = {"feature": "", "reason": ""}


class UnsupportedAttributeError(NotSupportedError, AttributeError):
    """A store has no such attribute, where a local tensordict has one. For ``hasattr`` there is none."""


class CapacityError(TDServeError):
    """There is no room: on disk, in a buffer, or under a limit. Nothing was changed."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True
    template = "no room for {what}: asked {asked}, free {free}"
    defaults = {"what": "", "asked": 0, "free": 0}


class TooLargeError(CapacityError):
    """It is larger than all the room that there ever is, so a retry cannot help. Nothing was changed."""

    retryable = False
    template = "no room for {what}: asked {asked}, there are never more than {free}"


class ServerBusyError(TDServeError):
    """The server has reached a limit: ``--memory-limit`` for the content of waiting requests, its file descriptors, or
    that of the caller's token.

    Nothing was changed. Calls retry until their deadline.
    """

    code = "RESOURCE_EXHAUSTED"
    retryable = True
    template = "the server has no room for {what}: {asked} asked for, {free} of {limit} free"
    defaults = {"what": "", "asked": 0, "free": 0, "limit": 0}


class DeadlineExceededError(TDServeError, TimeoutError):
    """A call did not finish before its deadline.

    A read changed nothing. A write may or may not have been stored; a retry stores it once.
    """

    code = "DEADLINE_EXCEEDED"
    retryable = True
    template = "{what} did not happen within {timeout_s} s"
    defaults = {"what": "", "timeout_s": 0}

    def _message(self) -> str:  # the time left of a call has many digits
        shown = f"{round(time_s, 3):g}" if isinstance(time_s := self.fields["timeout_s"], (int, float)) else str(time_s)
        return self.template.format(**{**self.fields, "timeout_s": shown})


class StoreNotCreatedError(DeadlineExceededError):
    """A store that the call waited for was not created in time. Nothing was changed."""

    template = "{what} did not happen within {timeout_s} s: there is no store {name!r}{near}"
    defaults = {"what": "", "timeout_s": 0, "name": "", "near": ""}


class UnansweredPopError(DeadlineExceededError):
    """Entries of a keyed store were read, but their deletion was not answered: it is unknown whether they are deleted.

    Attributes:
        values: What ``pop`` would have returned. It is in this process only: a pickled error does not have it.
    """

    retryable = False
    template = "{what} was not answered within {timeout_s} s: it may have happened. Its result: the error's 'values'"
    values: Any = None


class TransportError(TDServeError):
    """Bytes did not arrive. The session is closed; the next call opens a fresh one."""

    code = "UNAVAILABLE"
    retryable = True


class ConnectError(TransportError, ConnectionError):
    """No session could be opened. Nothing was sent."""

    template = "no connection to {address}: {reason}"
    defaults = {"address": "", "reason": ""}


class HandshakeRefusedError(ConnectError):
    """The server, or this client, does not trust the other's certificate, or only one of them uses TLS. Raised only by
    connections that were never answered: others wait, since certificates are replaced while they are in use."""

    retryable = False


class NotLocalError(ConnectError):
    """Shared memory was asked for, but this process does not share the server's root. Nothing was sent."""

    retryable = False
    template = "no shared memory with the server at {address}: {reason}"


class NcclUnavailableError(ConnectError):
    """NCCL was asked for, but the GPUs of the two ends cannot use it. Nothing was sent."""

    retryable = False
    template = "no NCCL with the server at {address}: {reason}"


class PeerLostError(TransportError, ConnectionError):
    """The other end went away during a call. A destination that was being filled is undefined."""

    template = "lost {peer}: {reason}"
    defaults = {"peer": "", "reason": ""}


class TransferAbortedError(TransportError):
    """One end of a transfer aborted it. A destination that was being filled is undefined."""

    code = "ABORTED"
    template = "the transfer was aborted: {reason}"
    defaults = {"transfer": 0, "reason": ""}

    def _message(self) -> str:
        named = f"transfer {self.fields['transfer']}" if self.fields["transfer"] else "the transfer"
        return self.template.replace("the transfer", named, 1).format(**self.fields)


class ProtocolError(TDServeError):
    """A message broke the protocol book (``proto/README.md``)."""


class LocalProtocolError(ProtocolError):
    """This process would have broken the protocol: a bug of tdserve."""

    template = "bug in this process: {reason}"


class RemoteProtocolError(ProtocolError):
    """The other end broke the protocol: it has a bug, or is not tdserve. As an answer: the request did."""

    code = "INVALID_ARGUMENT"
    template = "the peer broke the protocol: expected {expected}, received {received}"
    defaults = {"expected": "", "received": ""}


class ProtocolVersionError(ProtocolError):
    """Client and server speak different versions of the protocol."""

    code = "FAILED_PRECONDITION"
    template = "the server at {address} speaks protocol {actual}, this client {expected}; both need one tdserve version"
    defaults = {"address": "", "expected": 0, "actual": 0}


class CorruptDataError(TDServeError):
    """Stored bytes are damaged. They are never served."""

    code = "DATA_LOSS"
    template = "damaged data in {path}: expected {expected}, found {actual}"
    defaults = {"path": "", "expected": "", "actual": ""}


class DamagedRowError(CorruptDataError):
    """A row of a store with ``checksum=True`` is not what was written. Other rows can be read."""

    template = "row {row} of store {store!r}: expected {expected}, found {actual}; write it again, or run tdserve check"
    defaults = {"store": "", "row": 0, "expected": "", "actual": ""}


class EndOfStreamError(TDServeError):
    """A queue was closed, and all its rows were taken and acknowledged. No more will come."""

    code = "OUT_OF_RANGE"
    template = "queue {name!r} is closed and drained"
    defaults = {"name": ""}


class RootInUseError(TDServeError):
    """Another server owns this root folder."""

    code = "FAILED_PRECONDITION"
    template = "root {root} is in use by {holder}; stop it, or choose another root"
    defaults = {"root": "", "holder": ""}


class WriterFailedError(TDServeError):
    """A writer of single rows has failed; the cause is chained.

    ``num_acknowledged`` rows are stored and ``num_unsent`` rows are not. Of the ``num_unknown`` rows under way all,
    some or none are stored; those that are follow the acknowledged ones in order.
    """

    code = "UNAVAILABLE"
    template = (
        "the writer of {store!r} has failed: {reason}; {num_acknowledged} rows are stored, {num_unknown} were under "
        "way and may be stored, {num_unsent} were not sent"
    )
    defaults = {"store": "", "num_acknowledged": 0, "num_unknown": 0, "num_unsent": 0, "reason": ""}


class ClosedError(TDServeError):
    """The object was closed before this call."""

    code = "UNAVAILABLE"
    template = "{what} is closed"
    defaults = {"what": ""}


class ForkedClientError(ClosedError):
    """A client that was opened before ``fork()`` was used in the child, which has none of its threads."""

    template = "{what} was opened in process {pid}, and this is a fork of it: call tdserve.connect() in the child"
    defaults = {"what": "", "pid": 0}


def list_error_classes() -> dict[str, type[TDServeError]]:
    """Returns every class of this module by name, for decoding. Subclasses defined elsewhere do not cross the wire."""
    found = [TDServeError]
    for each in found:  # it grows meanwhile
        found.extend(each.__subclasses__())
    return {each.__name__: each for each in found if each.__module__ == __name__}
