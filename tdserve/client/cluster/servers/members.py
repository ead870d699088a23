"""The clients of a cluster's servers: made when first used, and what is known of servers that do not answer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from tdserve.base.addresses import explain_unreachable
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    HandshakeRefusedError,
    PeerLostError,
    TDServeError,
    TransportError,
)
from tdserve.base.tls import TLS
from tdserve.client.client import Client
from tdserve.client.cluster.servers.membership import Membership
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.call_conditions import is_over
from tdserve.client.session.calls.call_deadline import get_call_deadline, within
from tdserve.client.session.calls.call_traces import carry_context
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.control.connection import check_health
from tdserve.rules.lost_servers import PATIENCE_S, PROBE_INTERVAL_S, PROBE_TIMEOUT_S, REACH_S, LostServers

THREADS_PER_SERVER = 2
"""Each server has its own, since calls to one that hangs hold theirs."""

PROBE_WAIT_S = 0.1
"""How long a caller waits for the answer of a server that did not answer recently."""

LATE_PROBE_S = 0.05
"""Time for the answer of a server that has not answered a call in time, if that may wait no longer."""

_Result = TypeVar("_Result")
_log = logging.getLogger("tdserve.client")


class Members:
    """The servers of one cluster, as one client sees them. Threads: safe.

    Args:
        membership: Tells where they are.
        make_client: Makes the client of a server at an address; it connects when it is first used.
        tls: TLS of the connections; None for none.
    """

    def __init__(self, membership: Membership, make_client: Callable[[str], Client], *, tls: TLS | None = None) -> None:
        self._tls = tls
        self.membership = membership
        self._make_client = make_client
        self.is_closed = False
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._clients: dict[int, Client] = {}
        self._lost = LostServers()
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def _begin_anew_after_fork(self) -> None:
        """Uses connections of its own in a forked child; those of the parent must not be closed here."""
        if os.getpid() != self._pid:
            self._inherited += [self._clients, self._threads]
            self._begin()

    def __len__(self) -> int:
        return self.membership.num_servers

    def __repr__(self) -> str:
        return f"<Members: {len(self._clients)} of {len(self)} used, not answering {list(self._lost)}>"

    @property
    def used(self) -> dict[int, Client]:
        """The clients of servers that were used, by number."""
        return dict(self._clients)

    @property
    def lost(self) -> list[int]:
        """Numbers of the servers that did not answer, and have not since."""
        return list(self._lost)

    def get(self, server: int) -> Client:
        """Returns the client of a server.

        Raises:
            ConnectError: The server has no address now.
            ClosedError: The cluster's client was closed.
        """
        self._begin_anew_after_fork()
        client = self._clients.get(server)
        if client is not None:
            return client
        address = self.membership.find(server)
        with self._lock:
            if self.is_closed:
                raise ClosedError(what=f"the client of {self.membership.text}")
            if server not in self._clients:
                client = self._clients[server] = self._make_client(address)
                client.catalog.connection.find_address = partial(self.membership.find, server)
            return self._clients[server]

    def wait_for_any(self, timeout_s: float) -> None:
        """Waits until a server listens.

        Raises:
            ConnectError: None did in time; the error has the reason of each.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            reasons = []
            for server in range(len(self)):
                try:
                    address = self.membership.find(server)
                    reason = explain_unreachable(address)
                except ConnectError as error:
                    address, reason = str(server), error.reason
                if not reason:
                    return
                reasons.append(f"{address}: {reason}")
            if time.monotonic() + PROBE_INTERVAL_S > deadline_s:
                raise ConnectError(address=self.membership.text, reason="; ".join(reasons))
            time.sleep(PROBE_INTERVAL_S)

    def is_lost(self, server: int) -> bool:
        """Returns whether a server did not answer recently. One that did not is tried again from time to time, beside
        the caller that asks then: one that hangs would keep it waiting."""
        if server not in self._lost:
            return False
        with self._lock:  # not due: it is too early, or another thread tries it
            is_due = self._lost.begin_probe(server, time.monotonic())
        if is_due:
            with suppress(FutureTimeoutError):
                self._start(server, partial(self._probe, server)).result(PROBE_WAIT_S)
        return server in self._lost

    def _probe(self, server: int) -> None:
        if self._is_answering(server):
            self.note_answer(server)

    def note_answer(self, server: int) -> None:
        """Takes note that a server has answered: what was just written there is read by the next call."""
        if server in self._lost:
            with self._lock:
                self._lost.note_found(server)
            _log.info("server %d of %s answers again", server, self.membership.text)

    def _is_answering(self, server: int, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        try:
            return check_health(self.membership.find(server), timeout_s=timeout_s, tls=self._tls)
        except TDServeError:
            return False

    def check_answers(self, server: int, role: str, *, patience_s: float = PATIENCE_S) -> None:
        """Waits a moment for a server that does not answer, as a step of this thread's call.

        Args:
            role: What is asked of it, for the error: ``"to which 'a' moves"``.
            patience_s: How long one that listens may take to answer, if the call has so much time.

        Raises:
            ConnectError: It does not answer; the error names it.
        """
        begun_s, deadline = time.monotonic(), get_call_deadline() or Deadline.never
        while True:
            try:
                wait_s = max(deadline.limit(patience_s), PROBE_TIMEOUT_S)
                if check_health(self.membership.find(server), timeout_s=wait_s, tls=self._tls):
                    return
                why = PeerLostError(peer=f"server {server}", reason="it is starting, or ends")
            except (TransportError, DeadlineExceededError) as error:
                if isinstance(error, HandshakeRefusedError):
                    raise
                why = PeerLostError(peer=f"server {server}", reason=getattr(error, "reason", str(error)))
            if time.monotonic() + PROBE_INTERVAL_S > begun_s + REACH_S or is_over(deadline, PROBE_INTERVAL_S):
                self.note_lost(server, why)
                raise self.explain_lost(server, role, why)
            time.sleep(PROBE_INTERVAL_S)

    def raise_if_lost(self, server: int, role: str) -> None:
        """Raises ConnectError if a server did not answer when it was last asked; arguments as in ``check_answers``."""
        if server in self._lost:
            raise self.explain_not_asked(server, role)

    def explain_not_asked(self, server: int, role: str) -> ConnectError:
        """Returns the error of a lost server that was not asked once more; arguments as in ``check_answers``."""
        why = PeerLostError(peer=f"server {server}", reason="it did not when it was last asked")
        return self.explain_lost(server, role, why)

    def explain_lost(self, server: int, role: str, why: ConnectError | PeerLostError) -> ConnectError:
        """Returns the error of a server that does not answer, which names it; other arguments as in
        ``check_answers``."""
        reason = f"server {server}, {role}, does not answer: {why.reason}"
        return ConnectError(address=self.describe_address(server), reason=reason)

    def describe_address(self, server: int) -> str:
        """Returns the address of a server for an error; its number if it has none now."""
        try:
            return self.membership.find(server)
        except ConnectError:
            return f"server {server}"

    def note_silent(self, server: int) -> None:
        """Takes note of a server if it does not answer now; after a call that has timed out."""
        if not self._is_answering(server):
            self.note_lost(server, PeerLostError(peer=f"server {server}", reason="it has stopped answering"))

    def note_unreached(self, server: int, why: TransportError) -> int:
        """Takes note of the server that a call has not reached, and returns its number: the one that was asked, or
        another to which the call had followed a store."""
        address = why.address if isinstance(why, ConnectError) else ""
        found = next((number for number, client in self.used.items() if client.address == address), server)
        self.note_lost(found, why)
        return found

    def note_lost(self, server: int, why: TransportError) -> None:
        """Takes note that a server did not answer; logs it once."""
        with self._lock:
            is_new = self._lost.note_lost(server, time.monotonic())
        if is_new:
            _log.warning("server %d of %s does not answer: %s", server, self.membership.text, why)

    def ask_all(
        self,
        calls: Mapping[int, Callable[[], _Result]],
        *,
        reach_s: float = REACH_S,
        deadline: Deadline | None = None,
    ) -> tuple[dict[int, _Result], dict[int, TransportError]]:
        """Makes a call to each of some servers at the same time.

        Args:
            calls: By server.
            reach_s: How long each tries to reach its server.
            deadline: Deadline of the calls; None: that of the call of which this thread makes a step, if it makes one.

        Returns:
            The results by server, and the failures of those that did not answer: a call that has timed out at a server
            that answers nothing else either is one.

        Raises:
            TDServeError: The first other error, once all calls have ended.
        """

        whole = get_call_deadline() or Deadline.never
        until = deadline or get_call_deadline()

        def run(server: int, call: Callable[[], _Result]) -> _Result:
            try:
                with reach_within(reach_s), nullcontext() if until is None else within(until):
                    return call()
            except DeadlineExceededError:
                # A call whose time is over has waited for its answer already.
                is_late = whole.expired and whole.timeout_s != 0
                if self._is_answering(server, LATE_PROBE_S if is_late else PROBE_TIMEOUT_S):
                    raise
                raise PeerLostError(peer=f"server {server}", reason="it has stopped answering") from None

        found: dict[int, _Result] = {}
        lost: dict[int, TransportError] = {}
        others: list[BaseException] = []
        asked = list(calls.items())
        futures: list[tuple[int, AwaitableFuture[_Result]]] = []
        for server, call in asked[:-1]:
            futures.append((server, self._start(server, partial(run, server, call))))
        for server, call in asked[-1:]:  # one of them in this thread
            futures.append((server, AwaitableFuture()))
            futures[-1][1].run(partial(run, server, call))
        for server, future in futures:
            failure = self._wait(server, future, until or Deadline.never)
            if failure is None:
                found[server] = future.result()
                self.note_answer(server)
            elif isinstance(failure, (ConnectError, PeerLostError)) and failure.retryable:
                self.note_unreached(server, failure)
                lost[server] = failure
            else:
                others.append(failure)
        if others:
            raise others[0]
        return found, lost

    def ask_clients(
        self, servers: Iterable[int], call: Callable[[Client], _Result]
    ) -> tuple[dict[int, _Result], dict[int, TransportError]]:
        """Calls the clients of some servers at the same time; results and errors as in ``ask_all``."""
        return self.ask_all({server: partial(self._call_client, server, call) for server in servers})

    def _call_client(self, server: int, call: Callable[[Client], _Result]) -> _Result:
        return call(self.get(server))

    def _wait(self, server: int, future: AwaitableFuture[Any], deadline: Deadline) -> BaseException | None:
        """Waits for the end of a call, which keeps its deadline itself; returns its failure. One that no thread has
        begun by then is not made."""
        try:
            return future.exception(compute_answer_timeout_s(deadline))
        except FutureTimeoutError:
            if not future.cancel():
                return future.exception()
        if server in self._lost:
            return PeerLostError(peer=f"server {server}", reason="it did not answer earlier calls, which still wait")
        what = f"a free thread: earlier calls to server {server} are under way"
        return DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)

    def _start(self, server: int, work: Callable[[], _Result]) -> AwaitableFuture[_Result]:
        future: AwaitableFuture[_Result] = AwaitableFuture()
        self._begin_anew_after_fork()
        with self._lock:
            if self.is_closed:
                raise ClosedError(what=f"the client of {self.membership.text}")
            if server not in self._threads:
                name = f"tdserve-cluster-{server}"
                self._threads[server] = ThreadPoolExecutor(THREADS_PER_SERVER, thread_name_prefix=name)
            self._threads[server].submit(future.run, carry_context(work))
        return future

    def close(self) -> None:
        """Closes all clients. Idempotent."""
        self._begin_anew_after_fork()
        with self._lock:
            self.is_closed = True
            clients, threads = list(self._clients.values()), list(self._threads.values())
        for client in clients:
            client.close()
        for each in threads:
            each.shutdown(wait=False)

    def list_alive(self, servers: Iterable[int]) -> list[int]:
        """Returns those of some servers that answered when they were last asked."""
        return [server for server in servers if not self.is_lost(server)]
