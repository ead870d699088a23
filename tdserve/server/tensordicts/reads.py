"""Reads of tensordict stores: the session's worker sends the content, or a local client reads it itself."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import from_message
from tdserve.server.execution.turns import build_row_set
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.mutations.row_write_hold import wait_for_others
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import get_message
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import control_pb2


class Reads:
    """Serves the reads of sessions from tensordict stores."""

    def is_as_expected(self, store: OpenedStore, asked: control_pb2.ReadRequest) -> bool:
        """Returns whether a store has the structure that the client expects and the read need not wait: then the client
        may wait for the content directly, without an answer."""
        is_known = not KINDS[store.record.kind].has_rules and asked.fingerprint == store.spec.fingerprint
        return is_known and not (store.writes or store.lost or asked.HasField("newer_than"))

    async def read(
        self,
        session: ClientSession,
        request: int,
        store: OpenedStore,
        asked: control_pb2.ReadRequest,
        deadline: Deadline,
    ) -> control_pb2.Done | None:
        """Sends a selection, consistent as of one moment. Returns None if the content follows over the channel.

        A client that already waits for the content gets no other answer; the caller has checked ``is_as_expected``.
        """
        if KINDS[store.record.kind].has_rules:
            raise store.make_kind_error("tensordict or replay")
        if asked.HasField("newer_than"):
            if deadline.timeout_s == 0 and store.content_version <= asked.newer_than:
                return control_pb2.Done(nothing_newer=True)

            def is_newer() -> bool:
                return store.content_version > asked.newer_than

            await session.wait_until(
                store.waiters,
                is_newer,
                deadline,
                lambda: f"content of {store.name!r} newer than version {asked.newer_than}",
            )
        if store.writes or store.lost:
            rows = await build_row_set(from_message(asked.selection), store.spec.batch_size)
            # Local clients write by themselves and may be stopped: a worker would wait for them.
            await wait_for_others(session, store, rows, deadline)
            await self._wait_for_retries(session, store, rows, deadline)
            store.lost.check(rows, store=store.name)
        fingerprint = store.spec.fingerprint
        accepted = control_pb2.Accepted(fingerprint=fingerprint, version=store.content_version)
        if asked.fingerprint != fingerprint and asked.identity != store.identity:
            accepted.spec.CopyFrom(get_message(store.spec))
            accepted.identity = store.identity
        return await session.movers.reads.get_selection(request, store, asked, accepted)

    async def _wait_for_retries(
        self, session: ClientSession, store: OpenedStore, rows: RowSet, deadline: Deadline
    ) -> None:
        """Waits for writers that a restart interrupted: they repeat their unfinished writes, unless they are gone."""
        while store.lost.may_be_repeated(rows) and not deadline.expired:
            until_s = store.lost.rewrite_grace_until_s
            grace_s = until_s - time.monotonic()
            if grace_s <= 0:
                return
            with suppress(DeadlineExceededError):
                await session.wait_until(
                    store.waiters,
                    partial(store.lost.is_grace_over, rows, until_s),
                    Deadline.after(deadline.limit(grace_s)),
                    lambda: f"another write to rows of {store.name!r}",
                )
