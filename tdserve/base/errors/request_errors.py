"""Errors of what was asked for: nothing was changed."""

from __future__ import annotations

from typing import ClassVar

from tdserve.base.errors.tdserve_error import TDServeError


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

    def _make_message(self) -> str:
        named = ", ".join(f"{field} {self.fields[field]!r}" for field in ("store", "key") if self.fields[field])
        difference = self.template.partition(": ")[2].format(**self.fields)
        return f"{named}: {difference}" if named else super()._make_message()


class StructureChangedError(SpecMismatchError):
    """The keys of a store have changed since the caller looked. Nothing was changed; handles look again and retry."""

    code = "FAILED_PRECONDITION"


class StoreNotFoundError(RequestError, LookupError):
    """No store has this name (any more)."""

    code = "NOT_FOUND"
    template = "there is no store {name!r}{near}; {listing}"
    defaults = {"name": "", "near": "", "listing": "client.stores() lists the stores"}


class StoreMovedError(RequestError):
    """The store has moved to another server of its cluster, where the cluster's client asks; or it is at rest for a
    move or a checkpoint, and clients ask again."""

    code = "FAILED_PRECONDITION"
    retryable = True
    template = "store {name!r} is at rest, for a checkpoint or because it is moving to another server; ask again"
    defaults = {"name": "", "server": None, "move": ""}

    def _make_message(self) -> str:
        if self.fields["server"] is None:
            return super()._make_message()
        where = "store {name!r} has moved to server {server} of its cluster (move {move}); connect to all of them"
        return where.format(**self.fields)


_MAX_SHOWN_KEY = 200
"""Characters of a key in a message; the field has all."""


class KeyNotFoundError(RequestError, KeyError):
    """The store, or an entry of a keyed store, has no such key; where ``key`` is empty, it has none at all. Of a shared
    store ``elsewhere`` has what was changed at other servers."""

    code = "NOT_FOUND"
    template = "store {store!r} has no key {key!r}; {listing} lists its keys"
    defaults = {"store": "", "key": "", "listing": "", "entry": "", "elsewhere": ""}

    def _make_message(self) -> str:
        store, listing = self.fields["store"], self.fields["listing"]
        if store and not self.fields["key"]:
            return f"store {store!r} has no keys"
        listing = listing or (store and f"client.keys({store!r})")
        key = str(self.fields["key"])
        shown = key if len(key) <= _MAX_SHOWN_KEY else f"{key[:_MAX_SHOWN_KEY]}... ({len(key)} characters)"
        template = f"entry {{entry!r}} of {self.template}" if self.fields["entry"] else self.template
        return template.format(**{**self.fields, "key": shown, "listing": listing})

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return self._text


class KeyExistsError(RequestError, KeyError):
    """The store already has this key, and the call asked not to replace it. Nothing was changed."""

    code = "ALREADY_EXISTS"
    template = "store {store!r} already has key {key!r}; leave out safe=True to replace it"
    defaults = {"store": "", "key": ""}

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return self._make_message()


class StoreExistsError(RequestError):
    """A store of this name exists: ``exists_ok=True`` was not passed, or the store differs from what was asked for."""

    code = "ALREADY_EXISTS"
    template = "store {name!r} exists already: {reason}"
    defaults = {"name": "", "reason": "pass exists_ok=True, delete it, or choose another name"}


class VersionConflictError(RequestError):
    """An entry of a keyed store has another version than the caller expected; 0 stands for an absent entry. Nothing was
    changed, except what ``elsewhere`` names: entries of a shared store that other servers have."""

    code = "FAILED_PRECONDITION"
    template = "store {store!r}, key {key!r}: expected version {expected}, it has {actual}"
    defaults = {"store": "", "key": "", "expected": 0, "actual": 0, "elsewhere": ""}


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
        "whose calls without step= then continue behind it; a new run that begins at step 0 has its own name (run=), "
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
    short. Nothing was changed there; ``elsewhere`` has what was done at other shards."""

    code = "FAILED_PRECONDITION"
    template = "server {server} ({address}) has lost shard {shard} of {name!r}; exists_ok=True creates it again, empty"
    defaults = {"name": "", "shard": 0, "server": 0, "address": "", "elsewhere": ""}


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

    def _make_message(self) -> str:
        if not self.fields["key"]:
            return super()._make_message()
        return self.template.replace(" as a whole", " at {key!r}").format(**self.fields)


class UnauthenticatedError(RequestError):
    """The server asked for a token and got none, a wrong one, or one that has ended; ``reason`` is why it has.

    ``reason`` is ``NONE_GIVEN`` if none was given.
    """

    NONE_GIVEN: ClassVar[str] = "no token was given"

    code = "UNAUTHENTICATED"
    template = "the server at {address} refused the token; use one of --token-file/--tokens (token=/TDSERVE_TOKEN_FILE)"
    defaults = {"address": "", "reason": ""}

    def _make_message(self) -> str:
        if not self.fields["reason"]:
            return super()._make_message()
        if self.fields["reason"] == self.NONE_GIVEN:
            remedy = (
                "name the file that has it by --token-file or TDSERVE_TOKEN_FILE, or give it by token= or TDSERVE_TOKEN"
            )
            return "the server at {address} needs a token, and none was given; ".format(**self.fields) + remedy
        remedy = "get a new one from the operator of the server (tdserve token new)"
        return "the server at {address} refused the token, since {reason}; ".format(**self.fields) + remedy


_METHODS = {
    "read": "get, indexing",
    "sample": "sample, take, batches",
    "latest": "latest, version, wait_newer, subscribe",
    "list": "keys, values, items",
    "write": "set_, set_at_, update_, send",
    "extend": "extend, append of a writer",
    "change": "update_priority, ack, delete and clear of rows, close",
    "alter": "set of a new key, del_, rename_key_, lock_, unlock_",
    "remove": "delete, pop",
    "claimed": "extend",
    "join_group": "group",
    "create_store": "create_replay, create_queue, create_kv, init_remote",
    "delete_store": "delete",
    "move": "restore, rebalance",
}
"""Methods that make a request, by its kind in the protocol; kinds that are named like their method are left out."""


class PermissionDeniedError(RequestError):
    """The token does not grant this call. Nothing was changed.

    ``needed`` is the role that it needs. It is empty if the token does not include a store, or group, of this name,
    whether or not there is one. ``scope`` is ``"of all stores"`` if the token has to include all, and includes some;
    else empty.
    """

    code = "PERMISSION_DENIED"
    template = "the token includes no store {store!r}, so {call!r} is refused; its entry in --tokens lists them"
    defaults = {"role": "", "call": "", "store": "", "needed": "", "scope": ""}

    def _make_message(self) -> str:
        methods = _METHODS.get(str(self.fields["call"]), "")
        call = f"{{call!r}} ({methods})" if methods else "{call!r}"
        kind = "group" if self.fields["call"] == "join_group" else "store"
        if not self.fields["needed"]:
            return self.template.replace("store", kind, 1).replace("{call!r}", call).format(**self.fields)
        what = f"{call} on {kind} {{store!r}}" if self.fields["store"] else call
        needed, own = "{needed!r}", "{role!r}"
        if self.fields["scope"]:
            needed, own = "{needed!r} {scope}", "{role!r} of some"
        return f"{what} needs a token of role {needed}, and this one has {own}".format(**self.fields)


class NotSupportedError(RequestError, NotImplementedError):
    """tdserve cannot do this, or not yet. Nothing was changed."""

    code = "UNIMPLEMENTED"
    template = "{feature} is not supported: {reason}"
    defaults = {"feature": "", "reason": ""}


class UnsupportedAttributeError(NotSupportedError, AttributeError):
    """A store has no such attribute, where a local tensordict has one. For ``hasattr`` there is none."""
