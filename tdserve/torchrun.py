"""Servers beside the ranks of a job of ``torchrun``: one on each machine, found through the job's own rendezvous.

>>> with tdserve.torchrun.start_servers("/local/tdserve") as servers:  # in every rank
...     client = servers.client()
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tdserve.base.addresses import find_source_address, parse_address, resolve
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, RootInUseError, WrongStateError
from tdserve.base.torchrun_rank import TorchrunRank
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.launcher import START_TIMEOUT_S, Server
from tdserve.server_folders import RETRY_INTERVAL_S, assign_numbers, list_numbers, name_folder, start_with_token

END_TIMEOUT_S = 600.0
"""How long the ranks may end one after the other; the last may still write a checkpoint."""

_calls = count()
"""Ranks make the same calls in the same order, as they do with collectives: this distinguishes the calls."""


class TorchrunServers:
    """The servers of a job; a context manager, which ends them when all ranks have left it.

    Attributes:
        address: Address of all of them, to be passed to ``tdserve.connect``; the same in every rank.
        token: Which clients must send.
    """

    def __init__(self, address: str, token: str, store: Any, world_size: int, server: Server | None) -> None:
        self.address = address
        self.token = token
        self._store = store
        self._world_size = world_size
        self._server = server
        self._has_left = False

    def __repr__(self) -> str:
        return f"<TorchrunServers at {self.address}>"

    def client(self, **arguments: Any) -> Client:
        """Returns a new client of all of them; arguments as in ``tdserve.connect``."""
        return connect(self.address, **{"token": self.token, **arguments})

    def shutdown(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Ends this machine's server, once all ranks have called this; other ranks than the one that has started it do
        not wait. Idempotent.

        Args:
            timeout_s: For other ranks; the server ends after it in any case.
        """
        if not self._has_left:
            self._has_left = True
            try:
                if self._store.add("left", 1) == self._world_size:
                    self._store.set("all left", "")
                if self._server is not None:
                    self._store.wait(["all left"], timedelta(seconds=timeout_s))
            except dist.DistError:  # the job has ended, or does not end
                pass
        if self._server is not None:
            self._server.shutdown()

    def __enter__(self) -> TorchrunServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(timeout_s=END_TIMEOUT_S if error is None else 0.0)


def start_servers(
    storage: str | os.PathLike[str],
    *,
    host: str | None = None,
    token: str | None = None,
    timeout_s: float = START_TIMEOUT_S,
    **settings: Any,
) -> TorchrunServers:
    """Starts a server on each machine of a job; every rank calls this, and gets the address of all of them.

    The first rank of each machine owns its server, which ends with that process at the latest. When ``torchrun`` starts
    the ranks again, the servers continue with their folders: a server's number is that of its folder, whichever rank
    its machine has now.

    Args:
        storage: A path, below which each server has a folder, ``server-0`` and so on: on each machine's own disk, or on
            one that all share.
        host: Address of this machine, at which others reach it. By default that of the interface towards the job's
            master, which is loopback if that is on this machine and the only one.
        token: Which clients must send, passed by rank 0. By default a random one: it passes through the job's key-value
            store, as the addresses do.
        timeout_s: Until the servers of all machines run.
        settings: Settings of the server, as in ``tdserve.Server``.

    Raises:
        WrongStateError: ``torchrun`` has not started this process.
        InvalidRequestError: A setting is invalid, the folders that were found do not fit, or machines cannot reach each
            other at their addresses.
        DeadlineExceededError: Not all servers were there in time.
    """
    rank = TorchrunRank.from_env()
    if rank is None:
        raise WrongStateError(state="torchrun has not started this process", event="tdserve.torchrun.start_servers")
    deadline_s = time.monotonic() + timeout_s
    job, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"tdserve/{rank.restart_count}/{next(_calls)}", job)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    server = None
    try:
        if rank.rank == 0:
            store.set("token", token or secrets.token_urlsafe(32))
        shared_token = store.get("token").decode()
        if rank.local_rank == 0:
            number = _find_number(store, rank, os.fspath(storage))
            folder = name_folder(os.fspath(storage), number)
            server = _start(folder, host or _find_host(rank), shared_token, settings, deadline_s)
            store.set(f"address/{number}", server.address)
        address = _join_addresses([store.get(f"address/{number}").decode() for number in range(rank.num_nodes)])
    except BaseException as error:
        if server is not None:
            server.shutdown()
        if isinstance(error, dist.DistStoreError):
            raise DeadlineExceededError(what="the start of a server on each machine", timeout_s=timeout_s) from error
        raise
    return TorchrunServers(address, shared_token, store, rank.world_size, server)


def _find_number(store: Any, rank: TorchrunRank, storage: str) -> int:
    """Returns the number of this machine's server, once all machines have looked which folders they have."""
    store.set(f"folders/{rank.node_rank}", " ".join(map(str, list_numbers(storage))))
    seen = [store.get(f"folders/{node}").decode().split() for node in range(rank.num_nodes)]
    return assign_numbers([[int(number) for number in each] for each in seen])[rank.node_rank]


def _find_host(rank: TorchrunRank) -> str:
    return find_source_address(resolve(rank.master_addr)[0])


def _start(folder: str, host: str, token: str, settings: Mapping[str, Any], deadline_s: float) -> Server:
    """Starts a server, as soon as that of an earlier attempt of the job has left the folder."""
    while True:
        try:
            return start_with_token(folder, host, token, settings)
        except RootInUseError:
            if time.monotonic() + RETRY_INTERVAL_S > deadline_s:
                raise
            time.sleep(RETRY_INTERVAL_S)


def _join_addresses(addresses: list[str]) -> str:
    hosts = [ipaddress.ip_address(parse_address("host", address)[0]) for address in addresses]
    if len({host.is_loopback for host in hosts}) > 1:
        reason = f"of {', '.join(addresses)} some are reached on their own machine only; pass host= on that machine"
        raise InvalidRequestError(argument="host", reason=reason)
    return ",".join(addresses)
