from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import NotSupportedError, SpecMismatchError, StoreExistsError, WrongStateError
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tensordicts.new_tensordict import NewStore, NewZeros
from tests.processes import wait_for
from tests.sameness import difference

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text"}}, [3])


def test_init_remote_when_a_leaf_cannot_be_stored_then_error_names_it_and_nothing_is_made(
    client: tdserve.Client, name: str
) -> None:
    with pytest.raises(NotSupportedError, match="bad"):
        client.init_remote(TensorDict({"bad": torch.zeros(2, 2).to_sparse()}, [2]), name)
    assert name not in client


def test_init_remote_when_it_exists_with_another_structure_then_refused(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    with pytest.raises((StoreExistsError, SpecMismatchError)):
        client.init_remote(TD.exclude("n"), name, exists_ok=True)
    assert torch.equal(client.load_memmap(name)["a"], TD["a"])


def test_read_when_small_and_again_then_counted_whether_worker_or_control_answered(
    remote_client: tdserve.Client, name: str
) -> None:
    def num_reads() -> int:
        found: int = remote_client.stats()["transports"]["inline"]["transfers_out"]
        return found

    remote_client.init_remote(TD.select("a"), name)
    handle, before = remote_client[name], num_reads()
    for _ in range(20):
        assert torch.equal(handle[1:]["a"], TD["a"][1:])
    wait_for(lambda: num_reads() == before + 20, "the count of all of them")


def test_send_when_to_a_replay_then_refused(client: tdserve.Client, name: str) -> None:
    client.create_replay(name, TD[0], 5)
    with pytest.raises(WrongStateError, match=name):
        client.send(TD, name)


@pytest.mark.slow
def test_getitem_when_of_each_kind_then_its_handle(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    client.create_replay(f"{name}.r", TD[0], 5)
    client.publish(f"{name}.w", TD)
    assert isinstance(client[name], tdserve.StoreHandle)
    assert isinstance(client[f"{name}.r"], tdserve.ReplayHandle)
    with pytest.raises(WrongStateError, match="latest"):
        _ = client[f"{name}.w"]


def test_new_store_when_made_then_nothing_is_on_the_server_before_it_is_filled(
    client: tdserve.Client, name: str
) -> None:
    new = NewStore(client, name, TD, StoreOptions(False, None, None))
    assert name not in client
    assert new.fill(client.make_deadline(None)) == client.describe(name).version
    assert difference(TD, client.load_memmap(name)) is None
    with pytest.raises(StoreExistsError):
        new.fill(client.make_deadline(None))


def test_new_store_when_it_exists_and_may_then_its_content_is_replaced(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    changed = TD.clone()
    changed["a"] += 1
    NewStore(client, name, changed, StoreOptions(True, None, None)).fill(client.make_deadline(None))
    assert difference(changed, client.load_memmap(name)) is None


def test_new_zeros_when_made_then_values_are_those_of_the_example(client: tdserve.Client, name: str) -> None:
    new = NewZeros(client, name, TD, StoreOptions(False, None, None), [2], None)
    assert name not in client
    handle = new.make(client.make_deadline(None))
    assert handle.batch_size == (2, 3)
    assert not handle["a"].any()
    assert handle[1, 2]["n", "t"] == "text"
