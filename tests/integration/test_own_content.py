"""Overwrites of a store by content that is mapped from its own files: source and destination overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.store.rows import shown_memory

pytestmark = pytest.mark.integration

SIZE = 256
BEFORE = torch.arange(SIZE * SIZE).view(SIZE, SIZE)
LATER = torch.cat([BEFORE[:1], BEFORE[:-1]])
BACKWARDS = torch.arange(SIZE - 1, -1, -1)


@pytest.fixture(scope="module", params=["shm", "gloo"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param, timeout_s=20.0) as made:
        yield made


@pytest.fixture(scope="module")
def local(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that maps stores."""
    with server.client(transport="shm", timeout_s=20.0) as made:
        yield made


def write_leaf(store: Any, mapped: Any) -> None:
    """Replaces a leaf by itself, transposed."""
    store["a"] = mapped["a"].t()


WRITES: dict[str, tuple[Callable[[Any, Any], Any], torch.Tensor]] = {
    "rows": (lambda store, mapped: store.__setitem__(slice(1, None), mapped[:-1]), LATER),
    "set_at_": (lambda store, mapped: store.set_at_("a", mapped["a"][:-1], slice(1, None)), LATER),
    "leaf": (write_leaf, BEFORE.t()),
    "numbers": (lambda store, mapped: store.__setitem__(BACKWARDS, mapped), BEFORE.flip(0)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("writable", [False, True])
def test_store_when_overwritten_by_its_own_mapping_then_the_content_of_before_is_stored(
    client: tdserve.Client, local: tdserve.Client, name: str, write: str, writable: bool
) -> None:
    client.init_remote(TensorDict({"a": BEFORE}, [SIZE]), name)
    do, expected = WRITES[write]
    do(client[name], local[name].map(writable=writable))
    assert torch.equal(client[name]["a"], expected)


@pytest.mark.parametrize("write", WRITES)
def test_store_when_overwritten_by_the_folder_that_it_adopted_then_the_content_of_before_is_stored(
    local: tdserve.Client, name: str, tmp_path: Path, write: str
) -> None:
    own = TensorDict({"a": BEFORE.clone()}, [SIZE]).memmap(str(tmp_path / "own"))
    local.adopt(tmp_path / "own", name)
    do, expected = WRITES[write]
    do(local[name], own)
    assert torch.equal(local[name]["a"], expected)


def test_mapping_when_dropped_then_is_forgotten(local: tdserve.Client, name: str) -> None:
    local.init_remote(TensorDict({"a": BEFORE}, [SIZE]), name)
    before = dict(shown_memory.shown_mappings)
    mapped = local[name].map()
    assert len(shown_memory.shown_mappings) == len(before) + 1
    part = mapped["a"][1:]
    del mapped
    assert shown_memory.is_view_of_store(part, Path("/nowhere"))
    del part
    assert shown_memory.shown_mappings == before
    assert not shown_memory.is_view_of_store(torch.ones(3), Path("/nowhere"))
