"""Rows that control lets a data worker claim, for extends that it then writes without control.

Control commits them when it next looks at the table; the record in the claim file stands for the commit until then.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import torch

from tdserve.base.errors import TDServeError
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.places import Places
from tdserve.data.row_claim import RowClaim
from tdserve.messages.content import write_layout
from tdserve.messages.layout import Layout
from tdserve.messages.row_numbers import Rows
from tdserve.store.rows.claim_file import FOLDER, ClaimedRows
from tdserve.transport.sources_sinks import RowBuffers
from tdserve.transport.stream import drain_joined
from tdserve.v1 import control_pb2, worker_pb2

MAX_WAIT_S = 0.5
"""Longest wait for a claim that control is about to open. An extend that comes to control meanwhile ends the claim."""

_log = logging.getLogger("tdserve.worker")


class WorkerClaim:
    """A claim of this worker.

    Args:
        store: The table.
        path: The claim file.
        claim: Control's grant.
        report: Sends a report to control.
    """

    def __init__(
        self,
        store: MappedStore,
        path: Path,
        claim: control_pb2.Claim,
        *,
        report: Callable[[worker_pb2.Report], None],
    ) -> None:
        self.store = store
        self._report = report
        self.rows = RowClaim(store, path, claim, notify=self._notify)

    def get_layout(self, num_rows: int) -> Layout:
        """Returns the layout of the content of an extend."""
        return write_layout(self.store.spec.with_rows(num_rows))

    def extend(self, extend: ClaimedRows, content: torch.Tensor) -> Rows | None:
        """Writes rows; result and errors as in ``RowClaim.extend``.

        Args:
            content: The messages of the extend, one behind the other.
        """
        return self.rows.extend(extend, partial(self._fill, self.get_layout(extend.num_rows), content))

    def _fill(self, layout: Layout, content: torch.Tensor, rows: Rows, _: Places) -> None:
        drain_joined(content, layout.messages, RowBuffers(layout, self.store.get_tables(layout), rows))

    def _notify(self, claimed: control_pb2.Claimed) -> None:
        self._report(worker_pb2.Report(claimed=claimed))


class WorkerClaims:
    """The claims of this worker, which all of its sessions use. Threads: safe.

    Args:
        stores: The worker's.
        report: Sends a report to control; thread-safe.
    """

    def __init__(self, stores: OpenStores, report: Callable[[worker_pb2.Report], None]) -> None:
        self._stores = stores
        self._report = report
        self._claims: dict[str, WorkerClaim] = {}  # by name of the store
        self._coming: dict[str, Event] = {}  # likewise; set when control has decided

    def prepare(self, order: worker_pb2.PrepareClaim) -> None:
        """Keeps further extends of a table until ``open``, so that they come behind those that control has by then."""
        self._coming[Path(order.store.folder).name] = Event()

    def open(self, order: worker_pb2.OpenClaim) -> None:
        """Begins to use a claim; without one, only lets extends continue that were kept."""
        try:
            if order.HasField("claim"):
                self._open(order.store, order.claim)
        finally:
            coming = self._coming.pop(Path(order.store.folder).name, None)
            if coming is not None:
                coming.set()

    def _open(self, ref: worker_pb2.StoreRef, claim: control_pb2.Claim) -> None:
        try:
            store = self._stores.get(ref)
            path = Path(ref.folder) / FOLDER / Path(claim.path).name
            self._claims[store.name] = WorkerClaim(store, path, claim, report=self._report)
        except TDServeError as error:  # for example, the store was deleted just now
            _log.info("rows of %s cannot be claimed: %s", ref.folder, error)
            abandoned = control_pb2.Claimed(uid=claim.uid, num=claim.num, abandons=True)
            self._report(worker_pb2.Report(claimed=abandoned))

    def drop(self, uid: str) -> None:
        """Forgets the claim on a store that was deleted."""
        for name, claim in list(self._claims.items()):
            if claim.store.uid == uid:
                self._claims.pop(name, None)

    def find(self, asked: control_pb2.ExtendRequest) -> WorkerClaim | None:
        """Returns the claim with room for an extend, waiting for one that is coming; None if control must be asked for
        rows."""
        coming = self._coming.get(asked.store)
        if coming is not None:
            coming.wait(MAX_WAIT_S)
        claim = self._claims.get(asked.store)
        if claim is None or claim.store.spec.fingerprint != asked.content.fingerprint or asked.keys:
            return None
        if not claim.store.is_of_kind(asked.kind):
            return None
        return claim if asked.num_rows and claim.rows.may_claim(asked.num_rows) else None
