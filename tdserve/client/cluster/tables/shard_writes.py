"""Writes of rows to the shards of a table: which shard gets them, also while its server does not answer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, DeadlineExceededError, ShardLostError, StoreNotFoundError, TransportError
from tdserve.base.ids import make_client_id
from tdserve.base.torchrun_rank import find_rank
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.reach import reach_within
from tdserve.rules.lost_servers import PROBE_INTERVAL_S, REACH_S
from tdserve.rules.placement import choose_writer_shard, list_shards_to_try
from tdserve.structure.building.array_views import to_arrays


class ShardWrites:
    """Writes rows to one shard, or to another one in its place, as the table's settings allow. Threads: safe.

    Args:
        cluster: The servers.
        store: The parts, and calls to them.
    """

    def __init__(self, cluster: ClusterServers, store: ShardedStore) -> None:
        self._cluster = cluster
        self._store = store
        self._identity = (os.getpid(), make_client_id())

    def choose_shard(self, writer: int, *, salt: bytes = b"") -> int:
        """Returns the shard of a writer: the same one as long as this handle exists."""
        pid, identity = self._identity
        if pid != os.getpid():  # a forked child is another writer
            self._identity = os.getpid(), make_client_id()
            identity = self._identity[1]
        rank = None if salt else find_rank()
        return choose_writer_shard(self._store.num_shards, writer=writer, identity=salt or identity, rank=rank)

    def check_not_lost(self, shards: Sequence[int]) -> None:
        """Raises ConnectError, before anything is written, if a shard is known not to answer and writes do not wait."""
        members = self._cluster.members
        for shard in shards:
            server = self._store.placement.servers[shard]
            if self._store.placement.on_shard_loss == "raise" and members.is_lost(server):
                raise members.explain_not_asked(server, f"which has shard {shard} of {self._store.name!r}")

    def write(self, shard: int, deadline: Deadline, call: Callable[[Any], Any]) -> Any:
        """Writes to a part, or to another while its server does not answer; returns row numbers of the whole table.

        Only an attempt of which nothing was sent is followed by another; one that continues in the background is
        followed by none.
        """
        while True:
            try:
                with within(deadline):
                    return self._write_once(shard, deadline, call)
            except ConnectError:
                pause_s = PROBE_INTERVAL_S
                if self._store.placement.on_shard_loss != "redirect" or (deadline.remaining_s or 0.0) < pause_s:
                    raise
            time.sleep(pause_s)

    def _write_once(self, shard: int, deadline: Deadline, call: Callable[[Any], Any]) -> Any:
        members, on_loss = self._cluster.members, self._store.placement.on_shard_loss
        failure: TransportError | ShardLostError | None = None
        with within(deadline):
            self._store.parts.find_moved_parts()
        # The rows of a key stay together, whichever client writes them.
        salt = b"" if self._store.placement.shard_by else self._identity[1]
        tried = list_shards_to_try(shard, self._store.num_shards, on_loss, salt=salt)
        for number in tried:
            server = self._store.placement.servers[number]
            if on_loss != "wait" and members.is_lost(server) and not self._is_last(number):
                failure = failure or members.explain_not_asked(
                    server, f"which has shard {number} of {self._store.name!r}"
                )
                continue
            try:
                with reach_within(math.inf if on_loss == "wait" else REACH_S, is_for_unsent=True):
                    numbers = self._shift(self._store.ask_part(number, call, deadline), number)
                if not isinstance(numbers, AwaitableFuture) and self._store.placement.servers[number] == server:
                    members.note_answer(server)
                if failure is not None:
                    self._store.note_left_out()
                return numbers
            except ShardLostError as error:
                if on_loss != "redirect":
                    raise
                failure = failure or error
            except DeadlineExceededError:
                members.note_silent(server)  # the next write goes elsewhere
                raise
            except ConnectError as error:
                if deadline.expired:  # it was tried for all this time, since something may have been sent
                    raise
                self._store.parts.note_unreached(number, error)
                failure = error
        raise failure or ConnectError(
            address=self._cluster.address,
            reason=f"no shard of {self._store.name!r} answers (tried {tried}); see tdserve ls",
        )

    def _is_last(self, shard: int) -> bool:
        return self._store.placement.on_shard_loss == "redirect" and not [
            each for each in self._store.parts.list_live() if each != shard
        ]

    def _shift(self, numbers: Any, shard: int) -> Any:
        """Returns the numbers of rows of a part in the whole table; those that were not stored stay -1."""
        offset = self._store.parts.division.get_first_row(shard)
        if isinstance(numbers, AwaitableFuture):
            numbers.add_done_callback(partial(self._note_outcome, shard))
            return numbers.convert(lambda found: self._shift(found, shard))
        found = torch.as_tensor(numbers)
        numbers = torch.where(found < 0, found, found + offset) if offset else found
        return to_arrays(numbers) if self._cluster.numpy else numbers

    def _note_outcome(self, shard: int, written: AwaitableFuture[Any]) -> None:
        if not written.cancelled() and isinstance(written.exception(), StoreNotFoundError):
            self._store.parts.forget_part(shard)
