"""Stores that are deleted and made anew under their names: no number of the former one is taken for one of the new."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.conftest import FreshServer, example

pytestmark = pytest.mark.integration


def weights(number: int) -> TensorDict:
    return TensorDict({"w": torch.full((4,), float(number))}, [])


def test_subscription_when_the_weights_are_deleted_and_published_anew_then_the_new_ones_come(
    client: tdserve.Client, name: str
) -> None:
    for number in range(3):
        client.publish(name, weights(number))
    with client.subscribe(name, timeout_s=20.0) as subscription:
        assert next(subscription).version == 3
        client.delete(name)
        assert client.publish(name, weights(7)) == 4
        found = next(subscription)
        assert (found.version, float(found.data["w"][0])) == (4, 7.0)


def test_latest_when_a_store_is_made_anew_then_nothing_of_the_former_one_is_merged(
    client: tdserve.Client, name: str
) -> None:
    out = weights(0)
    client.publish(name, weights(1))
    assert client.latest(name, out=out).version == 1  # type: ignore[union-attr]
    for number in range(2, 5):
        client.delete(name)
        assert client.publish(name, weights(number)) == number
        found = client.latest(name, newer_than=number - 1, out=out)
        assert found is not None
        assert found.version == number
        assert out["w"].tolist() == [float(number)] * 4


@pytest.mark.parametrize("num_elements", [4, 100_000])
def test_recv_when_a_store_is_made_anew_then_its_content_is_newer(
    client: tdserve.Client, name: str, num_elements: int
) -> None:
    """Of a store whose content is in the catalog at first, and of one with files."""
    td = TensorDict({"x": torch.zeros(num_elements)}, [])
    client.init_remote(td, name)
    assert client.send(td, name) == 2
    client.delete(name)
    client.init_remote(td + 1, name)
    assert client.describe(name).version == 3
    assert client.recv(td, name, newer_than=2, timeout_s=20.0) == 3
    assert bool((td["x"] == 1).all())
    assert client.send(td, name) == 4


def test_put_when_the_store_was_made_anew_then_conditions_on_the_former_one_do_not_hold(
    client: tdserve.Client, name: str
) -> None:
    former = client.create_kv(name)
    version = former.put("key", 1)
    client.delete(name)
    anew = client.create_kv(name)
    assert anew.put("key", 2) != version
    for handle in (former, anew, client.kv(name)):
        with pytest.raises(tdserve.VersionConflictError):
            handle.put("key", 3, if_version=version)
        with pytest.raises(tdserve.VersionConflictError):
            handle.delete("key", if_version=version)
    assert anew["key"] == 2


def test_rows_when_the_table_was_made_anew_then_generations_of_the_former_one_do_not_hold(
    client: tdserve.Client, name: str
) -> None:
    former = client.create_replay(name, example()[0], 4, sampler=tdserve.Prioritized(alpha=1.0, beta=0.4))
    former.extend(example())
    batch = former.sample(4)
    client.delete(name)
    anew = client.create_replay(name, example()[0], 4, sampler=tdserve.Prioritized(alpha=1.0, beta=0.4))
    anew.extend(example(), priority=torch.ones(4))
    index, generation = batch["index"], batch["generation"]
    for table in (former, anew):
        table.update_priority(batch, torch.full((4,), 9.0))
        assert table.delete(index, generation=generation) == 0
        assert len(table) == 4
        assert table.get_priorities(torch.arange(4)).tolist() == [1.0] * 4


def test_versions_when_the_server_starts_again_then_follow_those_of_deleted_stores(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    first = fresh_server(tmp_path / "root")
    with first.client() as client:
        for number in range(2):
            client.publish("policy", weights(number))
            client.init_remote(weights(number), f"batch-{number}")
        client.delete("policy")
        client.delete("batch-0")
    first.shutdown()
    again = fresh_server(tmp_path / "root")
    with again.client() as client:
        client.init_remote(weights(0), "batch-0")
        client.init_remote(weights(0), "batch-2")
        versions = [client.describe(store).version for store in ("batch-0", "batch-1", "batch-2")]
        assert versions == [2, 1, 1]
        assert client.publish("policy", weights(3)) == 3
