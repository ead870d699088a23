"""Weights: versions that appear whole, are waited for, and are kept a while."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tests.errors import raises
from tests.integration.forked_clients import ForkedClients
from tests.processes import maps_file, wait_for
from tests.sameness import difference

pytestmark = pytest.mark.integration

SMALL, LARGE = 4, 40_000
"""Numbers per leaf: versions that ride in messages, or go over the channel."""

both_sizes = pytest.mark.parametrize("size", [SMALL, LARGE])


def weights(number: float, size: int = SMALL) -> TensorDict:
    """Leaves that all hold the same number: a mixture of two versions would show."""
    number = float(number)
    layers = {f"layer{at}": {"weight": torch.full((size,), number)} for at in range(4)}
    return TensorDict({**layers, "scale": torch.tensor(number)}, [])


def latest(client: tdserve.Client, name: str, **arguments: Any) -> tdserve.Weights:
    """The newest version, which must be there."""
    found = client.latest(name, **arguments)
    assert found is not None
    return found


@both_sizes
def test_publish_when_pulled_then_version_content_and_metadata_are_equal(
    client: tdserve.Client, name: str, size: int
) -> None:
    assert client.publish(name, weights(1, size), metadata={"step": 10, "note": "first"}) == 1
    assert client.publish(name, weights(2, size)) == 2
    found = latest(client, name)
    assert (found.version, found.metadata) == (2, {})
    assert difference(weights(2, size), found.data) is None
    assert client.describe(name).kind == "weights"


@pytest.mark.slow
@both_sizes
def test_latest_when_read_again_then_always_of_this_store_this_version_and_this_dtype(
    client: tdserve.Client, name: str, size: int
) -> None:
    with tdserve.connect(client.address, transport="gloo") as remote:
        for number in (1, 2, 3):
            client.publish(name, weights(number, size))
            for _ in range(3):
                assert difference(weights(number, size), latest(remote, name).data) is None
                assert latest(remote, name, dtype=torch.float64).data["layer0", "weight"].dtype == torch.float64
                assert (
                    difference(weights(max(number - 1, 1), size), remote.version(name, max(number - 1, 1)).data) is None
                )
        client.delete(name)
        client.publish(name, weights(9, size))  # the first version of another store
        assert difference(weights(9, size), latest(remote, name).data) is None


@both_sizes
def test_latest_when_out_is_given_then_it_is_filled_in_place(client: tdserve.Client, name: str, size: int) -> None:
    client.publish(name, weights(3, size))
    out = weights(0, size)
    place = out["layer0", "weight"].data_ptr()
    assert latest(client, name, out=out).data is out
    assert difference(weights(3, size), out) is None
    assert out["layer0", "weight"].data_ptr() == place


def test_latest_when_nothing_is_newer_then_none_at_once_or_deadline(client: tdserve.Client, name: str) -> None:
    assert client.latest(name, newer_than=0, timeout_s=0) is None
    client.publish(name, weights(1))
    assert client.latest(name, newer_than=1, timeout_s=0) is None
    assert latest(client, name, newer_than=0, timeout_s=0).version == 1
    with pytest.raises(tdserve.DeadlineExceededError, match=name):
        client.latest(name, newer_than=1, timeout_s=0.05)


def test_latest_when_it_waits_then_the_next_version_wakes_it(client: tdserve.Client, name: str) -> None:
    def newer(past: int) -> Future[tdserve.Weights | None]:
        return client.run_later(lambda: client.latest(name, newer_than=past, timeout_s=20.0))

    waiting = [newer(0), newer(1)]
    client.publish(name, weights(1))
    client.publish(name, weights(2))
    for later, versions in zip(waiting, [(1, 2), (2,)], strict=True):
        found = later.result(timeout=20.0)
        assert found is not None
        assert found.version in versions
        assert difference(weights(found.version), found.data) is None


def test_latest_when_newer_than_is_below_all_or_the_wait_has_no_end_then_any_version_will_do(
    client: tdserve.Client, name: str
) -> None:
    assert client.latest(name, newer_than=-1, timeout_s=0) is None
    client.publish(name, weights(1))
    assert latest(client, name, newer_than=-1, timeout_s=float("inf")).version == 1
    out = weights(0)
    client.init_remote(weights(2), f"{name}-td")
    assert client.recv(out, f"{name}-td", newer_than=-1, timeout_s=float("inf")) == 1
    client.delete(f"{name}-td")


def test_latest_when_there_is_no_store_then_waits_or_raises_store_not_found(client: tdserve.Client, name: str) -> None:
    with raises(tdserve.StoreNotFoundError, name=name):
        client.latest(name, timeout_s=0)
    with raises(tdserve.DeadlineExceededError, name=name):
        client.latest(name, timeout_s=0.05)


def test_publish_when_more_than_k_then_the_last_k_are_kept_as_safetensors(client: tdserve.Client, name: str) -> None:
    folder = Path(client.stats()["root"]) / "stores" / name / "versions"

    def kept() -> list[int]:
        listed = [each.version for each in client.describe(name).versions]
        assert sorted(int(file.stem) for file in folder.glob("*.safetensors")) == listed
        return listed

    for number in range(1, 6):
        client.publish(name, weights(number))
        assert kept() == [number - 1, number][-number:]
    client.publish(name, weights(6), keep=4)
    client.publish(name, weights(7))
    assert kept() == [4, 5, 6, 7]
    client.publish(name, weights(8), keep=1)
    assert kept() == [8]
    (tensors,) = {float(each.reshape(-1)[0]) for each in safetensors.torch.load_file(folder / "8.safetensors").values()}
    assert tensors == 8.0


@pytest.mark.slow
def test_publish_when_calls_return_early_then_versions_have_their_order(client: tdserve.Client, name: str) -> None:
    for begun in range(0, 60, 4):
        sizes = (LARGE, SMALL, SMALL)  # a small one would overtake a large one
        early = [client.publish(name, weights(begun + at, size), return_early=True) for at, size in enumerate(sizes)]
        last = client.publish(name, weights(begun + 3))
        assert [*(each.result(20.0) for each in early), last] == list(range(begun + 1, begun + 5))
        assert latest(client, name).data["scale"] == begun + 3


@pytest.mark.slow
def test_send_when_calls_return_early_then_the_last_one_counts(client: tdserve.Client, name: str) -> None:
    client.init_remote(weights(0), name)
    for begun in range(1, 60, 4):
        early = [client.send(weights(begun + at), name, return_early=True) for at in range(3)]
        last = client.send(weights(begun + 3), name)
        assert [each.result(20.0) for each in early] == [last - 3, last - 2, last - 1]
        assert client[name]["scale"] == begun + 3


def test_publish_when_structure_changes_then_readers_get_the_new_one(client: tdserve.Client, name: str) -> None:
    client.publish(name, weights(1))
    out = weights(0)
    latest(client, name, out=out)
    other = TensorDict({"w": torch.randn(100, 100), "deep": {"b": torch.arange(3)}, "note": "text"}, [])
    client.publish(name, other)
    assert difference(other, latest(client, name).data) is None
    with pytest.raises(tdserve.SpecMismatchError):
        client.latest(name, out=out)
    assert difference(weights(1), out) is None
    client.publish(name, weights(3))
    assert difference(weights(3), latest(client, name, out=out).data) is None


def test_out_when_of_another_dtype_then_refused_with_the_dtype_to_give(client: tdserve.Client, name: str) -> None:
    client.publish(name, TensorDict({"w": torch.ones(2)}, []))
    out = TensorDict({"w": torch.zeros(2, dtype=torch.float64)}, [])
    expected = r"'w': expected float32\[2\], got float64\[2\] in out=: give a tensor of float32, or read without out="
    with pytest.raises(tdserve.SpecMismatchError, match=expected):
        client.latest(name, out=out)
    assert out["w"].tolist() == [0, 0]


def test_publish_when_module_then_its_parameters_come_back(client: tdserve.Client, name: str) -> None:
    torch.manual_seed(0)
    policy, copy = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    client.publish(name, policy)
    assert client.publish(name, TensorDict.from_module(policy)) == 2
    with latest(client, name).data.to_module(copy):
        assert torch.equal(copy(torch.ones(4)), policy(torch.ones(4)))
    parameters = TensorDict.from_module(copy)
    latest(client, name, out=parameters)
    assert all(torch.equal(*pair) for pair in zip(copy.parameters(), policy.parameters(), strict=True))


@both_sizes
def test_latest_when_a_graph_needs_what_it_overwrites_then_the_graph_is_refused(
    client: tdserve.Client, name: str, size: int
) -> None:
    client.publish(name, TensorDict({"weight": torch.ones(1, size)}))
    client.init_remote(out := TensorDict({"weight": torch.zeros(1, size)}), f"{name}-td")
    module, given = nn.Linear(size, 1, bias=False), torch.ones(size, requires_grad=True)
    for number in range(2):  # the second time, the client knows that nothing has changed
        losses = [module(given).sum(), (given * out["weight"]).sum(), (given * out["weight"]).sum()]
        latest(client, name, into=module)
        latest(client, name, out=out)
        client.recv(out, f"{name}-td")
        assert number or (module.weight == 1).all()
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_publish_when_a_publisher_is_new_then_versions_go_on(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.publish(name, weights(1))
    with server.client() as other:
        assert other.publish(name, weights(2)) == 2
    assert latest(client, name).version == 2


@pytest.mark.slow
@pytest.mark.once("shm")
@both_sizes
def test_latest_when_another_process_publishes_then_every_version_is_whole(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients, name: str, size: int
) -> None:
    publisher = forked_clients.start("publish_versions", server.address, name, size, 50)
    out, seen = weights(0, size), [0]
    try:
        while seen[-1] < 50:
            found = latest(client, name, newer_than=seen[-1], timeout_s=60.0, out=out if len(seen) % 2 else None)
            assert difference(weights(found.version, size), found.data) is None
            assert found.metadata == {"n": found.version}
            seen.append(found.version)
    finally:
        assert publisher.line() == "ended 0"
    assert seen == sorted(set(seen))


def test_store_when_deleted_then_no_process_keeps_the_space_of_its_versions(client: tdserve.Client, name: str) -> None:
    client.publish(name, weights(1, LARGE))
    assert difference(weights(1, LARGE), latest(client, name).data) is None
    stats = client.stats()
    (file,) = Path(stats["root"], "stores", name, "versions").glob("*.safetensors")
    inode = file.stat().st_ino
    pids = [os.getpid(), *(worker["pid"] for worker in stats["workers"])]
    assert any(maps_file(pid, inode) for pid in pids)
    client.delete(name)
    assert not any(maps_file(pid, inode) for pid in pids[1:])
    wait_for(lambda: not maps_file(pids[0], inode), "the end of this process's mapping")


def test_keep_when_it_is_zero_then_the_setting_stays_and_below_it_is_refused(client: tdserve.Client, name: str) -> None:
    client.publish(name, weights(1), keep=3)
    for fill in (2, 3, 4):
        client.publish(name, weights(fill), keep=0)
    assert [each.version for each in client.versions(name)] == [2, 3, 4]
    with pytest.raises(tdserve.InvalidRequestError, match="-1 is not an integer of at least 0"):
        client.publish(name, weights(5), keep=-1)
