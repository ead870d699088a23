"""tensordict's memmap family by store name, of every kind of tensordict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, is_tensor_collection
from tensordict.nn import TensorDictParams
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tdserve
from tdserve.base.errors import NotSupportedError
from tests.conformance.kinds import KINDS
from tests.sameness import difference

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")]


def outline(td: Any) -> Any:
    """Returns everything except the content of tensors: types, keys, batch sizes, names, shapes, dtypes, other
    values."""
    if isinstance(td, TensorDictParams):
        return type(td), td.no_convert, outline(td._param_td)
    if isinstance(td, torch.Tensor):
        return (
            isinstance(td, torch.nn.Parameter),
            td.requires_grad,
            td.is_nested,
            td.dtype,
            td.dim() if td.is_nested else tuple(td.shape),
        )
    if not is_tensor_collection(td):
        return td
    if hasattr(td, "tensordicts"):
        return type(td), td.stack_dim, list(td.names), [outline(row) for row in td.tensordicts]
    if getattr(type(td), "_is_non_tensor", False):
        return type(td), tuple(td.batch_size), td.data
    entries = td if isinstance(td, TensorDict) else td._tensordict
    keys = list(entries.keys())
    fields = {key: outline(entries.get(key)) for key in keys}
    return type(td), tuple(td.batch_size), list(td.names), fields


def tensors(td: Any) -> list[torch.Tensor]:
    """Returns all its tensors; for a lazy stack those of each row."""
    found: list[torch.Tensor] = []
    td.apply(found.append, filter_empty=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_load_when_without_content_then_the_same_in_outline(client: tdserve.Client, name: str, kind: str) -> None:
    client.memmap(KINDS[kind].make(), name)
    expected = outline(client.load_memmap(name))
    if "strided" in kind:
        with pytest.raises(NotSupportedError, match="jagged"):
            client.load_memmap(name, device="meta")
        return
    meta = client.load_memmap(name, device="meta")
    assert outline(meta) == expected
    assert all(leaf.is_meta for leaf in tensors(meta))
    if "Unbatched" in kind:
        with FakeTensorMode(shape_env=ShapeEnv()), pytest.raises(NotSupportedError, match="UnbatchedTensor"):
            client.load_memmap(name)
        return
    with FakeTensorMode(shape_env=ShapeEnv()):
        fake = client.load_memmap(name)
    assert outline(fake) == expected
    assert all(isinstance(leaf, FakeTensor) or isinstance(leaf.values(), FakeTensor) for leaf in tensors(fake))


@pytest.mark.parametrize("kind", KINDS)
def test_load_when_into_another_then_equal_to_what_is_stored(client: tdserve.Client, name: str, kind: str) -> None:
    example = KINDS[kind]
    client.memmap(example.make(), name)
    stored = client.load_memmap(name)
    out = client.load_memmap(name)
    for td in (stored, out):
        if td.is_locked:
            td.unlock_()
    assert client.load_memmap(name, out=out) is out
    assert difference(stored, out) is None
    if type(stored) is TensorDict:
        other = client.load_memmap_(TensorDict({"gone": torch.zeros(2)}, [2]), name)
        assert outline(other) == outline(stored)


CANNOT_BE_CHANGED = {
    "a sub-tensordict": "_SubTensorDict",
    "a lazy view": "_PermutedTensorDict",
    "in an HDF5 file": "PersistentTensorDict",
}
"""Kinds that show the entries of others, by class: memmap_ cannot put a store's memory into them."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CANNOT_BE_CHANGED])
def test_refresh_when_others_have_written_then_it_is_as_what_is_loaded(
    client: tdserve.Client, name: str, kind: str
) -> None:
    td = client.memmap_(KINDS[kind].make(), name)
    client.send(KINDS[kind].make(), name)
    assert client.memmap_refresh_(td) is td
    assert td.is_locked
    assert outline(td) == outline(client.load_memmap(name))


@pytest.mark.parametrize("kind", CANNOT_BE_CHANGED)
def test_memmap__when_it_shows_the_entries_of_others_then_refused_before_anything_is_made(
    client: tdserve.Client, name: str, kind: str
) -> None:
    td = KINDS[kind].make()
    said = rf"^memmap_\(\) of a {CANNOT_BE_CHANGED[kind]} is not supported: .*memmap\(\) stores it"
    with pytest.raises(NotSupportedError, match=said):
        client.memmap_(td, name)
    assert name not in client
    assert not td.is_locked
    client.memmap(td, name)
    for load in (client.load_memmap_, client.recv):
        with pytest.raises(NotSupportedError, match=CANNOT_BE_CHANGED[kind]):
            load(td, name)
    td.update_(client.load_memmap(name))
