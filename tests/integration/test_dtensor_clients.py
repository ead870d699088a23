"""Sharded weights as one client publishes and reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve import dtensor
from tdserve.dtensor import sharded_reads

pytestmark = pytest.mark.integration


@pytest.fixture
def net() -> nn.Linear:
    return nn.Linear(3, 2)


def test_plain_reader_when_version_is_sharded_then_sees_the_index_and_where_to_go(
    client: tdserve.Client, name: str, net: nn.Linear
) -> None:
    assert dtensor.publish(client, name, net, metadata={"step": 1}) == 1
    found = client.latest(name, numpy=False)
    assert found is not None
    assert list(found.data.keys()) == ["tdserve.dtensor"]
    publication = client.versions(f"{name}.part-0")[0].metadata["tdserve.dtensor"]["publication"]
    mark = {"parts": {"0": 1}, "publication": publication}
    assert found.metadata == {"step": 1, "tdserve.dtensor": mark}
    with pytest.raises(
        tdserve.SpecMismatchError, match=r"tdserve\.dtensor\.latest\(client, .*, into=module\) reads it"
    ):
        client.latest(name, into=net)
    with pytest.raises(tdserve.SpecMismatchError, match=r"an out= without it; tdserve\.dtensor\.latest\(client, "):
        client.latest(name, out=TensorDict.from_module(net).data.clone())

    with pytest.raises(tdserve.KeyNotFoundError, match=r"'weight'; .* tdserve\.dtensor\.latest\(client, .* reads it"):
        client.latest(name, select=["weight"])


def test_client_and_metadata_when_of_another_kind_then_refused(
    client: tdserve.Client, name: str, net: nn.Linear
) -> None:
    other: Any = tdserve.aio.AsyncClient(client)
    message = r"client.*give what tdserve\.connect returns.*tdserve\.aio\.dtensor"
    with pytest.raises(tdserve.InvalidRequestError, match=message):
        dtensor.publish(other, name, net)
    with pytest.raises(tdserve.InvalidRequestError, match=message):
        dtensor.latest(other, name, into=net)
    wrong: Any = [1]
    with pytest.raises(tdserve.InvalidRequestError, match="metadata: a list is no dict"):
        dtensor.publish(client, name, net, metadata=wrong)


def test_part_when_read_as_a_version_then_refused_by_key(client: tdserve.Client, name: str, net: nn.Linear) -> None:
    dtensor.publish(client, name, net)
    with pytest.raises(tdserve.SpecMismatchError, match="'bias': expected nothing, since the published version has no"):
        dtensor.latest(client, f"{name}.part-0", into=net)


def test_newer_versions_when_there_are_none_then_none_or_an_error(
    client: tdserve.Client, name: str, net: nn.Linear
) -> None:
    with pytest.raises(tdserve.StoreNotFoundError):
        dtensor.latest(client, name, into=net, timeout_s=0)
    dtensor.publish(client, name, net)
    assert dtensor.latest(client, name, into=net, newer_than=1, timeout_s=0) is None
    with pytest.raises(tdserve.DeadlineExceededError):
        dtensor.latest(client, name, into=net, newer_than=1, timeout_s=0.1)
    with pytest.raises(tdserve.VersionNotFoundError):
        dtensor.version(client, name, 2, into=net)
    client.publish(f"{name}.whole", {"weight": torch.ones(2, 3), "bias": torch.ones(2), "opt": {"lr": 0.5}})
    into = {**dict(net.named_parameters()), "opt": {"lr": 1}}
    assert dtensor.version(client, f"{name}.whole", 1, into=into).version == 1
    assert into["opt"] == {"lr": 0.5}
    assert bool((net.weight == 1).all())
    with pytest.raises(tdserve.VersionNotFoundError):
        dtensor.version(client, f"{name}.whole", 2, into=net)


def test_part_when_it_is_gone_or_another_then_read_raises_until_the_next_version(
    client: tdserve.Client, name: str, net: nn.Linear
) -> None:
    dtensor.publish(client, name, net)
    client.delete(f"{name}.part-0")
    other = nn.Linear(3, 2)
    before = [each.clone() for each in other.parameters()]
    with pytest.raises(tdserve.StoreNotFoundError, match="part-0"):
        dtensor.latest(client, name, into=other, timeout_s=0.2)
    client.publish(f"{name}.part-0", TensorDict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}))
    with pytest.raises(tdserve.VersionNotFoundError, match="does not have version 1 of this publish any more"):
        dtensor.latest(client, name, into=other, timeout_s=0.2)
    assert all(map(torch.equal, other.parameters(), before))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(dtensor.latest, client, name, into=other, timeout_s=60.0)
        assert dtensor.publish(client, name, net) == 2
        found = waiting.result()
    assert found is not None
    assert found.version == 2
    assert all(map(torch.equal, other.parameters(), net.parameters()))


def test_plain_version_when_its_store_is_created_again_amid_the_reads_then_all_is_of_the_new_one(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = tdserve.Client.version, []

    def publish(number: float) -> None:
        client.publish(name, TensorDict({key: torch.full((4,), number) for key in "abc"}), metadata={"life": number})

    def delete_meanwhile(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        if len(reads) == 2:
            client.delete(name)
            publish(2.0)
        return read(*arguments, **options)

    publish(1.0)
    monkeypatch.setattr(sharded_reads, "READ_NBYTES", 1)
    monkeypatch.setattr(sharded_reads, "MAX_READS", 1)
    monkeypatch.setattr(tdserve.Client, "version", delete_meanwhile)
    into = {key: torch.zeros(4) for key in "abc"}
    found = dtensor.latest(client, name, into=into)
    assert found is not None
    assert found.metadata == {"life": 2.0}
    assert {number for value in into.values() for number in value.tolist()} == {2.0}


class Scaled(nn.Linear):
    """Has extra state."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.0}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_content_when_it_cannot_be_published_then_refused_by_key(client: tdserve.Client, name: str) -> None:
    one = torch.ones(1)
    cases: list[tuple[type[Exception], Any, str]] = [
        (tdserve.InvalidRequestError, {"a.b": one, "a": {"b": one}}, "two of its leaves have the name 'a.b'"),
        (tdserve.InvalidRequestError, {"a": {1: one}}, "key 1 below 'a.'"),
        (tdserve.NotSupportedError, {"m": nn.Sequential(Scaled(1, 1))}, r"'m\.0\._extra_state'.*state_dict"),
        (tdserve.NotSupportedError, {"a": torch.eye(2).to_sparse()}, "'a'"),
    ]
    for kind, content, message in cases:
        with pytest.raises(kind, match=message):
            dtensor.publish(client, name, content)
    with pytest.raises(tdserve.InvalidRequestError, match="tdserve's own"):
        dtensor.publish(client, name, {"a": one}, metadata={"tdserve.dtensor": 1})
    assert client.stores(name) == []
    module = nn.Sequential(Scaled(1, 1))
    dtensor.publish(client, name, module.state_dict())
    into = module.state_dict()
    dtensor.latest(client, name, into=into)
    module.load_state_dict(into)
    assert module[0].scale == 2.0
