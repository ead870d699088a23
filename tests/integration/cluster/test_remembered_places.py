"""Clients that remember where a store was, and others that have moved it, deleted it or made it anew since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tdserve.base.errors import StoreExistsError
from tests.integration.cluster.losing import rows
from tests.integration.cluster.names import name_owned_by

pytestmark = pytest.mark.integration


@pytest.fixture
def other(address: str) -> Iterator[tdserve.ClusterClient]:
    """Another client of all servers."""
    with tdserve.connect(address) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


@pytest.fixture
def owned() -> str:
    """A name that the first server decides about."""
    return name_owned_by(0, 3)


def test_store_when_made_anew_at_its_owner_then_not_created_again_where_it_was(
    client: tdserve.ClusterClient, other: tdserve.ClusterClient, owned: str
) -> None:
    client.init_remote(rows(3), owned)
    client.rebalance(owned, 2)
    client.describe(owned)
    other.delete(owned)
    other.init_remote(rows(3, 100), owned)
    with pytest.raises(StoreExistsError):
        client.init_remote(rows(3, 200), owned)
    assert client.from_remote_init(owned)["number"].tolist() == [100, 101, 102]
    client.delete(owned)
    assert owned not in other


def test_weights_when_published_anew_at_their_owner_then_both_clients_publish_the_same(
    client: tdserve.ClusterClient, other: tdserve.ClusterClient, owned: str
) -> None:
    client.publish(owned, rows(3))
    client.rebalance(owned, 2)
    client.describe(owned)
    other.delete(owned)
    first = other.publish(owned, rows(3, 100))
    assert client.publish(owned, rows(3, 200)) == first + 1
    latest = other.latest(owned)
    assert latest is not None
    assert latest.data["number"].tolist() == [200, 201, 202]
    other.delete(owned)


def test_weights_when_the_name_was_of_a_shared_store_then_read_and_published(
    client: tdserve.ClusterClient, other: tdserve.ClusterClient, owned: str
) -> None:
    client.create_kv(owned, shards=3)
    other.delete(owned)
    other.publish(owned, rows(3))
    found = client.latest(owned)
    assert found is not None
    assert found.version == 1
    other.delete(owned)
    client.create_kv(owned, shards=3)
    other.delete(owned)
    assert client.publish(owned, rows(3)) == 2
    client.delete(owned)


def test_shared_table_when_made_anew_with_more_shards_then_deleted_whole(
    client: tdserve.ClusterClient, other: tdserve.ClusterClient, owned: str
) -> None:
    client.create_replay(owned, rows(1)[0], 30, shards=2)
    other.delete(owned)
    other.create_replay(owned, rows(1)[0], 30, shards=3)
    client.delete(owned)
    assert not [each for server in range(3) for each in other.list_stores_at(server) if each.startswith(owned)]


def test_shared_table_when_its_name_was_of_a_store_of_one_server_then_deleted(
    client: tdserve.ClusterClient, other: tdserve.ClusterClient, owned: str
) -> None:
    client.init_remote(rows(3), owned)
    client.describe(owned)
    other.delete(owned)
    other.create_replay(owned, rows(1)[0], 30, shards=3)
    client.delete(owned)
    assert owned not in other
