"""The handle of a keyed store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tdserve.client.kv.filled_places import check_out, fill_out
from tdserve.client.kv.key_arguments import encode_key, encode_keys, list_keys, list_versions, settle_keys
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
from tdserve.rules.kv.entry_changes import ABSENT, MAX_KEY_BYTES, make_missing_error, show_key
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

    def put(
        self,
        keys: str | Sequence[str],
        values: Any,
        if_version: int | Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Puts entries; existing ones are replaced. Readers see all of them, or none.

        Args:
            keys: One key, or several; each a str of 1 to 500 bytes in UTF-8.
            values: One value, or as many as keys: a list of values, or the rows of a tensordict or tensor. If the store
                has a structure, a dict of arrays stands for a tensordict, and an array for a tensor. Otherwise a dict
                comes back as a tensordict if there is a tensor in it, and else as a dict; what is in it beside tensors
                and arrays comes back as it was. Tensors in lists are refused.
            if_version: Nothing is put unless the entry has this version, 0 if it must be absent; one per key, or one
                for all.
            return_early: True returns a future at once; ``values`` may change afterwards. Puts and deletions of one
                handle are carried out in the order of the calls. Reads may overtake them: wait for the future.

        Returns:
            The version of the entry, or a list of one per key, or a future of that. Versions of a store grow, and none
            is used twice, nor by a store that is deleted and created again.

        Raises:
            VersionConflictError: An entry has another version. Nothing was put.
            SpecMismatchError, NotSupportedError: A value does not fit, or cannot be stored. Nothing was put.
            CapacityError: There is no room. Nothing was put.
            DeadlineExceededError: There was no answer in time, and it is unknown whether anything was put.
        """
        check_real("writing to a keyed store")
        deadline = self._client.make_deadline(timeout_s)
        is_queued = return_early or self._coalescer.is_waiting  # behind puts that were first
        if isinstance(keys, str):
            encoded, records = [encode_key(keys)], SplitColumn.from_values([self._records.encode(keys, values)])
        else:
            keys = list_keys(keys)
            encoded = encode_keys(keys)
            records = self._records.encode_many(keys, values, copies=is_queued)
        expected = None if if_version is None else list_versions(if_version, len(encoded))
        is_one = isinstance(keys, str)
        if not encoded:
            return AwaitableFuture.make_done([]) if return_early else []
        what = f"a put to {self.name!r}"
        part = PutPart(encoded, records, expected, deadline, what, is_alone=expected is not None)
        if return_early:
            self._coalescer.submit(part)
            return _convert_future(part.future, is_one, len(encoded))
        first = self._coalescer.submit_and_wait(part) if is_queued else self._coalescer.send(part)
        return _count_up(first, is_one, len(encoded))

    def delete(
        self,
        keys: str | Sequence[str],
        if_version: int | Sequence[int] | None = None,
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Deletes entries, all or none; returns how many there were. They are not read any more when it returns.

        Args:
            if_version: As in ``put``.
            missing_ok: Whether keys may be absent.

        Raises:
            KeyNotFoundError: A key is absent. Nothing was deleted.
            VersionConflictError: An entry has another version. Nothing was deleted.
            DeadlineExceededError: There was no answer in time, and it is unknown whether anything was deleted; or puts
                with an early return, made before by this handle, had none, and nothing was.
        """
        encoded = encode_keys(settle_keys(keys))
        expected = [] if if_version is None else list_versions(if_version, len(encoded))
        if not encoded:
            return 0
        deadline = self._client.make_deadline(timeout_s)
        self._coalescer.flush(deadline)  # puts that were made before
        return self._remove(encoded, expected, deadline, missing_ok=missing_ok)

    def pop(
        self,
        keys: str | Sequence[str],
        default: Any = NO_DEFAULT,
        *,
        timeout_s: float | None = 0,
        select: Any = None,
        numpy: bool | None = None,
    ) -> Any:
        """Returns entries as ``get`` does, and deletes them, all or none. Of several callers one gets an entry.

        The content is here before anything is deleted, so nothing is lost if the call is retried in between. Arguments
        as in ``get``; with ``default`` absent keys are no error.

        Raises:
            KeyNotFoundError: As in ``get``. Nothing was deleted.
            DeadlineExceededError: A key was absent all the time, or puts with an early return, made before by this
                handle, had no answer. Nothing was deleted.
            UnansweredPopError: There was no answer to the deletion in time (within the client's timeout, if the
                timeout is 0), and it is unknown whether the entries were deleted. ``values`` of the error is what would
                have been returned.
        """
        keys = settle_keys(keys)
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
        """Waits until the puts that were made before have ended, also those that fail."""
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

    def get(
        self,
        keys: str | Sequence[str],
        select: Any = None,
        timeout_s: float | None = 0,
        *,
        default: Any = NO_DEFAULT,
        numpy: bool | None = None,
        out: Any = None,
    ) -> Any:
        """Returns entries, as of one moment.

        Args:
            keys: One key, or several.
            select: Keys of the entries, which are tensordicts: only these leaves or parts are returned.
            timeout_s: Seconds to wait for keys that are absent, and for the server; None is the client's timeout. 0
                does not wait for keys, but still for a server that is away, as long as the client's timeout: a read
                continues through a restart.
            default: Returned in place of each entry that is absent, by a call that does not wait. Several keys then
                give a list, also if the store has a structure.
            numpy: True returns tensors as NumPy arrays, and tensordicts as dicts of them, which share the memory of
                what was received, unless there is ``out``; None is the client's setting.
            out: A tensordict that is filled in place and returned, on any device, or a tensor where entries are
                tensors. It has the structure of what would be returned without it. Several keys need a store with a
                structure.

        Returns:
            The value of one key; of several one stacked tensordict or tensor if the store has a structure, else a list.

        Raises:
            KeyNotFoundError: A key is absent, and the timeout is 0; or there is nothing to select. Nothing was written
                to ``out``, as after any other error.
            DeadlineExceededError: A key was absent all the time.
            SpecMismatchError: ``out`` does not fit.
            InvalidRequestError: ``out`` is given with a ``default``, or the entry is neither tensor nor tensordict.
        """
        keys = settle_keys(keys)
        if out is None:
            return self._decode(keys, self._get(keys, timeout_s, default), select, numpy, default)
        check_out(out, keys, default, self.settings, store=self.name)
        found, records = self._get(keys, timeout_s), self._records
        is_one = isinstance(keys, str)
        if select is None and isinstance(records, LikeRecords) and records.copy_into(out, found.records, is_one=is_one):
            return out
        return fill_out(out, self._decode(keys, found, select, numpy=False), store=self.name)

    def get_with_versions(
        self,
        keys: str | Sequence[str],
        select: Any = None,
        timeout_s: float | None = 0,
        *,
        numpy: bool | None = None,
    ) -> tuple[Any, Any]:
        """Returns what ``get`` returns, and the version of each entry: to put it back if it was not changed since.

        Of one key a value and a version, of several the values and a list of versions.
        """
        keys = settle_keys(keys)
        found = self._get(keys, timeout_s)
        values = self._decode(keys, found, select, numpy)
        return values, found.versions[0] if isinstance(keys, str) else found.versions

    def versions(self, keys: str | Sequence[str]) -> Any:
        """Returns the version of an entry, or of each of several; 0 if it is absent."""
        names = [keys] if isinstance(keys, str) else list_keys(keys)
        found = self._look_up(encode_keys(names), self._client.make_deadline(None), asks_versions=True)
        return found.versions[0] if isinstance(keys, str) else found.versions

    def keys(self, prefix: str = "") -> list[str]:
        """Lists the keys that begin with a prefix, sorted by code point. Of very many, each page is of one moment."""
        if not isinstance(prefix, str):
            raise InvalidRequestError(argument="prefix", reason=f"{prefix!r} is not a str")
        if len(prefix.encode(errors="replace")) > MAX_KEY_BYTES:
            return []  # no key is as long
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

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        try:
            encoded = encode_key(key)
        except InvalidRequestError:  # no entry can have it
            return False
        return bool(self._look_up([encoded], self._client.make_deadline(None), asks_versions=True).versions[0])

    def __getitem__(self, key: str | Sequence[str]) -> Any:
        return self.get(key)

    def __setitem__(self, key: str | Sequence[str], value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: str | Sequence[str]) -> None:
        self.delete(key)

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

    def _get(self, keys: str | Sequence[str], timeout_s: float | None, default: Any = NO_DEFAULT) -> FoundEntries:
        encoded = encode_keys(keys)
        return self._find(encoded, self._make_patience(timeout_s, default), default)

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


def _count_up(version: int, is_one: bool, num_keys: int) -> Any:
    return version if is_one else list(range(version, version + num_keys))


def _convert_future(future: AwaitableFuture[int], is_one: bool, num_keys: int) -> AwaitableFuture[Any]:
    """Returns a future of what ``put`` returns."""
    if is_one:
        return future
    return future.convert(lambda first: _count_up(first, is_one, num_keys))
