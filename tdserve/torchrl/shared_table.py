"""The table of a storage: created by the first writer, joined by all others, found again in other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from inspect import signature
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdserve.base.errors import InvalidRequestError, StoreExistsError, StoreNotFoundError, WrongStateError
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.connecting import connect
from tdserve.client.session.by_address import ByAddress
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tables.row_like import make_row_like
from tdserve.rules.replay.samplers.sampler import Sampler as TableRule
from tdserve.structure.trees.tree import Path
from tdserve.torchrl.table_rows import check_dims, complete_rows, to_batch, to_path

ChooseRule = Callable[[Collection[Path]], TableRule | None]


_OPTIONS = signature(Client.create_replay).parameters.keys() - {
    "self",
    "name",
    "like",
    "capacity",
    "exists_ok",
    "existsok",
}


class SharedTable(ByAddress):
    """A table by name. Threads: safe. Processes: safe, whether it is pickled (by address) or forked.

    Attributes:
        name: Name of the table.
        capacity: Its rows.
        choose_rule: Returns the sampler with which it is created, by the keys of its rows.
        keeps_index: Whether rows keep an ``"index"`` of the user's, as in :func:`.table_rows.to_batch`.
    """

    _of_process = ("_client", "_handle")
    _client: Client

    def __init__(
        self, address: str | Client | None, name: str, capacity: int, *, like: Any, fills: bool, options: dict[str, Any]
    ) -> None:
        unknown = options.keys() - _OPTIONS
        if unknown:
            reason = f"it is no argument of Client.create_replay, which has {', '.join(sorted(_OPTIONS))}"
            raise InvalidRequestError(argument=min(unknown), reason=reason)
        if isinstance(address, (Client, ClusterClient)):
            self._client = address.get_home(name)
        else:
            with connect(address) as client:
                self._recipe = client.get_home(name).recipe
        self.name = name
        self.capacity = capacity
        self.keeps_index = True
        self.choose_rule: ChooseRule = partial(_return_rule, options.pop("sampler", None))
        if like is not None:
            is_row = isinstance(like, torch.Tensor) or is_tensor_collection(like)  # which may be a batch itself
            like = (like if is_row else make_row_like(like)).unsqueeze(0)
        self._like = like
        self._fills = fills
        self._options = options
        self.find()

    def __repr__(self) -> str:
        return f"<SharedTable {self.name!r} capacity={self.capacity}>"

    @property
    def waits(self) -> bool:
        """Whether a limiter was chosen: samples wait for it instead of failing while the table is empty."""
        return bool(self._options.keys() & {"min_size", "limiter"})

    def find(self) -> ReplayHandle | None:
        """Returns the handle; None if the table does not exist yet and its rows are not known.

        Raises:
            InvalidRequestError: It has another capacity.
        """
        handle: ReplayHandle | None = self.__dict__.get("_handle")
        if handle is not None:
            return handle
        try:
            found = self._client.replay(self.name, timeout_s=0)
        except StoreNotFoundError:
            return None
        return self._follow(found)

    def open(self, batch: Any = None) -> ReplayHandle | None:
        """Returns the handle of the table, which is created if its rows are known: by ``like`` or a first batch, which
        is of the user's form."""
        found = self.find()
        rows = batch if self._like is None else self._like
        if found is not None or rows is None:
            return found
        try:
            rows = to_batch(rows, keeps_index=self.keeps_index).to("cpu")  # the device that samples have from then on
            keys = [to_path(key) for key in rows.keys(True, True)]
            rule = self.choose_rule(keys)
            created = self._client.create_replay(
                self.name, rows[0], self.capacity, sampler=rule, exists_ok=True, **self._options
            )
        except StoreExistsError:  # another process was first, with rows that have other keys
            return self.find()
        return self._follow(created)

    def extend(self, data: Any, priority: torch.Tensor | None = None) -> torch.Tensor:
        """Writes rows; returns their numbers. More rows than the table has are written in several parts, in order.

        Args:
            data: The rows.
            priority: One per row; None: the highest so far, and at least 1.0.

        Raises:
            SpecMismatchError, InvalidRequestError: They do not fit. Nothing was written.
        """
        batch = to_batch(data, keeps_index=self.keeps_index)
        if not len(batch):
            return torch.empty(0, dtype=torch.int64)
        handle, parts = self._divide(batch, priority)
        numbers: list[torch.Tensor] = [handle.extend(part, priority=own) for part, own in parts]
        return numbers[0] if len(numbers) == 1 else torch.cat(numbers)

    def check(self, data: Any, priority: torch.Tensor | None = None) -> None:
        """Refuses what ``extend`` would refuse, and writes no rows.

        Raises:
            SpecMismatchError, InvalidRequestError: The rows do not fit.
        """
        batch = to_batch(data, keeps_index=self.keeps_index)
        if len(batch):
            handle, parts = self._divide(batch, priority)
            for part, own in parts:
                handle.check_rows(part, own)

    def _divide(
        self, batch: Any, priority: torch.Tensor | None
    ) -> tuple[ReplayHandle, list[tuple[Any, torch.Tensor | None]]]:
        """Returns the table of rows, and the rows with the keys that it has, with their priorities: in parts that it
        has room for."""
        handle = self.open(batch)
        if handle is None:
            raise WrongStateError(state=f"the table {self.name!r} was deleted", event="extend()")
        check_dims(batch, handle.spec, name=self.name)
        batch = complete_rows(batch, handle, fills=self._fills)
        if len(batch) <= self.capacity:
            return handle, [(batch, priority)]
        parts = [slice(begin, begin + self.capacity) for begin in range(0, len(batch), self.capacity)]
        return handle, [(batch[part], None if priority is None else priority[part]) for part in parts]

    def _follow(self, handle: ReplayHandle) -> ReplayHandle:
        if handle.capacity != self.capacity:
            reason = f"{self.capacity}, but the table {self.name!r} was created with {handle.capacity}"
            raise InvalidRequestError(argument="max_size", reason=reason)
        self._handle = handle
        return handle


def _return_rule(rule: TableRule | None, _: Collection[Path]) -> TableRule | None:
    return rule
