"""Takes of rows on lease, from a table of one server, or of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from tdserve.client.content.padding import Pad
from tdserve.client.tables.draws.draw_arguments import Conditions
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.taken_batches import TakenBatches
from tdserve.client.tables.draws.taking import LeaseBlock


class LeasingTable(Protocol):
    """The table whose rows are taken.

    Attributes:
        name: Name of the store.
    """

    name: str

    @property
    def wait_s(self) -> float:
        """Default of every call that can wait, seconds."""


class RowTakes(ABC):
    """Takes rows of a table on lease, and acknowledges or renews those that were taken. Threads: safe."""

    _table: LeasingTable

    @abstractmethod
    def take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> LeaseBlock:
        """Takes rows; arguments, which were checked, and errors as in ``ReplayHandle.take``."""

    def take_batches(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, **form: Any
    ) -> TakenBatches:
        """Returns an iterator over batches that ``take`` takes; what no batch can be is refused here.

        Args:
            form: ``device`` and ``numpy`` of the caller.
        """
        query = self._make_query_of_batches(conditions, timeout_s, pad=pad, **form)

        def take(within_s: float) -> LeaseBlock:
            return self.take(num_rows, conditions, within_s, pad=pad, numpy=query.is_numpy)

        seconds = self._table.wait_s if timeout_s is None else timeout_s
        return TakenBatches(take, self._table.name, device=query.device, timeout_s=seconds)

    @abstractmethod
    def _make_query_of_batches(self, conditions: Conditions, timeout_s: float | None, **form: Any) -> Query:
        """Makes the query of batches, or of their parts, and checks it as far as the client can."""

    @abstractmethod
    def acknowledge(self, rows: Any, timeout_s: float | None, consumer: str = "") -> None:
        """Acknowledges rows that were taken; arguments and errors as in ``ReplayHandle.ack``.

        Args:
            consumer: Who took them; "" for those of a queue.
        """

    @abstractmethod
    def renew(self, rows: Any, lease_s: float, timeout_s: float | None, consumer: str = "") -> None:
        """Renews the lease of rows that were taken; other arguments and errors as in ``ReplayHandle.renew``.

        Args:
            consumer: As for ``acknowledge``.
        """
