"""Which rows of a table a call asks the server to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.content.padding import Pad
from tdserve.client.session.requests.client_mover import WantedRows
from tdserve.client.tables.draws.share import Share
from tdserve.messages.content import COLUMN_BITS, make_rows_layout
from tdserve.messages.layout import Layout
from tdserve.structure.building.array_views import to_arrays
from tdserve.structure.trees.tree import Path, Spec, quote
from tdserve.v1 import content_pb2, control_pb2


@dataclass(frozen=True)
class Query:
    """Which rows of a table to draw; arguments as in ``ReplayHandle.sample``.

    Attributes:
        name: Name of the store.
        stored: Its structure, beginning with the capacity.
        kind: Its kind; unspecified: either kind of table.
        policy: Name of the weights that have made the rows; "" without one.
        added: Columns that are added to the rows.
        is_exact: Whether exactly the requested number of rows comes.
        is_plain: Whether it has no condition, and each live row has the same probability: no decision of the server is
            needed.
        is_ordered: Whether the order of the rows matters.
        pad: Padding of ragged tensors.
        device: Where the rows will be moved.
        replaces_torn: Whether they replace rows that were overwritten while they were copied.
        is_numpy: Whether they are handed over as NumPy arrays.
        share: The part of one rank in a draw for several; None: a draw of its own.
        whole_rows: Rows of a whole sample of slices, of which several servers draw a part each; 0: this is all of it.
        awaits_done: Whether it is over only when the server says so: until then the server may draw rows that leave
            with it again after a crash.
        min_rows: On lease, from how many rows on fewer come than are asked for; 0: all.
        lease_s: How long the lease lasts; 0.0: as long as the session.
    """

    name: str
    stored: Spec
    added: tuple[str, ...] = ()
    require: tuple[Path, ...] | None = None
    consumer: str = ""
    group_by: Path | None = None
    group_size: int = 0
    max_lag: int | None = None
    policy: str = ""
    is_lease: bool = False
    is_exact: bool = True
    is_plain: bool = False
    is_ordered: bool = False
    pad: Pad = None
    device: Any = None
    replaces_torn: bool = False
    is_numpy: bool = False
    share: Share | None = None
    whole_rows: int = 0
    awaits_done: bool = False
    min_rows: int = 0
    lease_s: float = 0.0
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_UNSPECIFIED

    def describe_conditions(self) -> list[str]:
        """Returns what it asks of a row, for errors."""
        found = [f"have {quote(path)}" for path in self.require or ()]
        if self.group_by is not None:
            found.append(f"are in a group of {self.group_size} rows by {quote(self.group_by)}")
        if self.consumer:
            found.append(f"were not had by consumer {self.consumer!r}")
        if self.max_lag is not None:
            found.append(f"are at most {self.max_lag} versions old")
        if self.is_lease:
            found.append("are not on lease")
        return ["have all leaves", *found] if found and self.require is None else found

    def make_message(self, num_rows: int, num_batches: int, timeout_s: float | None) -> control_pb2.SampleRequest:
        """Makes the request for batches of ``num_rows``."""
        message = control_pb2.SampleRequest(
            store=self.name,
            num_rows=num_rows,
            num_batches=num_batches,
            timeout_s=timeout_s,
            fingerprint=self.stored.fingerprint,
            consumer=self.consumer,
            group_size=self.group_size,
            is_lease=self.is_lease,
            accepts_partial=self.require == (),
            max_lag=self.max_lag,
            is_plain=self.is_plain,
            replaces_torn=self.replaces_torn,
            added=sum(map(COLUMN_BITS.__getitem__, self.added)),
            share=None if self.share is None else self.share.make_message(),
            whole_rows=self.whole_rows,
            awaits_done=self.awaits_done,
            min_rows=self.min_rows,
            lease_s=self.lease_s,
            kind=self.kind,
        )
        if self.require:
            message.require.extend(content_pb2.Path(parts=path) for path in self.require)
        if self.group_by is not None:
            message.group_by.parts.extend(self.group_by)
        return message

    def make_wanted(self) -> WantedRows:
        """Returns how the mover reads its rows."""
        return WantedRows(
            self.name,
            self.stored,
            added=self.added,
            keeps_fault=self.is_lease,
            device=self.device,
            kind=self.kind,
        )

    def hand_over(self, rows: Any) -> Any:
        """Returns rows in the form that the caller has asked for."""
        return to_arrays(rows) if self.is_numpy else rows

    def make_layout(self, num_rows: int) -> Layout:
        """Returns the layout of this many rows."""
        return make_rows_layout(self.stored, num_rows, self.added)


RenewQuery = Callable[[Query, Deadline], "Query | None"]
"""Returns a query for a table that has got leaves since the given one was made; None if it has not. It asks the server,
within a deadline."""
