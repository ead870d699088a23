from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import InvalidRequestError, NotSupportedError, StoreExistsError, WrongStateError
from tests.errors import raises
from tests.sameness import difference

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text"}}, [3])


def test_memmap_like_when_made_then_zeros_with_more_rows(client: tdserve.Client, name: str) -> None:
    handle = client.memmap_like(TD, name, batch_size=(5,))
    assert handle.batch_size == torch.Size([5, 3])
    assert torch.equal(handle["a"], torch.zeros(5, 3, 2))
    assert handle[1, 2]["n", "t"] == "text"


@pytest.mark.parametrize("batch_size", [(-1,), (2.0,), (True,)])
def test_memmap_like_when_a_size_is_none_then_refused(client: tdserve.Client, name: str, batch_size: Any) -> None:
    with raises(InvalidRequestError, argument="batch_size"):
        client.memmap_like(TD, name, batch_size=batch_size)


def test_memmap_like_when_returned_early_then_a_future_of_the_handle(client: tdserve.Client, name: str) -> None:
    future = client.memmap_like(TD, name, batch_size=(5,), num_threads=2, return_early=True)
    handle = future.result()
    assert handle.batch_size == torch.Size([5, 3])
    assert handle[1, 2]["n", "t"] == "text"


def test_memmap_like_when_expanded_then_only_as_large_as_one_row(client: tdserve.Client, name: str) -> None:
    row = TensorDict({"a": torch.ones(64, 64, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.int64)}, [])
    handle = client.memmap_like(row.expand(1_000), name)
    assert handle.batch_size == torch.Size([1_000])
    assert handle["a"].shape == torch.Size([1_000, 64, 64])
    assert not handle["a"].any()


class Point(TensorClass):
    """An instance, of which stacks are packed."""

    x: torch.Tensor
    y: str


def _row(size: int, key: str = "a") -> TensorDict:
    return TensorDict({key: torch.ones(size), "n": {"b": torch.ones(2)}, "t": "text"})


STACKS: dict[str, Callable[[], Any]] = {
    "of one structure": lambda: lazy_stack([_row(3), _row(3)]),
    "of other sizes": lambda: lazy_stack([_row(3), _row(5)]),
    "of other keys": lambda: lazy_stack([_row(3), _row(3, "b")]),
    "of instances": lambda: lazy_stack([Point(torch.ones(3), "y", batch_size=[3]) for _ in range(2)]),
    "of stacks": lambda: lazy_stack([lazy_stack([_row(3), _row(4)]) for _ in range(2)]),
    "in a tensordict": lambda: TensorDict({"s": lazy_stack([_row(3), _row(4)]), "x": torch.ones(2)}, [2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STACKS)
def test_memmap_like_when_of_lazy_stacks_then_zeros_of_their_keys_and_sizes(
    client: tdserve.Client, name: str, case: str
) -> None:
    zeros = STACKS[case]().apply(torch.zeros_like)
    assert difference(client.memmap_like(STACKS[case](), name).to_tensordict(), zeros) is None
    rows = client.memmap_like(STACKS[case](), f"{name}-rows", batch_size=[2])
    for number in range(2):
        assert difference(rows[number], zeros) is None


def test_save_and_dumps_when_called_then_as_memmap(client: tdserve.Client, name: str) -> None:
    assert client.save(TD, name)["n", "t"] == client.dumps(TD, f"{name}-2")["n", "t"] == "text"
    with pytest.raises(StoreExistsError):
        client.save(TD, name)
    assert client.save(TD, name, existsok=True).name == name


def test_memmap_when_leaves_have_files_then_copied_unless_refused(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    mapped = TD.memmap(str(tmp_path))
    ways: list[dict[str, Any]] = [{}, {"copy_existing": True}, {"copy_existing": None}]
    for number, options in enumerate(ways):
        store = client.memmap(mapped, f"{name}-{number}", **options)
        assert torch.equal(store["a"], TD["a"])
    for save in (client.memmap, client.memmap_, client.save):
        with pytest.raises(WrongStateError, match="copy_existing=True"):
            save(mapped, name, False)
    assert name not in client


@pytest.mark.parametrize("options", [{"archive": True}, {"compression": "deflate"}])
def test_memmap_when_an_archive_is_asked_for_then_refused_with_what_to_do(
    client: tdserve.Client, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(NotSupportedError, match="save"):
        client.memmap(TD, name, **options)
    if "archive" in options:
        with pytest.raises(NotSupportedError, match="save"):
            client.memmap_like(TD, name, **options)
    assert name not in client


def test_memmap__when_returned_early_then_a_future_of_the_tensordict_itself(client: tdserve.Client, name: str) -> None:
    td = TD.clone()
    assert client.memmap_(td, name, return_early=True).result() is td
    client[name].set_at_("a", 9.0, 0)
    assert client.memmap_refresh_(td)["a"][0].tolist() == [9.0, 9.0]


def test_memmap_when_of_a_handle_or_a_view_then_what_it_reads_is_stored(client: tdserve.Client, name: str) -> None:
    store = client.memmap(TD, name)
    client.memmap(store, f"{name}-copy")
    client.memmap(store.select("a"), f"{name}-view")
    assert torch.equal(client.load_memmap(f"{name}-copy")["a"], TD["a"])
    assert client.keys(f"{name}-view") == ["a"]
    assert client.load_memmap_(client[name], f"{name}-view").name == name
    assert client.keys(name) == ["a"]
    assert client.memmap_refresh_(store) is store
    assert list(store.spec.keys()) == ["a"]


def test_memmap__when_it_has_no_entries_of_its_own_then_refused_and_nothing_is_made(
    client: tdserve.Client, name: str
) -> None:
    store = client.memmap(TD, name)
    whole = TensorDict({"n": {"a": torch.zeros(2)}}, [2]).lock_()
    for td, said in ((store, "a handle"), (store.select("a"), "a handle"), (whole["n"], "unlock the whole")):
        with pytest.raises(NotSupportedError, match=said):
            client.memmap_(td, f"{name}-2")
    assert f"{name}-2" not in client
    assert not store.is_locked
