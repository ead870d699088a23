from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack
from tensordict.nn import TensorDictParams
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor

import tdserve
from tdserve.base.errors import (
    InvalidRequestError,
    NotSupportedError,
    SpecMismatchError,
    StoreNotFoundError,
    WrongStateError,
)
from tests.sameness import difference


class Named(TensorClass):
    """A tensorclass with a non-tensor field."""

    x: torch.Tensor
    name: str


def content() -> TensorDict:
    """Two levels, tensors and values; large enough that its tensors cannot hide among a call's other bytes."""
    nested = {"y": torch.arange(3.0), "t": "text", "deep": {"z": torch.ones(3, 2)}}
    return TensorDict({"a": torch.arange(6.0).view(3, 2), "n": nested, "big": torch.ones(3, 50_000)}, [3])


@pytest.fixture
def stored(client: tdserve.Client, name: str) -> str:
    """A store of ``content()``."""
    client.init_remote(content(), name)
    return name


def sent_nbytes(client: tdserve.Client) -> int:
    """Bytes of content that the server has sent to anybody."""
    return sum(each["bytes_out"] for each in client.stats()["transports"].values())


def test_load_when_meta_then_no_tensor_travels_and_values_do(client: tdserve.Client, stored: str) -> None:
    before = sent_nbytes(client)
    td = client.load_memmap(stored, device="meta")
    assert sent_nbytes(client) - before < 1000
    assert td["big"].is_meta
    assert (td["big"].shape, td["n", "t"], td.device) == (torch.Size([3, 50_000]), "text", torch.device("meta"))


def test_load_when_under_a_fake_mode_then_fake_and_no_tensor_travels(client: tdserve.Client, stored: str) -> None:
    before = sent_nbytes(client)
    with FakeTensorMode() as mode:
        td = client.load_memmap(stored)
        future = client.load_memmap(stored, return_early=True)
    for found in (td, future.result()):
        assert isinstance(found["big"], FakeTensor)
        assert found["big"].fake_mode is mode
        assert found["n", "t"] == "text"
    assert sent_nbytes(client) - before < 1000
    assert difference(content(), client.load_memmap(stored)) is None


@pytest.mark.parametrize("out", [5, {"big": torch.zeros(1)}, torch.zeros(2)], ids=["int", "dict", "tensor"])
def test_load_when_out_is_no_tensordict_then_refused(client: tdserve.Client, stored: str, out: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"out.*not a tensordict"):
        client.load_memmap(stored, out=out)


@pytest.mark.parametrize("subpath", ["n", ("n",), "/n/"])
def test_load_when_a_subpath_is_given_then_only_that_part(client: tdserve.Client, stored: str, subpath: Any) -> None:
    before = sent_nbytes(client)
    assert difference(content()["n"], client.load_memmap(stored, subpath=subpath)) is None
    assert sent_nbytes(client) - before < 1000
    assert client.load_memmap(stored, subpath=subpath, device="meta")["y"].is_meta


def test_load_when_the_subpath_is_deeper_then_that_part(client: tdserve.Client, stored: str) -> None:
    assert torch.equal(client.load_memmap(stored, subpath="n/deep")["z"], torch.ones(3, 2))
    assert torch.equal(client.load_memmap(stored, subpath=("n", ("deep",)))["z"], torch.ones(3, 2))
    value = client.load_memmap(stored, subpath="n/t")
    assert (type(value), value.data) == (NonTensorData, "text")


@pytest.mark.parametrize("subpath", ["a", "n/no", "no"])
def test_load_when_the_subpath_is_no_tensordict_then_a_value_error(
    client: tdserve.Client, stored: str, subpath: str
) -> None:
    with pytest.raises(ValueError, match="subpath"):
        client.load_memmap(stored, subpath=subpath)


def test_load_when_the_store_is_missing_then_not_found_in_every_way(client: tdserve.Client, name: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"device": "meta"}, {"subpath": "n"}, {"out": content()}]
    for options in ways:
        with pytest.raises(StoreNotFoundError):
            client.load_memmap(name, timeout_s=0, **options)


def test_load_when_it_is_a_replay_then_refused_in_every_way(client: tdserve.Client, name: str) -> None:
    client.create_replay(name, content()[0], 3)
    ways: list[dict[str, Any]] = [{}, {"device": "meta"}, {"subpath": "n"}]
    for options in ways:
        with pytest.raises(WrongStateError):
            client.load_memmap(name, **options)


def test_load_when_out_fits_then_filled_in_place(client: tdserve.Client, stored: str) -> None:
    out = content().zero_()
    old = out["big"]
    assert client.load_memmap(stored, out=out) is out
    assert out["big"] is old
    assert difference(content(), out) is None
    part = out["n"]
    part["y"].zero_()
    assert client.load_memmap(stored, out=part, subpath="n") is part
    assert difference(content(), out) is None


def test_load_when_out_does_not_fit_then_it_takes_the_structure_over(client: tdserve.Client, stored: str) -> None:
    out = TensorDict({"a": torch.zeros(5), "stale": torch.zeros(5), "n": {"y": torch.zeros(5)}}, [5])
    part = out["n"]
    assert client.load_memmap(stored, out=out) is out
    assert out["n"] is part
    assert difference(content(), out) is None
    assert difference(content(), client.load_memmap(stored, out=TensorDict())) is None
    assert client.load_memmap(stored, out=TensorDict({}, [], device="meta"))["big"].is_meta


def test_load_when_out_is_of_another_kind_then_refused_and_unchanged(client: tdserve.Client, stored: str) -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, []) for _ in range(3)])
    with pytest.raises(SpecMismatchError):
        client.load_memmap(stored, out=stack)
    assert stack.tensordicts[0]["a"].sum() == 0
    with pytest.raises(InvalidRequestError, match="out is on"):
        client.load_memmap(stored, out=TensorDict({}, [], device="cpu"), device="meta")


@pytest.mark.parametrize("options", [{"mode": "w"}, {"allow_pickle": 1}, {"mode": "r+", "device": "cuda"}])
def test_load_when_an_argument_is_wrong_then_refused(
    client: tdserve.Client, stored: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        client.load_memmap(stored, **options)


def test_load_when_mode_is_r_plus_then_writes_reach_the_store(
    local_client: tdserve.Client, remote_client: tdserve.Client, name: str
) -> None:
    local_client.init_remote(content(), name)
    td = local_client.load_memmap(name, mode="r+")
    td["a"][0] = 7.0
    local_client.load_memmap(name, mode="r+", subpath="n")["y"][1] = 8.0
    out = local_client.load_memmap(name, mode="r+", out=TensorDict())
    out["a"][1] = 9.0
    found = remote_client.load_memmap(name)
    assert (found["a"][:, 0].tolist(), found["n", "y"].tolist()) == ([7.0, 9.0, 4.0], [0.0, 8.0, 2.0])
    local_client.load_memmap(name, mode="r")["a"][0] = 1.0
    assert remote_client.load_memmap(name)["a"][0, 0] == 7.0
    with pytest.raises(NotSupportedError, match="shm"):
        remote_client.load_memmap(name, mode="r+")


def test_load_when_values_are_pickled_then_the_call_decides(server: tdserve.Server, name: str) -> None:
    for transport in ("gloo", "shm"):
        with server.client(transport=transport, allow_pickle=True) as trusting:
            trusting.memmap(TensorDict({"v": NonTensorData(range(3))}, []), name, exists_ok=True)
            with pytest.raises(NotSupportedError):
                trusting.load_memmap(name, allow_pickle=False)
            assert trusting.load_memmap(name)["v"] == range(3)
        with server.client(transport=transport) as careful:
            with pytest.raises(NotSupportedError):
                careful.load_memmap(name)
            assert careful.load_memmap(name, allow_pickle=True)["v"] == range(3)
            assert careful.load_memmap(name, device="meta", allow_pickle=True)["v"] == range(3)


def test_load_in_place_when_structures_differ_then_as_the_store(client: tdserve.Client, stored: str, name: str) -> None:
    td = TensorDict({"stale": torch.zeros(2)}, [2])
    assert client.load_memmap_(td, stored) is td
    assert client.load_(td, stored) is td
    assert difference(content(), td) is None
    row = Named(x=torch.zeros(2), name="old", batch_size=[2])
    client.memmap(Named(x=torch.ones(2), name="new", batch_size=[2]), f"{name}-named")
    assert client.load_memmap_(row, f"{name}-named") is row
    assert (row.name, row.x.tolist()) == ("new", [1.0, 1.0])
    with pytest.raises(NotSupportedError, match="unlock_"):
        client.load_memmap_(TensorDict({}, []).lock_(), stored)


def test_refresh_when_others_wrote_then_it_shows_that(client: tdserve.Client, name: str) -> None:
    td = client.memmap_(content(), name)
    client[name].update_at_(TensorDict({"a": torch.full((2,), 5.0), "n": {"t": "new"}}, []), 1)
    assert client.memmap_refresh_(td) is td
    assert td["a"][1].tolist() == [5.0, 5.0]
    assert td["n", "t"] == ["text", "new", "text"]
    assert td.is_locked


def test_refresh_when_the_store_was_made_anew_then_the_new_structure(client: tdserve.Client, name: str) -> None:
    td = client.memmap_(content(), name)
    client.delete(name)
    with pytest.raises(StoreNotFoundError):
        client.memmap_refresh_(td, timeout_s=0)
    assert td["a"][1].tolist() == [2.0, 3.0]
    other = TensorDict({"a": torch.ones(2), "new": {"b": torch.zeros(2)}}, [2])
    client.memmap(other, name)
    assert difference(other, client.memmap_refresh_(td).clone()) is None
    assert td.is_locked


def test_refresh_when_others_changed_its_keys_then_it_has_those(client: tdserve.Client, name: str) -> None:
    td = client.memmap_(content(), name)
    inner = td["n"]
    client[name].set(("n", "added"), torch.ones(3)).del_("big")
    client.memmap_refresh_(td)
    assert (td["n"] is inner, td["n", "added"].tolist(), "big" in td.keys()) == (True, [1.0] * 3, False)  # noqa: SIM118
    client[name].set_at_(("n", "added"), 2.0, 0)
    assert client.memmap_refresh_(td)["n", "added"].tolist() == [2.0, 1.0, 1.0]


def test_refresh_when_another_store_was_loaded_then_that_is_shown(client: tdserve.Client, stored: str) -> None:
    td = client.memmap_(TensorDict({"x": torch.zeros(2)}, [2]), f"{stored}-first")
    client.load_memmap_(td, stored)
    client[stored].set_at_("a", 5.0, 0)
    assert client.memmap_refresh_(td)["a"][0].tolist() == [5.0, 5.0]


def test_refresh_when_parameters_then_filled_and_still_the_same(client: tdserve.Client, name: str) -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}, []))
    weight = params["w"]
    td = client.memmap_(params, name)
    client[name].set_("w", torch.ones(2))
    client.memmap_refresh_(td)
    assert params["w"] is weight
    assert weight.tolist() == [1.0, 1.0]


def test_refresh_when_parameters_of_a_module_then_the_module_computes_with_what_came(
    client: tdserve.Client, name: str
) -> None:
    module = torch.nn.Linear(2, 1)
    td = client.memmap_(TensorDict.from_module(module), name)
    client[name].set_("weight", torch.ones(1, 2)).set_("bias", torch.zeros(1))
    client.memmap_refresh_(td)
    assert module(torch.tensor([[1.0, 2.0]])).item() == 3.0


def test_refresh_when_it_shows_no_store_then_the_error_names_the_remedy(client: tdserve.Client) -> None:
    with pytest.raises(WrongStateError, match="load_memmap_"):
        client.memmap_refresh_(content())
