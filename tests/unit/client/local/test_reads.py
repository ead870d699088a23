from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import TransferAbortedError
from tdserve.client.content.leaves import Leaves, make_leaves
from tdserve.client.datasets.worker_pool import WorkerPool
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_reads import (
    MAX_CLONED_BYTES,
    NOTHING_ADDED,
    Copied,
    Selected,
    copy_rows,
    copy_selection,
)
from tdserve.client.local.root_files import SeenFiles
from tdserve.client.local.sharing import MIN_SHARED_BYTES
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.read_plans import plan_selection
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY, SLICE_END_KEY, read_layout
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.store.rows.generations import sum_generations
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Path as KeyPath
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2
from tests.unit.worker.peer import UID, StoredTensorDict

WIDE = MAX_CLONED_BYTES
TD = TensorDict(
    {
        "a": torch.arange(6),
        "n": {"z": torch.randn(6, 2, dtype=torch.complex64)},
        "flag": torch.arange(6) % 2 == 0,
        "wide": torch.rand(6, WIDE),
    },
    [6],
)


@pytest.fixture
def end(tmp_path: Path) -> LocalEnd:
    """Whose root is ``tmp_path``."""
    return LocalEnd(SeenFiles(tmp_path), lock=None, spool=None, lacks_values=False)


@pytest.fixture
def files(tmp_path: Path) -> StoredTensorDict:
    """A store of six rows."""
    return StoredTensorDict(tmp_path / "stores" / "x", TD)


@pytest.fixture
def store(end: LocalEnd, files: StoredTensorDict) -> MappedStore:
    """The same, mapped."""
    return end.store("x", UID, files.spec)


class Moving(BufferPool):
    """Lets something happen in the middle of a copy: when its memory is taken."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def take(self, nbytes: int) -> torch.Tensor:
        self._happens()
        return super().take(nbytes)


def selected(
    store: MappedStore, index: Any = (), *keys: KeyPath, pool: BufferPool | None = None, into: Leaves | None = None
) -> Selected | None:
    """A copy."""
    return copy_selection(store, parse(index), keys, pool=pool or BufferPool(), into=into)


@pytest.mark.parametrize("index", [(), slice(1, 4), [2, 2, 0]])
def test_selection_when_the_server_has_read_the_values_then_only_with_tensors_of_the_same_moment(
    store: MappedStore, index: Any
) -> None:
    numbers = store.generations.values[plan_selection(store, parse(index), ()).watched]
    accepted = control_pb2.Accepted(values=b"v", generation_sum=sum_generations(numbers))
    found = copy_selection(store, parse(index), (), accepted, pool=BufferPool())
    assert found is not None
    assert found.values == b"v"
    accepted.generation_sum -= 2  # one of them was written since
    with pytest.raises(TransferAbortedError, match="was written while its values were sent"):
        copy_selection(store, parse(index), (), accepted, pool=BufferPool())


@pytest.mark.parametrize(
    "index",
    [(), 2, -1, slice(1, 4), slice(None, None, 2), [4, 1, 1], [], TD["flag"], (slice(0, 2),), Ellipsis],
)
@pytest.mark.parametrize("keys", [(), (("a",), ("n",)), (("wide",),)])
def test_selection_when_any_index_is_given_then_equal_and_a_copy(
    store: MappedStore, index: Any, keys: tuple[KeyPath, ...]
) -> None:
    found = selected(store, index, *keys)
    assert found is not None
    expected = TD.select(*keys) if keys else TD
    expected = expected[index] if index != () else expected
    assert found.version == 1
    assert set(found.leaves) == {path for path, _ in capture(expected).spec.tensors}
    for path, leaf in found.leaves.items():
        assert torch.equal(leaf, expected[path])
        leaf.zero_()
    assert torch.equal(store.leaves["a",], TD["a"])
    assert torch.equal(store.leaves["wide",], TD["wide"])


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [MIN_SHARED_BYTES // WIDE, 3 * MIN_SHARED_BYTES // WIDE + 1])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_selection_when_rows_are_many_then_equal_however_many_threads_copy(
    store: MappedStore, num_rows: int, num_threads: int
) -> None:
    index = torch.randint(6, (num_rows,))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = selected(store, index)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    for path, leaf in found.leaves.items():
        assert torch.equal(leaf, TD[path][index])


@pytest.mark.parametrize("index", [(), slice(1, 5), [3, 1], 2])
@pytest.mark.parametrize("is_strided", [False, True])
def test_selection_when_the_caller_has_tensors_then_into_those(
    store: MappedStore, index: Any, is_strided: bool
) -> None:
    expected = TD[index] if index != () else TD
    out = expected.clone().zero_()
    if is_strided:
        out["wide"] = torch.zeros(*expected["wide"].shape, 2)[..., 0]
    captured = capture(out, is_destination=True)
    into = make_leaves(captured, read_layout(captured.spec))
    assert selected(store, index, into=into) is not None
    assert (out == expected).all()


@pytest.mark.parametrize(("index", "row"), [((), -1), ([1, 2], 2), (slice(0, 3), 0)])
def test_selection_when_it_is_being_written_then_none_and_other_rows_can_be_read(
    store: MappedStore, files: StoredTensorDict, index: Any, row: int
) -> None:
    files.generations.values[row] |= 1
    assert selected(store, index) is None
    assert selected(store, [4, 5]) is not None


@pytest.mark.parametrize("way", ["row", "store", "delete"])
def test_selection_when_it_moves_while_it_is_copied_then_none(
    store: MappedStore, files: StoredTensorDict, way: str
) -> None:
    def happens() -> None:
        if way == "row":
            files.generations.values[2] += 2
        elif way == "store":
            files.generations.values[-1] += 1
        else:
            files.generations.mark_deleted()

    index = () if way == "store" else slice(1, 4)
    assert selected(store, index, pool=Moving(happens)) is None


def test_selection_when_another_row_moves_meanwhile_then_taken(store: MappedStore, files: StoredTensorDict) -> None:
    def happens() -> None:
        files.generations.values[[0, -1]] += 2

    assert selected(store, slice(1, 4), pool=Moving(happens)) is not None


@pytest.mark.parametrize("index", [2, [1, 2]])
def test_selection_when_deleted_before_then_none_whatever_its_size(
    store: MappedStore, files: StoredTensorDict, index: Any
) -> None:
    files.generations.mark_deleted()
    assert selected(store, index, ("a",)) is None


def copied_rows(
    end: LocalEnd,
    files: StoredTensorDict,
    pool: BufferPool,
    name: str = "x",
    added: Mapping[str, bytes] = NOTHING_ADDED,
) -> Copied:
    """Rows 4 and 1, as they were chosen when both had generation 2."""
    found = FoundRows(np.array([4, 1]), np.array([2, 2]))
    return copy_rows(end.store(name, UID, files.spec), files.spec, found, added=added, values=b"", pool=pool)


def test_rows_when_chosen_then_copied_with_what_the_table_adds(end: LocalEnd, files: StoredTensorDict) -> None:
    priority = np.array([0.5, 1.5], np.float32)
    copied = copied_rows(end, files, BufferPool(), added={"priority": priority.tobytes()})
    leaves = copied.received.get_leaves()
    for path, leaf in leaves.items():
        assert torch.equal(leaf, TD[path][[4, 1]])
    assert copied.received.get_trailing("priority").tolist() == [0.5, 1.5]
    assert copied.received.num_torn == 0
    leaves["a",].zero_()
    assert torch.equal(files.leaves["a",], TD["a"])


@pytest.mark.parametrize("pool", [BufferPool, WorkerPool])
def test_rows_when_they_have_no_tensors_then_what_the_table_adds_may_be_changed(
    end: LocalEnd, tmp_path: Path, pool: type[BufferPool]
) -> None:
    files = StoredTensorDict(tmp_path / "stores" / "empty", TensorDict({}, [6]))
    flags = np.array([True, False])
    received = copied_rows(end, files, pool(), "empty", {SLICE_END_KEY: flags.tobytes()}).received
    assert received.get_leaves() == {}
    assert received.get_trailing(INDEX_KEY).tolist() == [4, 1]
    assert torch.equal(received.get_trailing(SLICE_END_KEY), torch.from_numpy(flags))
    assert received.num_torn == 0
    for name in (INDEX_KEY, GENERATION_KEY, SLICE_END_KEY):
        received.get_trailing(name).zero_()
    assert files.generations.values.tolist() == [2] * 7


def test_rows_when_one_moves_while_they_are_copied_then_missing(end: LocalEnd, files: StoredTensorDict) -> None:
    def happens() -> None:
        files.generations.values[1] += 1

    copied = copied_rows(end, files, Moving(happens))
    assert copied.received.get_trailing(GENERATION_KEY).tolist()[0] == 2
    assert copied.received.num_torn == 1


def test_rows_when_the_store_is_deleted_meanwhile_then_to_be_asked_for_again(
    end: LocalEnd, files: StoredTensorDict
) -> None:
    with pytest.raises(TransferAbortedError, match="'x' was deleted meanwhile"):
        copied_rows(end, files, Moving(files.generations.mark_deleted))
