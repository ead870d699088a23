"""The newest versions of the policies of tables that may be on other servers than these: followed by a thread for each,
and sent with the requests that need them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from weakref import WeakMethod

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.client.client import Client
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.weights.pulls import Wanted, ask_newer
from tdserve.rules.lost_servers import REACH_S
from tdserve.v1 import control_pb2

WAIT_S = 5.0
"""Longest wait for a version, after which a policy that was deleted and published again is found."""

PAUSE_S = 1.0
"""Pause before a server is asked again that did not answer."""

MOVED_PAUSE_S = 0.05
"""The same of one from which the policy has moved, or is being moved."""


class PolicyFeeds:
    """What one client of a cluster knows of policies. Threads: safe.

    A policy is asked for when a table is first used that follows it, and followed from then on. While its server does
    not answer, what was known last stands. The threads hold no client while they wait: it may be dropped.

    Args:
        find_home: Returns the client of the server that has a store.
        forget: Makes the next call look for the store again: its server does not answer, and it may have moved.
    """

    def __init__(self, find_home: Callable[[str], Client], forget: Callable[[str], None]) -> None:
        self._find_home, self._forget = WeakMethod(find_home), WeakMethod(forget)
        self._closed = Event()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._feeds: dict[str, _PolicyFeed] = {}

    def find_news(self, name: str, at_least: int) -> control_pb2.PolicyNews | None:
        """Returns what is known of a policy; None if it was never published.

        Args:
            at_least: A version that the caller has seen; asked for if it is not known here yet.
        """
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._begin()
        feed = self._feeds.get(name)
        if feed is None:
            with self._lock:
                feed = self._feeds.setdefault(name, _PolicyFeed(name, self._find_home, self._forget, self._closed))
        return feed.find_news(at_least)

    def note_change(self, name: str) -> None:
        """Has a policy asked for again before its next use: this client has changed it."""
        feed = self._feeds.get(name)
        if feed is not None:
            feed.last_change = object()

    def close(self) -> None:
        """Lets all threads end."""
        self._closed.set()


class _PolicyFeed:
    """What is known of one policy.

    Attributes:
        last_change: Stands for the last change of the policy by this client, and no other.
    """

    def __init__(
        self,
        name: str,
        find_home: WeakMethod[Callable[[str], Client]],
        forget: WeakMethod[Callable[[str], None]],
        closed: Event,
    ) -> None:
        self.last_change = object()
        self._known_change: object = None  # the last one when the policy was asked for
        self._name = name
        self._find_home, self._forget = find_home, forget
        self._closed = closed
        self._lock = Lock()
        self._asking = Lock()
        self._news: control_pb2.PolicyNews | None = None
        self._thread: Thread | None = None

    def find_news(self, at_least: int) -> control_pb2.PolicyNews | None:
        """Returns what is known; see :meth:`PolicyFeeds.find_news`."""
        if self._is_behind(at_least):
            with self._asking:  # callers that come meanwhile need the answer too
                if self._is_behind(at_least):
                    change = self.last_change  # another may come in the meantime
                    self._ask()
                    self._known_change = change
                    self._start()
        return self._news

    def _is_behind(self, at_least: int) -> bool:
        is_changed = self._known_change is not self.last_change
        return is_changed or (self._news is not None and self._news.newest < at_least)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = Thread(target=self._follow, name=f"tdserve-policy-{self._name}", daemon=True)
                self._thread.start()

    def _get_home(self) -> Client:
        find_home = self._find_home()
        if find_home is None:
            raise ClosedError(what="the client of the cluster")
        return find_home(self._name)

    def _follow(self) -> None:
        while not self._closed.is_set():
            known = self._news
            try:
                newest = known.newest if known is not None and known.uid else None
                ask_newer(self._get_home(), Wanted(self._name, newer_than=newest), Deadline.after(WAIT_S))()
            except ClosedError:
                return
            except DeadlineExceededError:
                pass
            except StoreMovedError:  # asking what it is now finds it
                self._closed.wait(MOVED_PAUSE_S)
            except TDServeError as error:
                if isinstance(error, ConnectError) and (forget := self._forget()) is not None:
                    forget(self._name)
                self._closed.wait(PAUSE_S)
            self._ask()

    def _ask(self) -> None:
        """Asks what the policy is now. What is known stays if its server does not answer, or it holds no weights."""
        with self._lock, suppress(TDServeError), reach_within(REACH_S), within(Deadline.after(REACH_S)):
            try:
                found = self._get_home().describe(self._name)
            except StoreNotFoundError:
                known = self._news
                self._news = control_pb2.PolicyNews(gone=known.uid or known.gone) if known is not None else None
            else:
                if found.kind == "weights":
                    self._news = control_pb2.PolicyNews(uid=found.uid, newest=found.version, created_s=found.created_s)
