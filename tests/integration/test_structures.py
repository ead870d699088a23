"""Tensordicts without content: meta and fake tensors come out as such until content is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import tdserve
from tests.sameness import difference

pytestmark = pytest.mark.integration


def example() -> TensorDict:
    return TensorDict({"x": torch.arange(12.0).view(3, 4), "n": {"y": torch.ones(3, dtype=torch.bool)}}, [3])


def with_note() -> TensorDict:
    td = example()
    td["note"] = NonTensorData("note", batch_size=[3])
    return td


def shapes(td: Any) -> dict[Any, Any]:
    return {key: (leaf.shape, leaf.dtype, leaf.device.type) for key, leaf in td.items(True, True)}


@pytest.mark.parametrize("make", [example, with_note])
@pytest.mark.parametrize("how", ["meta", "fake"])
def test_store_when_made_of_structure_then_reads_as_meta_until_it_is_written(
    client: tdserve.Client, name: str, make: Any, how: str
) -> None:
    td = make()
    blank = td.to("meta") if how == "meta" else td.apply(FakeTensorMode().from_tensor)
    version = client.init_remote(blank, name)
    for found in (client.from_remote_init(name), client.load_memmap(name), client[name].to_tensordict()):
        assert shapes(found) == shapes(td.to("meta"))
        assert found.device == torch.device("meta")
        assert list(found.keys()) == list(td.keys())
        assert "note" not in td or found["note"] == "note"
    assert client.from_remote_init(name, device="cpu")["x"].equal(torch.zeros(3, 4))
    assert client.send(td, name) == version + 1
    assert difference(td.to("cpu"), client.from_remote_init(name)) is None


def test_store_when_made_of_structure_under_fake_mode_then_exists(client: tdserve.Client, name: str) -> None:
    with FakeTensorMode():
        client.init_remote(TensorDict({"x": torch.zeros(3, 4)}, [3]), name)
    assert shapes(client.from_remote_init(name)) == {"x": (torch.Size([3, 4]), torch.float32, "meta")}


def test_store_when_made_like_structure_then_is_of_zeros(client: tdserve.Client, name: str) -> None:
    store = client.memmap_like(with_note().to("meta"), name, batch_size=[2])
    assert store.batch_size == (2, 3)
    found = client.from_remote_init(name)
    assert found["x"].equal(torch.zeros(2, 3, 4))
    assert found["note"] == "note"
    store[0] = with_note()
    assert store["x"][0].equal(example()["x"])


def test_store_when_it_exists_then_structure_changes_nothing(client: tdserve.Client, name: str) -> None:
    client.init_remote(example(), name)
    with pytest.raises(tdserve.StoreExistsError):
        client.init_remote(example().to("meta"), name)
    client.init_remote(example().to("meta"), name, exists_ok=True)
    assert difference(example(), client.from_remote_init(name)) is None


def test_replay_when_made_like_structure_then_takes_rows(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, example()[0].to("meta"), 8)
    replay.extend(example())
    assert replay[:]["x"].equal(example()["x"])
    assert replay[:].device == torch.device("cpu")


def test_content_when_it_has_none_then_is_refused_by_name(client: tdserve.Client, name: str) -> None:
    client.init_remote(example(), name)
    blank = example().to("meta")
    for write in (
        lambda: client.send(blank, name),
        lambda: client[name].update_(blank),
        lambda: client.publish(f"{name}-weights", blank),
        lambda: client.recv(blank, name),
    ):
        with pytest.raises(tdserve.NotSupportedError, match="'x'"):
            write()
    with pytest.raises(tdserve.NotSupportedError, match="key 'm'"):
        client.init_remote(example().set("m", torch.zeros(3, device="meta")), f"{name}-mixed")
    assert f"{name}-mixed" not in client
    assert difference(example(), client.from_remote_init(name)) is None
