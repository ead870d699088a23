"""Annotations of rows: the policy version that made them, their priorities and the ends of trajectories."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.row_arguments import to_priorities
from tdserve.client.tables.table_policy import check_policy, check_policy_version
from tdserve.messages.content import POLICY_VERSION_KEY
from tdserve.rules.replay.settings import Settings
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.v1 import control_pb2


class RowAnnotations(NamedTuple):
    """What an extend gives its rows besides their content; as in the arguments of ``TableHandle.extend``."""

    priority: Any = None
    ends: Any = None
    writer: int = 0
    policy_version: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether the rows have the defaults; rows of whatever writer do."""
        return self.priority is None and self.ends is None and self.policy_version is None

    def flatten(self, shape: tuple[int, ...]) -> RowAnnotations:
        """Returns those of rows in several dimensions for the same rows in one dimension, in row-major order.

        Raises:
            InvalidRequestError: One has several dimensions, and not those of the rows.
        """
        return self._replace(
            **{name: _flatten_one(name, given, shape) for name, given in self._list_per_row() if np.ndim(given) > 1}
        )

    def end_lines(self, shape: tuple[int, ...]) -> RowAnnotations:
        """Returns them with the end of a trajectory at the end of each line along the last dimension of the rows.

        Other lines follow it in the table, which would otherwise continue the trajectory.
        """
        is_last = np.zeros(shape, np.bool_)
        is_last[..., -1:] = True
        flags = is_last.reshape(-1)
        if self.ends is not None:
            flags = flags | np.frombuffer(_encode_flags(self.ends, flags.size), np.bool_)
        return self._replace(ends=flags)

    def keep_last(self, num_kept: int, *, num_rows: int) -> RowAnnotations:
        """Returns those of the last of the rows.

        Raises:
            InvalidRequestError: There is neither one for all rows nor one for each.
        """
        return self._replace(
            **{name: _cut_one(name, given, num_rows)[-num_kept:] for name, given in self._list_per_row()}
        )

    def check_lengths(self, num_rows: int) -> None:
        """Raises InvalidRequestError if there is neither one for all rows nor one for each."""
        for name, given in self._list_per_row():
            if np.size(given) != 1:
                _cut_one(name, given, num_rows)

    def _list_per_row(self) -> list[tuple[str, Any]]:
        """Returns the names and annotations that are given as lists, one for each row."""
        given = (("priority", self.priority), ("ends", self.ends), ("policy_version", self.policy_version))
        return [(name, value) for name, value in given if value is not None and np.ndim(value) > 0]

    def add_to(self, request: control_pb2.ExtendRequest, settings: Settings) -> None:
        """Adds them to a request for a table with these settings.

        Raises:
            InvalidRequestError: One is invalid, has neither one element nor one per row, or is not supported by the
                table.
        """
        request.writer = self.writer
        if self.priority is not None:
            request.priorities.data = to_priorities(self.priority, request.num_rows).astype("<f8").tobytes()
        if self.ends is not None:
            request.ends.data = _encode_flags(self.ends, request.num_rows)
        if self.policy_version is not None:
            check_policy(settings, request.store, POLICY_VERSION_KEY)
            request.policy_versions.data = _check_versions(self.policy_version, request.num_rows).tobytes()


def _check_versions(given: Any, num_rows: int) -> np.ndarray[Any, Any]:
    if np.ndim(given) > 0:
        array = np.asarray(to_host(given))
        if array.dtype.kind not in "iu" or array.shape != (num_rows,):
            reason = f"{array.dtype} {list(array.shape)} is neither an integer nor integers [{num_rows}]"
            raise InvalidRequestError(argument=POLICY_VERSION_KEY, reason=reason)
        if array.size and int(array.min()) < 0:
            raise InvalidRequestError(argument=POLICY_VERSION_KEY, reason=f"{int(array.min())} is below 0")
        return array.astype("<i8")
    given = to_host(given)
    number = given.item() if isinstance(given, (torch.Tensor, np.ndarray, np.integer)) else given
    return np.array([check_policy_version(number)], "<i8")


def _encode_flags(ends: Any, num_rows: int) -> bytes:
    flags = np.asarray(to_host(ends))
    if flags.dtype != np.bool_ or (flags.ndim and flags.size != num_rows):
        raise InvalidRequestError(argument="ends", reason=f"{flags.dtype} {list(flags.shape)} is not bool [{num_rows}]")
    return flags.reshape(-1).tobytes()


def _flatten_one(argument: str, given: Any, shape: tuple[int, ...]) -> Any:
    found = given if isinstance(given, torch.Tensor) else np.asarray(given)
    if tuple(found.shape) != shape:
        reason = f"{list(found.shape)} is not the shape of the rows, {list(shape)}"
        raise InvalidRequestError(argument=argument, reason=reason)
    return found.reshape(-1)


def _cut_one(argument: str, given: Any, num_rows: int) -> Any:
    found = (given if isinstance(given, torch.Tensor) else np.asarray(given)).reshape(-1)
    if len(found) != num_rows:
        raise InvalidRequestError(argument=argument, reason=f"{len(found)} for {num_rows} rows")
    return found
