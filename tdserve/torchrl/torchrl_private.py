"""The private names of TorchRL that this package uses, each with its reason; no other module uses any.

What subclasses of TorchRL's public classes define, such as ``Storage._empty``, is not private: TorchRL declares it as
abstract.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torchrl.data.replay_buffers.replay_buffers.base import ReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl.data.replay_buffers.samplers._trajectory import _FragmentedTrajectoryIndex
from torchrl.data.replay_buffers.samplers.base import Sampler
from torchrl.data.replay_buffers.samplers.prioritized_slice import PrioritizedSliceSampler
from torchrl.data.replay_buffers.samplers.slice import SliceSampler
from torchrl.data.replay_buffers.samplers.slice_without_replacement import SliceSamplerWithoutReplacement

from tdserve.base.errors import InvalidRequestError

_TREES = ("SumSegmentTreeFp32", "MinSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp64")


def get_pending_parts(buffer: Any) -> tuple[Any, Any]:
    """Returns the sampler and the writer that a buffer was given, from which it has not made its own yet.

    ``_init_sampler``, ``_init_writer``: ``Storage.attach`` is called before the buffer makes its parts from these.
    """
    return buffer._init_sampler, buffer._init_writer


def set_pending_parts(buffer: Any, sampler: Any, writer: Any) -> None:
    """Replaces the sampler and the writer that a buffer is going to use; names as in :func:`get_pending_parts`.

    ``_init_collate_fn``: for a storage of a class that TorchRL does not know the buffer refuses to choose a collate
    function. Rows of a table come as one batch, so nothing remains to be collated.
    ``_initialize_prioritized_sampler``: gives every row that is there a new priority when a buffer is made. The table's
    rows have theirs, which a buffer that joins must not change.
    """
    buffer._init_sampler, buffer._init_writer = sampler, writer
    if buffer._init_collate_fn is None:
        buffer._init_collate_fn = return_unchanged
    buffer._initialize_prioritized_sampler = do_nothing


def route_key_writes(kind: type[Any]) -> None:
    """Lets ``buffer[key] = values`` write where a buffer's storage is of this kind; other buffers are left as they are.

    ``ReplayBuffer.__setitem__`` sets keys of ``buffer[:]``, which is a copy of such a storage; Python finds it only in
    the class. A tuple that is no key chooses along several dimensions.

    Args:
        kind: A class of storages, which replaces ``set_`` of its buffers.
    """
    set_item = ReplayBuffer.__setitem__

    @wraps(set_item)
    def set_item_or_key(buffer: Any, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        is_key = all(isinstance(part, str) for part in parts)
        if not (is_key or len(parts) > 1) or not isinstance(buffer.storage, kind):
            set_item(buffer, index, value)
        elif is_key:
            buffer.set_(index, value)
        else:
            raise InvalidRequestError(argument="index", reason=f"{index!r}: a table has one dimension of rows")

    ReplayBuffer.__setitem__ = set_item_or_key


def divide_by_columns(kind: type[Any]) -> None:
    """Lets samplers of slices read of such a storage only the keys by which they divide its rows, and draw again if the
    rows were overwritten before they are read.

    Args:
        kind: A class of storages with ``has_key``, ``narrow``, ``note_division``, ``read_drawn`` and ``draw_whole``.
    """
    SliceSampler._get_stop_and_length = _divide_by_columns(SliceSampler._get_stop_and_length, kind)
    SliceSampler._finalize_index = _read_drawn_once(SliceSampler._finalize_index, kind)
    _FragmentedTrajectoryIndex._read_records = _read_records_of_columns(_FragmentedTrajectoryIndex._read_records, kind)
    _FragmentedTrajectoryIndex._apply_pending = _rebuild_instead(_FragmentedTrajectoryIndex._apply_pending, kind)
    for sampler in (SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler):
        sampler.sample = _draw_whole(sampler.sample, kind)


def _divide_by_columns(find_slices: Any, kind: type[Any]) -> Any:
    """``SliceSampler._get_stop_and_length`` reads ``storage[:]``, all that is there. If the rows lack ``traj_key``, it
    divides them where ``end_key`` is set over TorchRL's own storages, and raises over others.

    ``_fetch_traj`` is whether it looks for ``traj_key``; ``_traj_key_auto`` whether ``_resolve_traj_key`` has still to
    find out which key that is, by all keys of a row; ``_cache`` has the slices that a user has given.
    """

    @wraps(find_slices)
    def find_slices_by_columns(sampler: Any, storage: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(storage, kind):
            return find_slices(sampler, storage, *args, **options)
        if sampler._traj_key_auto:
            sampler._resolve_traj_key(storage)
        if sampler.traj_key is not None and not storage.has_key(sampler.traj_key):
            sampler._fetch_traj = False
        narrow = storage.narrow([sampler.traj_key], [sampler.end_key, *(sampler.end_keys or ())])
        slices = find_slices(sampler, narrow, *args, **options)
        if narrow is storage or "static-stop-and-length" in sampler._cache:
            return slices
        storage.note_division(narrow.division)
        return narrow.keep_live(slices)

    return find_slices_by_columns


def _read_records_of_columns(read_records: Any, kind: type[Any]) -> Any:
    """``_FragmentedTrajectoryIndex._read_records`` reads ``storage[:]`` as well, and takes places for row numbers;
    ``_validate_metadata`` makes its result of what was read."""

    @wraps(read_records)
    def read_records_of_columns(index: Any, storage: Any, *args: Any, **options: Any) -> Any:
        keys = [index.trajectory_key, index.step_key]
        if not isinstance(storage, kind) or not all(map(storage.has_key, keys)):
            return read_records(index, storage, *args, **options)
        narrow = storage.narrow(keys)
        rows = narrow[:]
        index.division = narrow.division
        trajectories, steps = map(rows.get, keys)
        return index._validate_metadata(trajectories, steps, torch.arange(len(rows)))

    return read_records_of_columns


def _rebuild_instead(apply_pending: Any, kind: type[Any]) -> Any:
    """``_apply_pending`` reads rows that this process has written, which others may have overwritten since;
    ``_full_rebuild`` reads all."""

    @wraps(apply_pending)
    def apply_or_rebuild(index: Any, storage: Any, revision: int) -> Any:
        return (index._full_rebuild if isinstance(storage, kind) else partial(apply_pending, index))(storage, revision)

    return apply_or_rebuild


def _read_drawn_once(finalize: Any, kind: type[Any]) -> Any:
    """``_finalize_index`` reads the rows that were drawn, and the buffer reads them again.

    ``_fragmented_index`` may have read the keys at an earlier draw, if nothing was written since.
    """

    @wraps(finalize)
    def finalize_with_rows(sampler: Any, *, storage: Any, **options: Any) -> Any:
        if not isinstance(storage, kind):
            return finalize(sampler, storage=storage, **options)
        drawn = storage.read_drawn(getattr(sampler._fragmented_index, "division", None))
        index, info = finalize(sampler, storage=drawn, **options)
        drawn.hold_for(index)
        return index, info

    return finalize_with_rows


def _draw_whole(sample: Any, kind: type[Any]) -> Any:
    @wraps(sample)
    def sample_whole(sampler: Any, storage: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(storage, kind):
            return sample(sampler, storage, *args, **options)
        return storage.draw_whole(lambda: sample(sampler, storage, *args, **options))

    return sample_whole


def return_unchanged(rows: Any) -> Any:
    """Returns its argument: a collate function, which is pickled by name."""
    return rows


def do_nothing() -> None:
    """Does nothing; pickled by name."""


def share_state(part: Sampler, kind: Any) -> Any:
    """Returns an object of another class with the same attributes as ``part``, which stay the same from then on.

    So what a user sets on the sampler that he made, such as ``sampler.beta``, has its effect.
    """
    made = kind.__new__(kind)
    made.__dict__ = part.__dict__
    return made


class MissingTree:
    """Stands for a compiled tree of TorchRL that could not be loaded. It can be made, but not used."""

    def __init__(self, *_: Any) -> None:
        """Makes it; the arguments are those of a tree."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __getitem__(self, index: Any) -> Any:
        return self._refuse()

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> Any:
        reason = "the compiled segment trees of TorchRL are not available: its wheel was built for another torch"
        raise ImportError(reason)


def allow_missing_trees() -> None:
    """Lets a ``PrioritizedSampler`` be made where TorchRL's compiled trees do not load.

    ``prioritized.SumSegmentTreeFp32`` and the like are None there, as with the released wheel under torch 2.13, and the
    sampler refuses to be made. With a table the server has the priorities and the trees stay empty. Without one, the
    sampler now fails when it is first used.
    """
    for name in _TREES:
        if getattr(prioritized, name) is None:
            setattr(prioritized, name, MissingTree)
