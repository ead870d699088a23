"""Data sets of Minari: the steps of all episodes as rows, with the keys that TorchRL gives them. Needs ``minari``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.imports.import_source import (
    ImportOptions,
    ImportSource,
    Key,
    make_missing_package_error,
    make_path_error,
    make_value_array,
    nest_columns,
)

_Columns = dict[Key, NDArray[Any]]


def open_minari(path: str, options: ImportOptions) -> ImportSource:
    """Opens a data set: its folder, or its id; one that is not on this machine is downloaded.

    Raises:
        NotSupportedError: ``minari`` is not installed.
        InvalidRequestError: There is no such data set.
    """
    try:
        import minari
    except ImportError:
        raise make_missing_package_error("minari", "tdserve[minari]") from None
    folder = Path(path) / "data" if (Path(path) / "data").is_dir() else Path(path)
    try:
        found = minari.MinariDataset(folder) if folder.is_dir() else minari.load_dataset(path, download=True)
        return _EpisodeSource(path, found, options)
    except InvalidRequestError:
        raise
    except Exception as fault:
        raise make_path_error(path, fault) from fault


class _EpisodeSource(ImportSource):
    """Steps of episodes. One episode is in memory at a time, and the steps that wait to be written.

    Args:
        path: Path of the data set, for errors.
        dataset: A ``MinariDataset``.
        options: How it is read.
    """

    def __init__(self, path: str, dataset: Any, options: ImportOptions) -> None:
        self._dataset = dataset
        self._keys = options.keys
        self.num_rows = int(dataset.total_steps)
        self.row_nbytes = 1
        for episode in dataset.iterate_episodes([dataset.episode_indices[0]] if self.num_rows else []):
            columns = _make_columns(episode)
            for key in self._keys:
                if not any(name[: len(key)] == key for name in columns):
                    listed = ", ".join(map("/".join, columns))
                    raise InvalidRequestError(argument="key", reason=f"{path} has no {'/'.join(key)}: {listed}")
            nbytes = sum(column.nbytes for column in self._choose(columns).values())
            self.row_nbytes = max(nbytes // max(len(episode), 1), 1)

    def iter_batches(self, max_rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        waiting: list[_Columns] = []
        num_waiting = 0
        for episode in self._dataset.iterate_episodes():
            columns = self._choose(_make_columns(episode))
            for start in range(0, len(episode), max_rows):
                stop = min(start + max_rows, len(episode))
                if num_waiting + stop - start > max_rows:
                    yield num_waiting, _concatenate_parts(waiting)
                    waiting, num_waiting = [], 0
                waiting.append({path: column[start:stop] for path, column in columns.items()})
                num_waiting += stop - start
        if num_waiting:
            yield num_waiting, _concatenate_parts(waiting)

    def _choose(self, columns: _Columns) -> _Columns:
        if not self._keys:
            return columns
        return {path: each for path, each in columns.items() if any(path[: len(key)] == key for key in self._keys)}


def _make_columns(episode: Any) -> _Columns:
    """Returns the steps of an episode; of T steps it has T + 1 observations."""
    num_steps = len(episode)
    columns: _Columns = {}
    for path, values in _iter_leaves(episode.observations, ("observation",)):
        columns[path] = values[:num_steps]
        following: Key = ("next", *path)
        columns[following] = values[1 : num_steps + 1]
    columns.update(_iter_leaves(episode.actions, ("action",)))
    columns["next", "reward"] = np.asarray(episode.rewards)[:, None]
    terminated, truncated = (np.asarray(each, bool)[:, None] for each in (episode.terminations, episode.truncations))
    columns["next", "terminated"], columns["next", "truncated"] = terminated, truncated
    columns["next", "done"] = terminated | truncated
    columns["episode",] = np.full(num_steps, episode.id, np.int64)
    return columns


def _iter_leaves(values: Any, path: Key) -> Iterator[tuple[Key, NDArray[Any]]]:
    """Yields the arrays of a space: those of a Dict below its keys, those of a Tuple below their numbers."""
    if isinstance(values, dict):
        for key, part in values.items():
            yield from _iter_leaves(part, (*path, key))
    elif isinstance(values, tuple):
        for number, part in enumerate(values):
            yield from _iter_leaves(part, (*path, str(number)))
    else:
        yield path, values if isinstance(values, np.ndarray) else make_value_array(values)


def _concatenate_parts(parts: list[_Columns]) -> dict[str, Any]:
    return nest_columns({path: np.concatenate([part[path] for part in parts]) for path in parts[0]})
