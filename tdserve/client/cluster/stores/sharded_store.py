"""What stores that several servers share have in common: their parts, and calls to all of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    ShardLostError,
    SpecMismatchError,
    StoreNotFoundError,
    TDServeError,
    TransportError,
)
from tdserve.client.client import Client
from tdserve.client.cluster.servers.calls_that_follow import call_and_follow
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.directory import compute_look_s
from tdserve.client.cluster.servers.lost_parts import LOOK_AGAIN_S
from tdserve.client.cluster.servers.part_errors import convert_part_errors, merge_failures, note_elsewhere
from tdserve.client.cluster.stores.divisions import StoreDivision
from tdserve.client.cluster.stores.shared_parts import SharedParts
from tdserve.client.cluster.sums import add_up_parts
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.by_address import get_process_client
from tdserve.client.session.calls.call_conditions import is_passing
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.lost_servers import PROBE_INTERVAL_S, REACH_S
from tdserve.rules.placement import PlacementRecord, name_part
from tdserve.structure.trees.tree import Path

_Result = TypeVar("_Result")
_log = logging.getLogger("tdserve.client")


@leave_modes_in_calls
class ShardedStore:
    """A store that several servers share, each a part, which is an ordinary store of its own there.

    A handle keeps to one division of rows or keys among the parts. If the store was made anew with another one, it
    raises WrongStateError, and reads and changes nothing.

    Threads: safe. Pickled by address; a forked child uses connections of its own.

    Attributes:
        name: Name of the store.
        parts: Its parts.
        is_degraded: Whether a part is left out of calls now, since its server does not answer or has lost it. That a
            server was lost is known from the first call that needs it.
    """

    def __init__(
        self,
        cluster: ClusterServers,
        name: str,
        placement: PlacementRecord,
        division: StoreDivision,
        *,
        deadline: Deadline,
    ) -> None:
        self._cluster = cluster
        self.name = name
        self.parts = SharedParts(cluster, name, placement, division)
        self.parts.note_first(self._describe_any(deadline))

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (type(self), self._cluster.recipe, self.name, self.placement))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} over {self.num_shards} servers of {self._cluster.address}>"

    @property
    def placement(self) -> PlacementRecord:
        """Which servers have the store."""
        return self.parts.placement

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return self.parts.num_shards

    @property
    def is_degraded(self) -> bool:
        """See the class."""
        return bool(self.list_left_out())

    def list_left_out(self) -> list[int]:
        """Returns the shards that are left out of calls now; see ``is_degraded``."""
        return sorted(set(range(self.num_shards)) - set(self.parts.list_live()))

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call; None is the client's default, or the call of which this thread makes a
        step."""
        return self._cluster.make_deadline(timeout_s)

    # ------------------------------------------------------------ calls

    def ask_parts(
        self, shards: Iterable[int], call: Callable[[int, Any], _Result], *, deadline: Deadline | None = None
    ) -> dict[int, _Result]:
        """Calls each of some parts at the same time; leaves out those whose servers do not answer. Servers that did not
        answer recently are left out at once, if others do.

        Args:
            call: Gets the shard and its handle.
            deadline: Deadline of the whole call, and of the wait for a first answer if all parts are asked; None: no
                wait, and that of the call of which this thread makes a step, or the client's default.

        Returns:
            The results by shard.

        Raises:
            TransportError: None answers.
            ShardLostError: None of those that answer has its part.
            TDServeError: The first other error.
        """
        wanted = list(shards)
        until = deadline if len(wanted) == self.num_shards else None
        deadline = deadline or self.make_deadline(None)
        while True:
            live = [shard for shard in self.parts.list_live() if shard in wanted]
            found, failures = self._ask_some(live or wanted, call, REACH_S, deadline)
            if found or not failures:
                self.note_left_out()
                return found
            failure = next(iter(failures.values()))
            is_away = isinstance(failure, TransportError) and failure.retryable
            if until is None or until.expired or not is_away:
                raise failure
            time.sleep(until.limit(PROBE_INTERVAL_S))

    def _ask_some(
        self,
        asked: list[int],
        call: Callable[[int, Any], _Result],
        reach_s: float,
        deadline: Deadline,
        *,
        keeps_refusals: bool = False,
    ) -> tuple[dict[int, _Result], dict[int, TDServeError]]:
        """Calls parts; returns the results, and the failures of those that are lost or whose servers do not answer.

        Args:
            keeps_refusals: Whether what a part refuses is a failure, too; otherwise it is raised.
        """
        failures: dict[int, TDServeError] = {}

        def ask(shard: int) -> list[_Result]:
            try:
                return [self.ask_part(shard, partial(call, shard))]
            except (TransportError, DeadlineExceededError):  # perhaps the server does not answer
                raise
            except TDServeError as error:
                if not keeps_refusals and not isinstance(error, ShardLostError):
                    raise
                failures[shard] = error
                return []

        servers = self.placement.servers
        calls = {servers[shard]: partial(ask, shard) for shard in asked}
        found, lost = self._cluster.members.ask_all(calls, reach_s=reach_s, deadline=deadline)
        for shard in asked:
            if (failure := lost.get(servers[shard])) is not None:
                self.parts.note_unreached(shard, failure)
                failures[shard] = failure
        results = {shard: each for shard in asked for each in found.get(servers[shard], [])}
        with within(deadline):
            self.parts.find_moved_parts()
        return results, failures

    def ask_each(
        self,
        shards: Collection[int],
        call: Callable[[int, Any], _Result],
        *,
        deadline: Deadline | None = None,
        explain_done: Callable[[list[int]], str] = lambda _: "",
    ) -> dict[int, _Result]:
        """Calls each of some parts as ``ask_parts`` does, also those whose servers did not answer recently. Each server
        is waited for as if it were the only one.

        Args:
            deadline: Deadline of the whole call; None: that of the call of which this thread makes a step, or the
                client's default.
            explain_done: Returns what these shards have done although others do not answer, or refuse it, and what to
                do, for errors.

        Raises:
            TransportError: One does not answer. The calls of the others were made. ConnectError if nothing was sent to
                those that do not answer.
            DeadlineExceededError: Several do not answer in time, or one that answers other calls. Whether their calls
                were made is unknown.
            ShardLostError: One is lost. Likewise.
            TDServeError: The first other error.
        """
        deadline = deadline or self.make_deadline(None)
        found, failures = self._ask_some(list(shards), call, math.inf, deadline, keeps_refusals=True)
        if not failures:
            return found
        done = explain_done(sorted(found)) if found else ""
        failure = merge_failures(failures, self.name, self._cluster.address, deadline)
        raise note_elsewhere(failure, done, sorted(found))

    def ask_part(self, shard: int, call: Callable[[Any], _Result], deadline: Deadline | None = None) -> _Result:
        """Calls a part; its errors name the store. Other errors as in ``SharedParts.get_part``. While its
        server does not listen, and nothing was sent, it is looked for again: it may have moved before.

        Args:
            call: Gets the handle; what it is not given a timeout for ends by the deadline.
            deadline: As in ``ask_each``.
        """
        deadline = deadline or self.make_deadline(None)

        def look_again(error: ConnectError) -> bool:
            before = self.placement.servers[shard]
            self.parts.note_unreached(shard, error)
            self.parts.find_moved_parts()
            return self.placement.servers[shard] != before

        with convert_part_errors(self.name, self.parts.division.get_first_row), within(deadline):
            return call_and_follow(lambda: self._call_part(shard, call), look_again, deadline)

    def _call_part(self, shard: int, call: Callable[[Any], _Result]) -> _Result:
        part = self.parts.get_part(shard)
        try:
            return call(part)
        except StoreNotFoundError as error:
            if error.fields["name"] != name_part(self.name, shard):
                raise
            again = self.parts.reopen_part(shard)
            if again is None:
                raise
        except SpecMismatchError:
            self.parts.check_exists()  # perhaps it was made anew
            raise
        return call(again)

    def get_any_part(self, deadline: Deadline) -> Any:
        """Returns the handle of a part that was used; of the first that answers if none was."""
        for handle in self.parts.list_open():
            return handle
        return next(iter(self.ask_parts(range(self.num_shards), lambda _, part: part, deadline=deadline).values()))

    def ask_any_part(self, call: Callable[[Any], _Result], deadline: Deadline) -> _Result:
        """Calls the part of ``get_any_part``; its errors name the store."""
        with convert_part_errors(self.name, self.parts.division.get_first_row), within(deadline):
            return call(self.get_any_part(deadline))

    def list_part_keys(
        self, deadline: Deadline, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """Lists the keys that each part has; other arguments as in ``TensorDict.keys``."""
        return self.ask_any(
            lambda client, part: client.keys(part, include_nested, leaves_only, sort=sort), deadline=deadline
        )

    def note_left_out(self) -> None:
        """Logs shards without which a call continues, once, and reports to the servers whether there are any."""
        lost = set(self._cluster.members.lost)
        silent = {shard for shard, server in enumerate(self.placement.servers) if server in lost}
        left_out = frozenset(silent.union(self.parts.lost_parts.list_shards()))
        before = self.parts.lost_parts.replace_left_out(left_out)
        if new := (left_out - before) & silent:
            shown = ", ".join(f"shard {shard} (server {self.placement.servers[shard]})" for shard in sorted(new))
            _log.warning("store %r continues without %s, until there is an answer", self.name, shown)
        for shard in self.parts.lost_parts.take_unreported():
            _log.warning("store %r continues without shard %d, which %s", self.name, shard, self._explain_lost(shard))
        if bool(left_out) != bool(before):
            for server, client in self._cluster.members.used.items():
                if server not in lost:
                    client.observed_calls.note_degraded(self.name, bool(left_out))

    def _explain_lost(self, shard: int) -> str:
        server = self.placement.servers[shard]
        return f"server {server} has lost; creating the store again with exists_ok=True makes an empty one"

    def ask_any(self, call: Callable[[Client, str], _Result], *, deadline: Deadline) -> _Result:
        """Calls the client of the first server that answers, with the name of its part. One that does not leaves time
        for another, and one more is asked in any case.

        Raises:
            TransportError: None answers.
            DeadlineExceededError, StoreMovedError, ServerBusyError: None of those that answer did it in time.
        """
        failure: TDServeError | None = None
        shards = [*dict.fromkeys([*self.parts.list_live(), *range(self.num_shards)])]
        for number, shard in enumerate(shards):
            server = self.placement.servers[shard]
            is_last = number + 1 == len(shards)
            until = deadline if is_last else deadline.shorten(compute_look_s(deadline))
            calls = {server: partial(self._call_client, server, call, name_part(self.name, shard))}
            try:
                found, lost = self._cluster.members.ask_all(calls, deadline=until)
            except StoreNotFoundError:
                continue  # of this part alone, perhaps: it is being created or deleted
            except TDServeError as error:
                if not is_passing(error):
                    raise
                failure = error
            else:
                if not lost:
                    return found[server]
                failure = lost[server]
            if number and deadline.expired:
                break
        if failure is None:
            with suppress(DeadlineExceededError), within(deadline):
                self.parts.check_exists()
            raise StoreNotFoundError(name=self.name)
        raise failure

    def _call_client(self, server: int, call: Callable[[Client, str], _Result], part: str) -> _Result:
        with convert_part_errors(self.name):  # of keys and figures: before the handle is whole, too
            return call(self._cluster.members.get(server), part)

    def _describe_any(self, deadline: Deadline) -> StoreDescription:
        """Describes a part that exists; waits for one of a store that is being created."""
        while True:
            try:
                found = self.ask_any(lambda client, part: client.describe(part), deadline=deadline)
                break
            except StoreNotFoundError:
                if deadline.expired:
                    raise
            time.sleep(LOOK_AGAIN_S)
        return found

    # ------------------------------------------------------------ figures

    def describe(self) -> StoreDescription:
        """Returns the structure of the store, and the sums of its parts' figures."""
        return self._add_up(self._describe_parts())

    def _add_up(self, parts: dict[int, StoreDescription]) -> StoreDescription:
        return add_up_parts(
            self.name, self.placement.settings, parts, self.parts.division.get_first_row, num_shards=self.num_shards
        )

    def _describe_parts(self) -> dict[int, StoreDescription]:
        return self.ask_parts(range(self.num_shards), lambda shard, _: self._describe_part(shard))

    def _describe_part(self, shard: int) -> StoreDescription:
        client = self._cluster.members.get(self.placement.servers[shard])
        return self.parts.check_part(shard, client.describe(name_part(self.name, shard)))

    def info(self) -> dict[str, Any]:
        """Returns figures of the store, as for a store of one server; ``"shards"`` lists those of the parts, None for
        one that does not answer, and ``"degraded"`` the numbers of these: sums such as ``"inserts"`` are without them.
        """
        with within(self.make_deadline(None)):
            self.parts.read_placement()  # parts may have moved
            parts = self._describe_parts()
        found = self._add_up(parts).as_dict()
        found["shards"] = [parts[shard].as_dict() if shard in parts else None for shard in range(self.num_shards)]
        found["servers"] = list(self.placement.servers)
        found["degraded"] = [shard for shard in range(self.num_shards) if shard not in parts]
        return found


def _reopen(kind: Callable[..., ShardedStore], recipe: Any, name: str, placement: PlacementRecord) -> ShardedStore:
    cluster: Any = get_process_client(recipe)
    return kind(cluster, name, placement, deadline=Deadline.after(cluster.timeout_s))
