"""The writer of a buffer whose rows are in a table: the server has the cursor and counts what is written."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers.writers.base import Writer
from torchrl.data.replay_buffers.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


def to_table_writer(writer: Any) -> Any:
    """Returns the writer for a table that takes the place of one of TorchRL's, or of a function that makes one."""
    if writer is not None and not isinstance(writer, Writer) and callable(writer):
        writer = writer()
    if writer is None or type(writer) in (RoundRobinWriter, TensorDictRoundRobinWriter):
        return TableWriter(tracks_generations=writer is not None and writer.tracks_generations)
    return writer


class TableWriter(Writer):
    """Writes rows behind the newest of the table, from any number of processes.

    Args:
        tracks_generations: Whether samples have the generations of their rows, as ``"index_generation"``.
    """

    def __init__(self, *, tracks_generations: bool = False) -> None:
        super().__init__()
        self.tracks_generations = tracks_generations

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns what identifies rows as long as they are the same rows; -1 for rows that are not live."""
        index = torch.as_tensor(index[0] if isinstance(index, tuple) else index, dtype=torch.long)
        found: torch.Tensor = self._storage.find_generations(index)
        return found.to(index.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(write_count={self._write_count})"

    @property
    def _write_count(self) -> int:
        count: int = self._storage.count_inserts()
        return count

    @property
    def _cursor(self) -> int:
        return self._write_count % int(self._storage.max_size)

    def add(self, data: Any) -> int:
        """Writes one row; returns its number."""
        index = self._storage.extend(data.unsqueeze(0) if hasattr(data, "unsqueeze") else [data])
        self._mark_update(index)
        return int(index)

    def extend(self, data: Any) -> torch.Tensor:
        """Writes rows, which become visible together; returns their numbers."""
        index: torch.Tensor = self._storage.extend(data)
        self._mark_update(index)
        device = data.device if is_tensor_collection(data) or isinstance(data, torch.Tensor) else None
        return index if device is None else index.to(device)

    def _mark_update(self, index: torch.Tensor) -> None:
        """Tells samplers that draw in this process."""
        for buffer in self._storage.list_buffers():
            buffer.mark_update(index)

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.clear(resets_counts=empty_write_count)

    def dumps(self, path: Any) -> None:
        """Writes nothing: the table has the cursor."""

    def loads(self, path: Any) -> None:
        """Reads nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the table has the cursor."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads nothing, also of the state of another writer: the rows that were loaded have set the cursor."""
