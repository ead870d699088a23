"""The handle of a keyed store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KeyNotFoundError,
    TransportError,
    UnansweredPopError,
    VersionConflictError,
)
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.handles.key_paths import NO_DEFAULT, list_paths
from tdserve.client.kv.entry_mapping import EntryMapping
from tdserve.client.kv.filled_places import fill_out
from tdserve.client.kv.key_arguments import Keys, encode_key, encode_keys
from tdserve.client.kv.put_coalescer import PutCoalescer, PutPart
from tdserve.client.kv.records import LikeRecords, Records, make_records
from tdserve.client.session.by_address import ByAddress, OfProcess
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.data.stored_entries import MAX_LISTED
from tdserve.rules.kv.entry_changes import ABSENT, make_missing_error, show_key
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.store.values.entry_tables import FoundEntries
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tdserve.values.value_bundles import SplitColumn

MAX_POP_TRIES = 1000
"""Tries of a pop whose entries others change in between; each such change is a success of theirs."""


@leave_modes_in_calls
class KeyedHandle(EntryMapping, ByAddress):
    """A keyed store on the server: string keys to tensordicts, tensors or values. It has the calls of a dict.

    Every call reads or changes its keys as of one moment: all of them, or none. If the store is deleted and created
    again with the same structure, the handle refers to the new one.

    Threads: safe. Processes: safe, whether the handle is pickled (by address) or forked.

    Attributes:
        name: Name of the store.
        settings: What an entry is, and which entries make room.
        spec: Structure of one entry; empty if each has its own.
    """

    _of_process = ("_client", "_coalescer", "_records")

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._client = client
        self.name = description.name
        self.settings = KeyedSettings.from_json(description.settings)
        self.spec: Spec = description.spec
        self._stored = self.settings.make_stored_spec(self.spec.fingerprint)

    @OfProcess
    def _coalescer(self) -> PutCoalescer:
        return PutCoalescer(self._client, self.name, self._stored.fingerprint)

    @OfProcess
    def _records(self) -> Records:
        return make_records(self.name, self.settings.like, self.spec, allow_pickle=self._client.allow_pickle)

    def __repr__(self) -> str:
        return f"<KeyedHandle {self.name!r} at {self._client.address}>"

    # ------------------------------------------------------------ changes

    def _put(
        self, keys: Keys, values: Any, expected: list[int] | None, timeout_s: float | None, return_early: bool
    ) -> Any:
        deadline = self._client.make_deadline(timeout_s)
        is_queued = return_early or self._coalescer.is_waiting  # behind puts that were first
        if isinstance(keys, str):
            encoded, records = [encode_key(keys)], SplitColumn.from_values([self._records.encode(keys, values)])
        else:
            encoded = encode_keys(keys)
            records = self._records.encode_many(keys, values, copies=is_queued)
        is_one = isinstance(keys, str)
        if not encoded:
            return AwaitableFuture.make_done([]) if return_early else []
        what = f"a put to {self.name!r}"
        part = PutPart(encoded, records, expected, deadline, what, is_alone=expected is not None)
        if return_early:
            self._coalescer.submit(part)
            return part.future if is_one else _convert_future(part.future, len(encoded))
        first = self._coalescer.submit_and_wait(part) if is_queued else self._coalescer.send(part)
        return first if is_one else _count_up(first, len(encoded))

    def _delete(self, keys: list[str], expected: list[int] | None, missing_ok: bool, timeout_s: float | None) -> int:
        encoded = encode_keys(keys)
        deadline = self._client.make_deadline(timeout_s)
        self._coalescer.flush(deadline)  # puts that were made before
        return self._remove(encoded, expected or [], deadline, missing_ok=missing_ok)

    def _pop(self, keys: Keys, default: Any, timeout_s: float | None, select: Any, numpy: bool | None) -> Any:
        encoded = encode_keys(keys)
        patience = self._make_patience(timeout_s, default)
        self._coalescer.flush(patience.deadline)
        for number in range(MAX_POP_TRIES):
            found = self._find(encoded, patience, default)
            values = self._decode(keys, found, select, numpy, default)
            pairs = zip(encoded, found.versions, strict=True)
            # Each key once, however often it is named.
            there = {key: version for key, version in pairs if version != ABSENT}
            try:
                if there:
                    self._remove([*there], [*there.values()], patience.deadline, missing_ok=False)
                break
            except (VersionConflictError, KeyNotFoundError):  # changed since it was read
                if number + 1 == MAX_POP_TRIES:
                    raise
            except (DeadlineExceededError, TransportError) as error:
                what = f"the deletion of popped entries in {self.name!r}"
                unanswered = UnansweredPopError(what=what, timeout_s=patience.deadline.timeout_s)
                unanswered.values = values
                raise unanswered from error
        return values

    def _settle_puts(self) -> None:
        self._coalescer.flush(self._client.make_deadline(None))

    def _remove(self, keys: list[bytes], if_versions: list[int], deadline: Deadline, *, missing_ok: bool) -> int:
        def attempt(session: Session, request: int, deadline: Deadline) -> int:
            asked = control_pb2.RemoveRequest(
                store=self.name,
                fingerprint=self._stored.fingerprint,
                keys=keys,
                if_versions=if_versions,
                skips_missing=missing_ok,
                timeout_s=deadline.remaining_s,
            )
            pending = session.send(request, remove=asked)
            answer = pending.wait(compute_answer_timeout_s(deadline), f"a deletion in {self.name!r}")
            return int(answer.done.num_rows)

        return self._client.call(attempt, deadline, request=self._client.requests.begin_change(), store=self.name)

    # ------------------------------------------------------------ reads

    def _get(self, keys: Keys, select: Any, timeout_s: float | None, default: Any, numpy: bool | None) -> Any:
        found = self._find(encode_keys(keys), self._make_patience(timeout_s, default), default)
        return self._decode(keys, found, select, numpy, default)

    def _get_into(self, out: Any, keys: Keys, select: Any, timeout_s: float | None) -> Any:
        found, records = self._find(encode_keys(keys), self._make_patience(timeout_s)), self._records
        is_one = isinstance(keys, str)
        if select is None and isinstance(records, LikeRecords) and records.copy_into(out, found.records, is_one=is_one):
            return out
        return fill_out(out, self._decode(keys, found, select, numpy=False), store=self.name)

    def _get_with_versions(
        self, keys: Keys, select: Any, timeout_s: float | None, numpy: bool | None
    ) -> tuple[Any, Any]:
        found = self._find(encode_keys(keys), self._make_patience(timeout_s))
        values = self._decode(keys, found, select, numpy)
        return values, found.versions[0] if isinstance(keys, str) else found.versions

    def _ask_versions(self, keys: list[str]) -> Sequence[int]:
        return self._look_up(encode_keys(keys), self._client.make_deadline(None), asks_versions=True).versions

    def _list_keys(self, prefix: str) -> list[str]:
        encoded, found = encode_key(prefix) if prefix else b"", list[bytes]()
        deadline = self._client.make_deadline(None)
        while True:
            asked = control_pb2.ListRequest(prefix=encoded, after=found[-1] if found else b"")
            page = self._list(asked, deadline).keys
            found += page
            if len(page) < MAX_LISTED:
                return [key.decode() for key in found]

    def info(self) -> dict[str, Any]:
        """Returns figures of the store: num_rows (its entries), nbytes (of its file), settings and more."""
        return self._client.catalog.describe(self.name).as_dict()

    def __len__(self) -> int:
        return int(self._list(control_pb2.ListRequest(asks_count=True), self._client.make_deadline(None)).num_rows)

    def _decode(
        self, keys: str | Sequence[str], found: FoundEntries, select: Any, numpy: bool | None, default: Any = NO_DEFAULT
    ) -> Any:
        chosen = None if select is None else list_paths(select, argument="select")
        show = partial(self._client.hand_over, numpy=numpy)
        if default is not NO_DEFAULT:
            names = [keys] if isinstance(keys, str) else keys
            values = [
                default if version == ABSENT else show(self._records.decode(key, record, chosen))
                for key, version, record in zip(names, found.versions, found.records, strict=True)
            ]
            return values[0] if isinstance(keys, str) else values
        if isinstance(keys, str):
            return show(self._records.decode(keys, found.records[0], chosen))
        several = self._records.decode_many(keys, found.records, chosen)
        return [*map(show, several)] if type(several) is list else show(several)

    def _make_patience(self, timeout_s: float | None, default: Any = NO_DEFAULT) -> _Patience:
        if default is not NO_DEFAULT and timeout_s != 0:
            late = "a call that waits raises DeadlineExceededError instead of returning a default"
            reason = f"pass default= or timeout_s=, not both: {late}"
            raise InvalidRequestError(argument="default", reason=reason)
        return _Patience(self._client.make_deadline(None if timeout_s == 0 else timeout_s), waits=timeout_s != 0)

    def _find(self, keys: list[bytes], patience: _Patience, default: Any = NO_DEFAULT) -> FoundEntries:
        """Returns entries that are all there, or some of which may be absent if there is a default.

        Raises:
            KeyNotFoundError, DeadlineExceededError: As raised by ``get``.
        """
        check_real("reading a keyed store")
        if not keys:
            return FoundEntries([], [])
        if default is not NO_DEFAULT:
            return self._find_present(keys, patience.deadline)
        deadline, waits = patience
        while True:
            found = self._look_up(keys, deadline, waits=waits)
            if ABSENT not in found.versions:
                return found
            missing = keys[found.versions.index(ABSENT)]
            if not waits:
                raise make_missing_error(self.name, missing)
            if deadline.expired:  # each time it was there when the server had looked, and gone when it was read
                what = f"a put of entry {show_key(missing)!r} in keyed store {self.name!r}"
                raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)

    def _find_present(self, keys: list[bytes], deadline: Deadline) -> FoundEntries:
        """Returns entries, some of which may be absent; those that are not are as of one moment."""
        while True:
            with suppress(KeyNotFoundError):
                return self._look_up(keys, deadline)
            versions = [ABSENT] if len(keys) == 1 else self._look_up(keys, deadline, asks_versions=True).versions
            present = [number for number, version in enumerate(versions) if version != ABSENT]
            found = FoundEntries([ABSENT] * len(keys), [b""] * len(keys))
            with suppress(KeyNotFoundError):  # deleted since
                some = self._look_up([keys[number] for number in present], deadline) if present else found
                for number, version, record in zip(present, some.versions, some.records, strict=False):
                    found.versions[number], found.records[number] = version, record
                return found

    def _look_up(
        self, keys: list[bytes], deadline: Deadline, *, waits: bool = False, asks_versions: bool = False
    ) -> FoundEntries:
        """Returns entries, some of which may be absent if the client can read them itself.

        A call that does not wait for keys still waits for its server, as every call does.
        """
        movers = self._client.movers
        found = None if movers is None else movers.entries.find_entries(self.name, self._stored, keys)
        if found is not None and (not waits or ABSENT not in found.versions):
            return found

        def attempt(session: Session, request: int, deadline: Deadline) -> FoundEntries:
            asked = control_pb2.GetRequest(
                store=self.name,
                fingerprint=self._stored.fingerprint,
                keys=keys,
                timeout_s=deadline.remaining_s if waits else 0.0,
                asks_versions=asks_versions,
            )
            pending = session.send(request, get=asked)
            answer = pending.wait(compute_answer_timeout_s(deadline), f"entries of {self.name!r}")
            reply = Reply(request, pending, answer, deadline)
            return session.movers.entries.take_entries(reply, self.name, self._stored, keys)

        return self._client.call(attempt, deadline, store=self.name)

    def _list(self, asked: control_pb2.ListRequest, deadline: Deadline) -> control_pb2.Done:
        asked.store, asked.fingerprint = self.name, self._stored.fingerprint

        def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
            pending = session.send(request, list=asked)
            return pending.wait(compute_answer_timeout_s(deadline), f"the keys of {self.name!r}").done

        return self._client.call(attempt, deadline, store=self.name)


class _Patience(NamedTuple):
    """How long a call lasts at most, and whether it waits for absent keys so long, or only for the server."""

    deadline: Deadline
    waits: bool


def _count_up(first: int, num_keys: int) -> list[int]:
    return list(range(first, first + num_keys))


def _convert_future(future: AwaitableFuture[int], num_keys: int) -> AwaitableFuture[Any]:
    """Returns a future of the versions that ``put`` returns for several keys."""
    return future.convert(lambda first: _count_up(first, num_keys))
