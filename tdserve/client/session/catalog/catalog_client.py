"""The client of a server's catalog: names, keys, descriptions, statistics. No torch, no session."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from enum import Enum
from threading import Lock, Timer
from typing import Any, Final

from tdserve.base.addresses import parse_address
from tdserve.base.deadline import GRACE_S, Deadline, compute_grace_s
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    StoreMovedError,
    StoreNotCreatedError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.base.ids import check_store_name, make_client_id
from tdserve.base.tls import TLS
from tdserve.client.session.calls.call_conditions import REFUSED_FOR_NOW, RETRY_BACKOFF_S, choose_pauses_s
from tdserve.client.session.calls.call_deadline import LONGEST_WAIT_S, begin_call, check_wait_s
from tdserve.client.session.calls.reach import Reach, get_reach, is_patient
from tdserve.client.session.catalog.description import StoreDescription, from_message
from tdserve.client.session.catalog.message_facts import convert_stats
from tdserve.client.session.requests.elsewhere import FindMoved, Follow, find_no_server, follow_nowhere
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.control.connection import ControlConnection
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2

DEFAULT_TIMEOUT_S = 30.0
"""Default timeout: long enough for a server to restart, short enough for a person to wait."""


class Once(Enum):
    """What a call accepts in place of seconds."""

    ONCE = "asks once, for as long as every call waits for its server"


ONCE: Final = Once.ONCE

AskSession = Callable[[str, Any, Deadline], Any]
"""A method of the server, its request, and the deadline of the call, to its response, or None."""


def _ask_no_session(method: str, request: object, deadline: Deadline) -> None:
    return None


class CatalogClient:
    """Asks a server about its stores. A client with sessions holds one.

    Threads: safe. After a ``fork`` the child must make one of its own: the parent's raises ForkedClientError in every
    call there.

    Args:
        address: ``host:port``.
        token: Bearer token, if the server requires one.
        tls: TLS of the connection; None for none.
        timeout_s: Default of every call that can wait, seconds; None is 30.

    Attributes:
        client_id: By which the server recognises the client.
        connection: To the server.
        is_closed: Whether it was closed; every call then raises ClosedError.
        missing_names: Warnings and errors about stores that do not exist.
        requests: Numbers of the client's requests.
        ask_session: Asks the same over an open session, which takes less time; returns None if there is none.
        find_moved: Finds the client for calls about a store that has moved.
        follow: Makes calls about a store whose server may have ended.
        find_policy: Returns what is known of a policy that may be on another server, at least of this version if it has
            one.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls: TLS | None = None,
    ) -> None:
        self.timeout_s = check_wait_s(DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        self.token = _check_token(token)
        self._pid = os.getpid()
        self.is_closed = False
        self.missing_names = MissingNames(self.find_names_around)
        self.tls = tls
        self.connection = ControlConnection(_check_address(address), token=token, tls=tls)
        self.client_id = make_client_id()
        self.requests = RequestNumbers()
        self.ask_session: AskSession = _ask_no_session
        self.find_moved: FindMoved[CatalogClient] = find_no_server
        self.follow: Follow[CatalogClient] = follow_nowhere
        self.find_policy: Callable[[str, int], control_pb2.PolicyNews | None] = lambda name, at_least: None

    @property
    def address(self) -> str:
        """Of the server, as it was last found."""
        return self.connection.address

    @property
    def is_inherited(self) -> bool:
        """Whether a fork inherited this client; it works only in the process that made it."""
        return os.getpid() != self._pid

    def stores(self, prefix: str = "", *, timeout_s: float | None = None) -> list[str]:
        """Lists the names of all stores, sorted."""
        pages = self._iter_pages(prefix, self.make_deadline(timeout_s))
        return [name for page in pages for name in page.names]

    def list_with_moved(self, prefix: str = "") -> tuple[list[str], list[str]]:
        """Lists the names of the stores of a cluster's server, and of those that have moved from there to others, or
        were deleted there since."""
        pages = list(self._iter_pages(prefix, self.make_deadline(None), with_moved=True))
        return [name for page in pages for name in page.names], [name for page in pages for name in page.moved]

    def _iter_pages(
        self, prefix: str, deadline: Deadline, *, with_moved: bool = False
    ) -> Iterator[control_pb2.ListStoresResponse]:
        if not isinstance(prefix, str):
            raise InvalidRequestError(argument="prefix", reason=f"{prefix!r} is not a str")
        request = control_pb2.ListStoresRequest(prefix=prefix, with_moved=with_moved)
        while True:
            page = self.call_within("ListStores", request, deadline)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        deadline = self.make_deadline(None)
        try:
            request = control_pb2.DescribeStoreRequest(name=check_store_name(name), without_spec=True)
            self._ask("DescribeStore", request, deadline)
        except (StoreNotFoundError, InvalidRequestError):
            return False
        except StoreMovedError as error:
            return name in self.find_moved(error, deadline)
        return True

    def keys(
        self, name: str, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """Lists the keys of a store; see ``Client.keys``."""
        request = control_pb2.ListKeysRequest(
            name=check_store_name(name), include_nested=include_nested, leaves_only=leaves_only, sort=sort
        )
        response = self.call("ListKeys", request)
        if response.keys:
            return list(response.keys)
        return [path.parts[0] if len(path.parts) == 1 else tuple(path.parts) for path in response.paths]

    def describe(self, name: str, *, timeout_s: float | Once | None = ONCE) -> StoreDescription:
        """Describes a store; see ``Client.describe``."""
        if timeout_s is ONCE:
            return self.describe_existing(name, self.make_deadline(None))
        return self.describe_awaited(name, self.make_deadline(timeout_s))

    def describe_awaited(self, name: str, deadline: Deadline) -> StoreDescription:
        """Describes a store, and waits for its creation, as one step of a call with this deadline.

        Raises:
            StoreNotFoundError: It does not exist, and the call asks once.
            StoreNotCreatedError: It was not created in time.
        """
        try:
            return self.describe_existing(name, deadline)
        except StoreNotFoundError:
            if deadline.timeout_s == 0:
                raise
        remaining_s = deadline.limit(LONGEST_WAIT_S)
        try:
            if not remaining_s:  # the first query took all the time
                what = f"the creation of store {name!r}"
                raise StoreNotCreatedError(what=what, timeout_s=deadline.timeout_s, name=name)
            with self.missing_names.watch(name, remaining_s):
                return self._fetch_description(name, deadline, wait_s=remaining_s)
        except StoreNotCreatedError as error:
            raise self.missing_names.explain(error, deadline.timeout_s) from None

    def find_names_around(self, name: str, num_names: int, timeout_s: float) -> Sequence[str]:
        """Lists up to this many names around one, in their order, with that name if there is such a store."""
        request = control_pb2.ListStoresRequest(near=name, page_size=num_names)
        names: Sequence[str] = self.call("ListStores", request, timeout_s=min(self.timeout_s, timeout_s)).names
        return names

    def find(self, name: str, *, timeout_s: float | None = None) -> StoreDescription | None:
        """Describes a store; returns None at once if it does not exist."""
        request = control_pb2.DescribeStoreRequest(name=check_store_name(name))
        try:
            deadline = self.make_deadline(timeout_s)
            return from_message(self._ask("DescribeStore", request, deadline))
        except StoreNotFoundError:
            return None

    def describe_existing(self, name: str, deadline: Deadline) -> StoreDescription:
        """Describes a store that exists, as one step of a call with this deadline."""
        return self._fetch_description(name, deadline)

    def _fetch_description(self, name: str, deadline: Deadline, *, wait_s: float = 0.0) -> StoreDescription:
        request = control_pb2.DescribeStoreRequest(name=check_store_name(name), timeout_s=wait_s)
        return from_message(self.call_within("DescribeStore", request, deadline))

    def get_fingerprint(self, name: str, deadline: Deadline) -> bytes:
        """Returns the current fingerprint of a store's structure, as one step of a call with this deadline.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        return bytes(self.describe_briefly(name, deadline).fingerprint)

    def describe_briefly(self, name: str, deadline: Deadline) -> control_pb2.StoreDescription:
        """Returns the description of a store without its structure, as one step of a call with this deadline.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        request = control_pb2.DescribeStoreRequest(name=check_store_name(name), without_spec=True)
        found: control_pb2.StoreDescription = self.call_within("DescribeStore", request, deadline)
        return found

    def stats(self) -> dict[str, Any]:
        """Returns the server's own figures as plain values."""
        return convert_stats(self.get_server_stats())

    def get_server_stats(self, *, timeout_s: float | None = None) -> control_pb2.GetStatsResponse:
        """Returns the server's own figures: workers, sessions, bytes by transport."""
        request = control_pb2.GetStatsRequest()
        stats: control_pb2.GetStatsResponse = self.call("GetStats", request, timeout_s=timeout_s)
        return stats

    def observe(
        self, *, max_stores: int = 0, names: Sequence[str] = (), max_sessions: int = 0, timeout_s: float | None = None
    ) -> control_pb2.ObserveResponse:
        """Returns all that an observer shows, by one question.

        Args:
            max_stores: Most stores whose figures are asked for, those of most recent use.
            names: Names of further ones; those that do not exist are left out.
            max_sessions: Most sessions whose figures are asked for, the newest.
            timeout_s: As in ``call``.
        """
        request = control_pb2.ObserveRequest(max_stores=max_stores, names=names, max_sessions=max_sessions)
        found: control_pb2.ObserveResponse = self.call("Observe", request, timeout_s=timeout_s)
        return found

    def close(self) -> None:
        """Closes the connection. Idempotent; every later call raises ClosedError."""
        self.is_closed = True
        if not self.is_inherited:
            self.connection.close()

    def __enter__(self) -> CatalogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_usable(self) -> None:
        """Raises ForkedClientError or ClosedError if no call is possible."""
        if os.getpid() != self._pid:
            raise ForkedClientError(what=f"the client of {self.address}", pid=self._pid)
        if self.is_closed:
            raise ClosedError(what=f"the client of {self.address}")

    def call(self, method: str, request: object, *, timeout_s: float | None = None) -> Any:
        """Calls a method of the server; None is the default timeout."""
        return self.call_within(method, request, self.make_deadline(timeout_s))

    def call_within(self, method: str, request: object, deadline: Deadline) -> Any:
        """Calls a method of the server, as one step of a call with this deadline; what is asked of one store where that
        is, if it has moved before its server ended."""
        store = getattr(request, "name", "")
        if not store or not is_patient():  # who has set another patience follows by itself
            return self._call_anywhere(method, request, deadline)
        return self.follow(self, store, lambda catalog: catalog._call_anywhere(method, request, deadline), deadline)

    def _call_anywhere(self, method: str, request: object, deadline: Deadline) -> Any:
        try:
            return self._ask(method, request, deadline)
        except StoreNotFoundError as error:
            raise self.missing_names.explain(error, deadline.timeout_s) from None
        except StoreNotCreatedError:
            raise
        except DeadlineExceededError as error:
            raise self.missing_names.explain(error, deadline.timeout_s) from error.__cause__
        except StoreMovedError as error:  # or is being moved
            return self.find_moved(error, deadline).call_within(method, request, deadline)

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call; None is the default timeout, or the deadline of the call of which this thread
        makes a step."""
        return begin_call(timeout_s, self.timeout_s)

    def _ask(self, method: str, request: object, deadline: Deadline) -> Any:
        """Calls a method of the server, again while the store is at rest for a move or a checkpoint, or the server, or
        a limit of the token, has no room for it."""
        backoff_s = RETRY_BACKOFF_S
        while True:
            try:
                return self._ask_once(method, request, deadline)
            except REFUSED_FOR_NOW as error:
                pause_s, backoff_s = choose_pauses_s(error, deadline, backoff_s)
            time.sleep(pause_s)

    def _ask_once(self, method: str, request: object, deadline: Deadline) -> Any:
        self.check_usable()
        answer = self.ask_session(method, request, deadline)
        if answer is not None:
            return answer
        if not is_patient():
            self._wait_ready(get_reach(), deadline.remaining_s or 0.0)
        # Time that has run out in an earlier step is no reason for the patience of a call that asks once.
        grace_s = compute_grace_s(deadline.timeout_s)
        return self.connection.call(method, request, timeout_s=deadline.remaining_s or 0.0, grace_s=grace_s)

    def _wait_ready(self, reach: Reach, timeout_s: float) -> None:
        """Waits until the server accepts connections, or is given up. Raises ConnectError."""
        begun_s = time.monotonic()
        while True:
            left_s = max(begun_s + timeout_s - time.monotonic(), 0.0)
            try:
                self.connection.wait_ready(min(left_s, reach.seconds))
                return
            except ConnectError:
                if left_s <= reach.seconds or reach.is_over(self.address, begun_s, is_unknown=False):
                    raise


def _check_address(address: object) -> str:
    """Returns an address. Raises InvalidRequestError for an invalid one, or one without a port."""
    if not isinstance(address, str):
        raise InvalidRequestError(argument="address", reason=f"{address!r} is not HOST:PORT")
    if parse_address("address", address)[1] is None:
        reason = f"{address!r} has no port; give HOST:PORT, as the server prints it when it is ready"
        raise InvalidRequestError(argument="address", reason=reason)
    return address


def _check_token(token: object) -> str | None:
    """Returns a token that can be sent. The error does not contain it, so that logs do not either."""
    if token is None:
        return None
    if not isinstance(token, str):
        raise InvalidRequestError(argument="token", reason=f"it is a {type(token).__name__}, not a str")
    if not (token.isascii() and token.isprintable()):
        reason = "it has characters beyond printable ASCII; is it a file's text with its line feed?"
        raise InvalidRequestError(argument="token", reason=reason)
    return token


LOOK_AFTER_S = 1.0
"""Time from the start of a wait: processes may start in any order, and most stores exist by then."""

LOOK_S = 1.4
"""Timeout of a query for similar names."""

MIN_LOOK_S = 0.05

WARN_AGAIN_S = 60.0
"""Least time between two warnings about one name."""

MAX_WARNED = 256
"""Names whose last warning is remembered."""

NUM_AROUND = 200
"""Names that are searched: the nearest in the order of names, however many there are."""

MAX_NEAR = 3

_log = logging.getLogger("tdserve.client")


class MissingNames:
    """Warnings and errors of one client about stores that do not exist. Threads: safe.

    Args:
        ask: Returns up to this many of the server's names around one, including that one if it exists, within some
            seconds.
    """

    def __init__(self, ask: Callable[[str, int, float], Sequence[str]]) -> None:
        self._ask = ask
        self._lock = Lock()
        self._warned_s: dict[str, float] = {}

    def find_near(self, name: str, *, within_s: float = LOOK_S) -> list[str] | None:
        """Finds names similar to one that does not exist; None if it does.

        Raises:
            TDServeError: The server did not answer the query.
        """
        names = self._ask(name, NUM_AROUND, max(within_s - GRACE_S, MIN_LOOK_S))
        return None if name in names else get_close_matches(name, names, n=MAX_NEAR)

    def warn(self, name: str, left_s: float) -> None:
        """Logs that a store for which a call waits does not exist; raises nothing.

        Args:
            left_s: Remaining time of the wait; the query takes no longer, even if the server does not answer.
        """
        if left_s < GRACE_S + MIN_LOOK_S:
            return  # the call's own error will report it at once
        with suppress(TDServeError):
            near = self.find_near(name, within_s=min(left_s, LOOK_S))
            if near is not None and self._may_warn(name):
                _log.warning("a call waits for the creation of store %r: there is none yet%s", name, _list_near(near))

    def explain(self, error: TDServeError, timeout_s: float | None) -> TDServeError:
        """Adds to an error the time of the whole call, if it is a timeout, or similar names, if a store is missing."""
        if type(error) is DeadlineExceededError and timeout_s is not None:
            whole = DeadlineExceededError(what=error.what, timeout_s=timeout_s)
            whole.__suppress_context__ = True
            whole.note_request(error.request_id)
            return whole
        if not isinstance(error, (StoreNotCreatedError, StoreNotFoundError)) or error.near:
            return error
        near: list[str] | None = None
        with suppress(TDServeError):
            near = self.find_near(error.name)
        shown = _list_near(near or ())
        explained: TDServeError = StoreNotFoundError(name=error.name, near=shown)
        if isinstance(error, StoreNotCreatedError):
            explained = StoreNotCreatedError(what=error.what, timeout_s=timeout_s, name=error.name, near=shown)
        explained.__suppress_context__ = True
        explained.note_request(error.request_id)
        return explained

    @contextmanager
    def watch(self, name: str, timeout_s: float) -> Iterator[None]:
        """Warns, from another thread, if the block takes long; the block ends after ``timeout_s``."""
        timer = Timer(LOOK_AFTER_S, self.warn, (name, timeout_s - LOOK_AFTER_S + GRACE_S))
        timer.name, timer.daemon = f"tdserve-missing-{name}", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _may_warn(self, name: str) -> bool:
        now_s = time.monotonic()
        with self._lock:
            last_s = self._warned_s.pop(name, -WARN_AGAIN_S)
            if len(self._warned_s) >= MAX_WARNED:
                del self._warned_s[next(iter(self._warned_s))]
            is_due = now_s - last_s >= WARN_AGAIN_S
            self._warned_s[name] = now_s if is_due else last_s
        return is_due


def _list_near(names: Sequence[str]) -> str:
    return f", but {', '.join(map(repr, names))}" if names else ""
