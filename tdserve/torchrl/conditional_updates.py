"""``update_if_present`` of a buffer over a table: the server compares, so processes that share the table may race."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.data.replay_buffers.replay_buffers.base import ConditionalUpdateResult

from tdserve.base.errors import (
    InvalidRequestError,
    KeyNotFoundError,
    NotSupportedError,
    SelectionError,
    SpecMismatchError,
    TransferAbortedError,
)
from tdserve.client.tables.conditional_update import NOT_LIVE
from tdserve.rules.replay.allocation.ring import ROW_ID_MASK
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.torchrl.table_rows import to_path, to_stored_key

MAX_TRIES = 1000
"""Tries of an update whose rows others write in between; each such write is a success of theirs."""


class ConditionalUpdates:
    """``update_if_present`` with TorchRL's arguments, errors and result.

    Args:
        storage: The storage of the buffer.
        buffer: The buffer.
    """

    def __init__(self, storage: Any, buffer: Any) -> None:
        self._storage = storage
        self._buffer = buffer

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Mapping[Any, Any] | TensorDictBase,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> Any:
        """Writes leaves of rows that are still those that were sampled; see ``ReplayBuffer.update_if_present``."""
        if not self._buffer.writer.tracks_generations:
            reason = "the buffer has a writer that was made without track_generations=True"
            raise NotSupportedError(feature="a conditional update (update_if_present)", reason=reason)
        numbers = to_host(torch.as_tensor(index)).long().reshape(-1)
        stamps = to_host(torch.as_tensor(generation)).long().reshape(-1)
        if len(numbers) != len(stamps):
            reason = f"{len(stamps)} generations for {len(numbers)} rows"
            raise InvalidRequestError(argument="generation", reason=reason)
        leaves = patch.items(True, True) if isinstance(patch, TensorDictBase) else patch.items()
        given = {_normalize(key): value for key, value in leaves}
        if (version_key is None) != (version is None):
            raise InvalidRequestError(argument="version_key", reason="it must be given together with version")
        if version_key is None:
            values = {to_stored_key(key): self._fit(key, value, len(numbers)) for key, value in given.items()}
            updated = self._write(numbers, stamps, values)
            return ConditionalUpdateResult(updated=updated, version_rejected=None, batch_size=updated.shape)
        if isinstance(version_key, str) and "." in version_key:
            raise InvalidRequestError(
                argument="version_key",
                reason=f"{version_key!r}: Dotted-string keys are refused, a nested key is a tuple",
            )
        version_key = _normalize(version_key)
        if version_key in given:
            raise InvalidRequestError(argument="version_key", reason=f"{version_key!r} may not appear in patch")
        given[version_key] = self._fit_version(version_key, version, len(numbers))
        values = {to_stored_key(key): self._fit(key, value, len(numbers)) for key, value in given.items()}
        updated, rejected = self._write_newer(numbers, stamps, values, to_stored_key(version_key), require_newer)
        return ConditionalUpdateResult(updated=updated, version_rejected=rejected, batch_size=updated.shape)

    def _write(
        self, numbers: torch.Tensor, stamps: torch.Tensor, values: dict[Any, Any], *, is_unchanged: bool = False
    ) -> torch.Tensor:
        is_there = (numbers >= 0) & (numbers < self._storage.max_size) & (stamps >= 0)
        updated = torch.zeros(len(numbers), dtype=torch.bool)
        if values and is_there.any():
            table = self._storage.require_table()
            chosen = {key: value[is_there] for key, value in values.items()}
            updated[is_there] = table.update_if_present(
                numbers[is_there], chosen, generation=stamps[is_there], is_unchanged=is_unchanged
            )
            self._storage.note_written()
        elif is_there.any():
            updated = is_there & (self._storage.find_generations(numbers) == stamps)
        return updated

    def _write_newer(
        self,
        numbers: torch.Tensor,
        stamps: torch.Tensor,
        values: dict[Any, Any],
        version_key: Any,
        require_newer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes rows whose version is older than the given one; returns which, and which have a newer version.

        A row of which another process has written a part since its version was read is read again.
        """
        versions = values[version_key].reshape(len(numbers))
        updated, rejected = torch.zeros(2, len(numbers), dtype=torch.bool)
        best = _find_best(numbers, stamps, versions)
        left = torch.arange(len(numbers))
        for _ in range(MAX_TRIES):
            left = left[self._storage.find_generations(numbers[left]) == stamps[left]]
            if not len(left):
                return updated, rejected
            try:
                rows, now = self._storage.require_table().read_with_generations(numbers[left].numpy())
            except SelectionError:  # one is gone now
                continue
            stored = rows[version_key].reshape(-1)
            is_newer = versions[left] > stored if require_newer else versions[left] >= stored
            is_newer &= best[left]
            chosen = left[is_newer]
            written = self._write(
                numbers[chosen], now[is_newer], {key: value[chosen] for key, value in values.items()}, is_unchanged=True
            )
            updated[chosen[written]] = True
            others = left[~is_newer]
            rejected[others] = True
            left = chosen[~written]
        raise TransferAbortedError(transfer=0, reason="others have written these rows again and again")

    def _fit(self, key: Any, value: Any, num_rows: int) -> torch.Tensor:
        leaf = self._find_leaf(key)
        value, dtype = torch.as_tensor(value).cpu(), to_torch(leaf.dtype)
        expected = (num_rows, *leaf.shape)
        if value.dtype != dtype or value.numel() != math.prod(expected):
            raise SpecMismatchError(
                store=self._storage.table_name,
                key=".".join(to_path(key)),
                expected=f"{dtype} {list(expected)}",
                actual=f"{value.dtype} {list(value.shape)}",
            )
        return value.reshape(expected)

    def _fit_version(self, key: Any, version: Any, num_rows: int) -> torch.Tensor:
        leaf = self._find_leaf(key)
        if any(size != 1 for size in leaf.shape):
            reason = f"{key!r} has the shape {tuple(leaf.shape)} in each row, not one number"
            raise InvalidRequestError(argument="version_key", reason=reason)
        found = torch.as_tensor(version)
        if found.numel() not in (1, num_rows):
            reason = f"{found.numel()} versions for {num_rows} rows"
            raise InvalidRequestError(argument="version", reason=reason)
        return found.to(to_torch(leaf.dtype)).reshape(-1).expand(num_rows)

    def _find_leaf(self, key: Any) -> Any:
        table, path = self._storage.require_table(), to_path(to_stored_key(key))
        leaf = table.spec.tensors_by_path.get(path)
        if leaf is None:
            raise KeyNotFoundError(store=table.name, key=".".join(path), listing="buffer.storage.list_keys()")
        return leaf


def _normalize(key: Any) -> Any:
    return unravel_key(key)  # type: ignore[no-untyped-call]


def to_names(generations: torch.Tensor) -> torch.Tensor:
    """Returns what identifies rows, as long as they are the same rows, of their generations."""
    return torch.where(generations < 0, NOT_LIVE, generations & ROW_ID_MASK)


def _find_best(numbers: torch.Tensor, stamps: torch.Tensor, versions: torch.Tensor) -> torch.Tensor:
    """Returns which of equal rows has the highest version; the last of these where several have."""
    best: dict[tuple[int, int], int] = {}
    listed = versions.tolist()
    for position, row in enumerate(zip(numbers.tolist(), stamps.tolist(), strict=True)):
        if row not in best or listed[position] >= listed[best[row]]:
            best[row] = position
    found = torch.zeros(len(numbers), dtype=torch.bool)
    found[list(best.values())] = True
    return found
