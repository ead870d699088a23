from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, SpecMismatchError
from tdserve.client.session.session import Session
from tdserve.client.weights import lru_names, pulls
from tdserve.client.weights.local_versions import map_version
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tests.errors import raises


def test_latest_when_into_a_module_then_filled_in_place(client: tdserve.Client, name: str) -> None:
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    client.publish(name, policy)
    parameters = TensorDict.from_module(other).data
    found = client.latest(name, out=parameters)
    assert found is not None
    assert found.data is parameters
    assert torch.equal(other.weight, policy.weight)


@pytest.mark.parametrize("copy", [True, False])
def test_latest_when_one_leaf_is_changed_in_place_then_backward_through_another_goes_on(
    client: tdserve.Client, name: str, copy: bool
) -> None:
    client.publish(name, TensorDict({"w": torch.ones(3), "v": torch.ones(3), "x": torch.ones(4, 4)}, []))
    found = client.latest(name, copy=copy)
    assert found is not None
    loss: Any = nn.functional.linear(torch.ones(3, requires_grad=True), found.data["w"][None]).sum()
    found.data["v"].add_(1)
    loss.backward()
    assert found.data["w"].tolist() == [1.0] * 3


def test_latest_when_out_does_not_fit_then_refused_and_unchanged(client: tdserve.Client, name: str) -> None:
    client.publish(name, TensorDict({"w": torch.ones(3)}, []))
    out = TensorDict({"w": torch.zeros(4)}, [])
    with raises(SpecMismatchError, store=name):
        client.latest(name, out=out)
    assert not out["w"].any()


def test_latest_when_another_has_asked_without_values_then_they_come_all_the_same(
    server: tdserve.Server, name: str
) -> None:
    with server.client(transport="gloo") as client:
        client.publish(name, TensorDict({"w": torch.ones(3), "text": "hello"}, []))

        def ask(session: Session, request: int, deadline: Deadline) -> bool:
            asked = control_pb2.LatestRequest(store=name, timeout_s=5.0, without_values=True)
            return bool(
                session.send(request, latest=asked).wait(deadline.remaining_s, "a version").done.accepted.values
            )

        assert not client.call(ask, Deadline.after(5.0))
        for _ in range(2):
            found = client.latest(name)
            assert found is not None
            assert (found.data["text"], found.data["w"].tolist()) == ("hello", [1.0] * 3)
        assert not client.call(ask, Deadline.after(5.0))


@pytest.mark.parametrize("is_deleted", [True, False])
def test_latest_when_keys_come_in_another_order_then_as_they_were_published(
    server: tdserve.Server, name: str, is_deleted: bool
) -> None:
    with server.client(transport="gloo") as client, server.client(transport="shm") as local:
        for number, keys in enumerate(("ab", "c", "ba", "ba", "ab")):
            if is_deleted and number:
                client.delete(name)
            local.publish(name, TensorDict({key: torch.ones(2) for key in keys}), keep=1)
            if keys == "c":  # which the readers do not see
                continue
            for reader in (client, local):
                found = reader.latest(name)
                assert found is not None
                assert "".join(found.data.keys()) == keys


def test_latest_when_the_order_of_keys_is_known_then_the_structure_is_not_sent_again(
    server: tdserve.Server, name: str
) -> None:
    with server.client(transport="gloo") as client:
        client.publish(
            name, TensorDict({"b": torch.ones(2), "n": {"y": torch.ones(1), "x": "text"}, "a": torch.ones(2)})
        )
        spec: list[Spec] = []

        def ask(session: Session, request: int, deadline: Deadline) -> bool:
            known: dict[str, Any] = (
                {} if not spec else {"fingerprint": spec[0].fingerprint, "order": codec.compute_order(spec[0])}
            )
            asked = control_pb2.LatestRequest(store=name, timeout_s=5.0, **known)
            accepted = session.send(request, latest=asked).wait(deadline.remaining_s, "a version").done.accepted
            if accepted.HasField("spec"):
                spec[:] = [codec.decode(accepted.spec)]
            return accepted.HasField("spec")

        assert [client.call(ask, Deadline.after(5.0)) for _ in range(2)] == [True, False]


def test_publish_when_the_structure_changes_then_readers_get_the_new_one(client: tdserve.Client, name: str) -> None:
    client.publish(name, TensorDict({"w": torch.ones(3)}, []))
    assert client.latest(name) is not None
    client.publish(name, TensorDict({"v": torch.ones(4)}, []))
    found = client.latest(name)
    assert found is not None
    assert list(found.data.keys()) == ["v"]


def test_latest_when_there_is_none_in_time_then_deadline(client: tdserve.Client, name: str) -> None:
    assert client.latest(name, newer_than=0, timeout_s=0) is None
    with raises(DeadlineExceededError, name=name):
        client.latest(name, timeout_s=0.05)


def test_latest_when_its_version_is_retired_before_it_is_opened_then_the_newest_also_without_waiting(
    local_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(number: int) -> None:
        local_client.publish(name, TensorDict({"w": torch.full((3,), float(number))}, []), keep=1)

    def slowly(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(pulls, "map_version", map_version)
        for number in range(1, 4):
            publish(number)
        return map_version(*arguments, **named)

    publish(0)
    monkeypatch.setattr(pulls, "map_version", slowly)
    found = local_client.latest(name, timeout_s=0)
    assert found is not None
    assert (found.version, found.data["w"].tolist()) == (4, [3.0, 3.0, 3.0])


def test_latest_when_more_stores_come_and_go_than_structures_are_kept_then_each_is_read_all_the_same(
    client: tdserve.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lru_names, "MAX_NAMES", 4)
    for number in range(12):
        client.publish(f"passing-{number}", TensorDict({"w": torch.full((2,), float(number))}, []))
        found = client.latest(f"passing-{number}")
        assert found is not None
        assert found.data["w"].tolist() == [number] * 2
        client.delete(f"passing-{number}")
