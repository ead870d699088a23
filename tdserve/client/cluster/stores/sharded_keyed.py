"""Keyed stores that several servers share: the hash of a key chooses its server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, TDServeError, UnansweredPopError
from tdserve.client.client import Client
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.stores.divisions import KeyDivision
from tdserve.client.cluster.stores.part_creation import create_parts
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.row_choice import choose_rows, count_rows
from tdserve.client.handles.key_paths import NO_DEFAULT
from tdserve.client.kv.entry_mapping import EntryMapping
from tdserve.client.kv.key_arguments import Keys, encode_key, encode_keys
from tdserve.client.kv.new_store import create_keyed
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.rules.kv.entry_changes import make_missing_error
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.placement import PlacementRecord, hash_to_shard, name_part


def create_sharded_keyed(
    cluster: ClusterServers,
    name: str,
    servers: tuple[int, ...],
    like: Any,
    max_bytes: int | None,
    eviction: Any,
    ttl_s: float | None,
    *,
    exists_ok: bool,
) -> None:
    """Creates a keyed store of several servers; see ``ClusterClient.create_kv``."""
    placement = PlacementRecord("keyed", servers, KeyedSettings(max_bytes=max_bytes or 0, eviction=eviction).to_json())
    part_bytes = None if max_bytes is None else -(-max_bytes // len(servers))

    def create_part(shard: int, client: Client) -> None:
        create_keyed(
            client,
            name_part(name, shard),
            like,
            max_bytes=part_bytes,
            eviction=eviction,
            ttl_s=ttl_s,
            exists_ok=True,
            num_shards=len(servers),
        )

    create_parts(cluster, name, placement, create_part, exists_ok=exists_ok)


MAX_NAMED_KEYS = 8
"""Keys that an error names."""


class _Wait(NamedTuple):
    """How long a read waits.

    Attributes:
        deadline: Deadline of the whole call.
        timeout_s: What the parts get: 0 if they do not wait for absent keys, None if they wait until the deadline.
    """

    deadline: Deadline
    timeout_s: float | None


@leave_modes_in_calls
class ShardedKeyedHandle(EntryMapping, ShardedStore):
    """A keyed store that several servers share; calls as in :class:`tdserve.KeyedHandle`.

    A call reads or changes the keys of one server as of one moment, and those of several servers one server after the
    other, or at the same time. Each server counts versions: those of an entry grow, and entries of several servers may
    have the same. An early put of several keys may be overtaken by later calls. While a server does not answer, its
    keys cannot be read or written; listings leave them out.

    With ``return_early=True`` values of several keys are read later, and must not change before the future is done.
    ``pop`` deletes nothing before all entries are there; its error has what other servers had popped by then as
    ``values``: pairs of keys and what ``KeyedHandle.pop`` returned, or would have returned, for them.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, KeyDivision(placement.num_shards), deadline=deadline)
        self.spec = self.parts.first.spec
        self.settings = KeyedSettings.from_json(self.parts.first.settings)

    def _find_shard(self, key: Any) -> int:
        return hash_to_shard(encode_key(key), self.num_shards)

    def _split(self, keys: Sequence[str]) -> dict[int, list[int]]:
        where: dict[int, list[int]] = {}
        for number, key in enumerate(keys):
            where.setdefault(self._find_shard(key), []).append(number)
        return where

    def _ask_owners(
        self,
        keys: Sequence[str],
        call: Callable[[Any, list[str], list[int]], Any],
        deadline: Deadline | None = None,
        *,
        done: str = "",
    ) -> dict[int, Any]:
        """Calls the parts that have these keys.

        Args:
            call: Gets the part, its keys, and their positions.
            deadline: Deadline of the call; None: the client's default.
            done: What then has happened to the entries, such as "put", for errors; "" if nothing was changed.

        Raises:
            ConnectError: One does not answer in time. The others have done it.
            TDServeError: The first error of a part. The others have done it.
        """
        where = self._split(keys)

        def act(shard: int, part: Any) -> Any:
            return call(part, [keys[number] for number in where[shard]], where[shard])

        if len(where) == 1:  # waits as long as a store of one server does
            ((shard, numbers),) = where.items()
            return {shard: self.ask_part(shard, lambda part: call(part, list(keys), numbers), deadline)}

        def explain_done(shards: list[int]) -> str:
            names = [keys[number] for shard in shards for number in where[shard]]
            more = f" and {len(names) - MAX_NAMED_KEYS} more" if len(names) > MAX_NAMED_KEYS else ""
            return f"{', '.join(map(repr, names[:MAX_NAMED_KEYS]))}{more} were {done}, at other servers" if done else ""

        return self.ask_each(where, act, deadline=deadline, explain_done=explain_done)

    def _begin_wait(self, timeout_s: float | None) -> _Wait:
        """Returns how long a read waits, given how long for absent keys: one that does not wait for keys waits for the
        server as every call does."""
        return _Wait(self.make_deadline(timeout_s or None), 0 if timeout_s == 0 else None)

    def _merge_in_key_order(self, keys: Sequence[str], found: dict[int, Any]) -> Any:
        """Puts what the parts have returned, one each for their keys, in the order of the keys."""
        where = self._split(keys)
        if all(isinstance(each, list) for each in found.values()):
            joined: list[Any] = [None] * len(keys)
            for shard, values in found.items():
                for number, value in zip(where[shard], values, strict=True):
                    joined[number] = value
            return joined
        order = torch.argsort(torch.tensor([number for shard in found for number in where[shard]]))
        return choose_rows(torch.cat(list(found.values())), order)

    # ------------------------------------------------------------ changes

    @gather_spans
    def _put(
        self, keys: Keys, values: Any, expected: list[int] | None, timeout_s: float | None, return_early: bool
    ) -> Any:
        deadline = self.make_deadline(timeout_s)
        if isinstance(keys, str):

            def put_one(part: Any) -> Any:
                return part.put(keys, values, expected, return_early=return_early)

            return self.ask_part(self._find_shard(keys), put_one, deadline)
        encode_keys(keys)  # checked before any server puts some
        _check_length(values, keys)

        def put() -> Any:
            def put_some(part: Any, some: list[str], where: list[int]) -> Any:
                return part.put(some, choose_rows(values, torch.tensor(where)), _choose_versions(expected, where))

            return (
                self._merge_in_key_order(keys, self._ask_owners(keys, put_some, deadline, done="put")) if keys else []
            )

        return self._cluster.run_later(put, deadline) if return_early else put()

    @gather_spans
    def _delete(self, keys: list[str], expected: list[int] | None, missing_ok: bool, timeout_s: float | None) -> int:
        deadline = self.make_deadline(timeout_s)

        def delete(part: Any, some: list[str], where: list[int]) -> int:
            return int(part.delete(some, _choose_versions(expected, where), missing_ok=missing_ok))

        return sum(self._ask_owners(keys, delete, deadline, done="deleted").values())

    def _pop(self, keys: Keys, default: Any, timeout_s: float | None, select: Any, numpy: bool | None) -> Any:
        wait = self._begin_wait(timeout_s)
        popped: list[tuple[Any, Any]] = []

        def pop(part: Any, some: Any, _: Any = None) -> Any:
            try:
                found = part.pop(some, default, timeout_s=wait.timeout_s, select=select, numpy=numpy)
            except UnansweredPopError as error:
                popped.append((some, error.values))
                raise
            popped.append((some, found))
            return found

        if isinstance(keys, str):
            return self.ask_part(self._find_shard(keys), lambda part: pop(part, keys), wait.deadline)
        if default is NO_DEFAULT:
            with within(wait.deadline):
                self._wait_present(keys, wait.timeout_s)
        try:
            return self._merge_in_key_order(keys, self._ask_owners(keys, pop, wait.deadline, done="popped"))
        except TDServeError as error:
            error.values = popped or None
            raise

    def _settle_puts(self) -> None:
        self.ask_parts(range(self.num_shards), lambda _, part: part._settle_puts())

    def _wait_present(self, keys: Sequence[str], timeout_s: float | None) -> None:
        """Waits until all entries are there; errors as in ``get``."""
        if timeout_s != 0:
            self.get(keys, timeout_s=timeout_s)
            return
        for key, version in zip(keys, self.versions(keys), strict=True):
            if not int(version):
                raise make_missing_error(self.name, key.encode(errors="surrogatepass"))

    # ------------------------------------------------------------ reads

    @gather_spans
    def _get(self, keys: Keys, select: Any, timeout_s: float | None, default: Any, numpy: bool | None) -> Any:
        wait = self._begin_wait(timeout_s)

        def get(part: Any, some: Any, _: Any = None) -> Any:
            return part.get(some, select, wait.timeout_s, default=default, numpy=numpy)

        if isinstance(keys, str):
            return self.ask_part(self._find_shard(keys), lambda part: get(part, keys), wait.deadline)
        if not keys:
            return self.ask_part(0, lambda part: get(part, keys), wait.deadline)
        return self._merge_in_key_order(keys, self._ask_owners(keys, get, wait.deadline))

    def _get_with_versions(
        self, keys: Keys, select: Any, timeout_s: float | None, numpy: bool | None
    ) -> tuple[Any, Any]:
        wait = self._begin_wait(timeout_s)

        def get(part: Any, some: Any, _: Any = None) -> Any:
            return part.get_with_versions(some, select, wait.timeout_s, numpy=numpy)

        if isinstance(keys, str):
            one: tuple[Any, Any] = self.ask_part(self._find_shard(keys), lambda part: get(part, keys), wait.deadline)
            return one
        found = self._ask_owners(keys, get, wait.deadline)
        values = self._merge_in_key_order(keys, {shard: each[0] for shard, each in found.items()})
        return values, self._merge_in_key_order(keys, {shard: each[1] for shard, each in found.items()})

    def _ask_versions(self, keys: list[str]) -> Sequence[int]:
        found = self._ask_owners(keys, lambda part, some, _: part.versions(some)) if keys else {}
        merged: list[int] = self._merge_in_key_order(keys, found)
        return merged

    def _list_keys(self, prefix: str) -> list[str]:
        found = self.ask_parts(range(self.num_shards), lambda _, part: part.keys(prefix))
        return sorted(key for keys in found.values() for key in keys)

    def __len__(self) -> int:
        return sum(self.ask_parts(range(self.num_shards), lambda _, part: len(part)).values())


def _choose_versions(versions: Sequence[int] | None, where: Sequence[int]) -> list[int] | None:
    return None if versions is None else [versions[number] for number in where]


def _check_length(values: Any, keys: Sequence[str]) -> None:
    """Raises InvalidRequestError if there are more or fewer values than keys."""
    if isinstance(values, dict):
        for each in values.values():
            _check_length(each, keys)
        return
    length = count_rows(values)
    if length != len(keys):
        what = "one value" if length is None else f"{length} values"
        raise InvalidRequestError(argument="values", reason=f"{what} for {len(keys)} keys")
