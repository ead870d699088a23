"""Addresses of clusters: lists, and names of the domain name system."""

from __future__ import annotations

import pytest

from tdserve.base.errors import ConnectError, InvalidRequestError
from tdserve.client.cluster.servers.membership import is_of_cluster, read_membership


@pytest.mark.parametrize(
    ("address", "expected"),
    [("a:1", False), ("[::1]:1", False), ("a:1,b:2", True), ("dns://a:1", True), (None, False)],
)
def test_address_when_it_names_several_servers_then_of_a_cluster(address: object, expected: bool) -> None:
    assert is_of_cluster(address) is expected


def test_list_when_read_then_numbers_servers_in_order() -> None:
    found = read_membership("b:1, a:2,[::1]:3")
    assert [found.find(server) for server in range(found.num_servers)] == ["b:1", "a:2", "[::1]:3"]


def test_pods_when_their_number_is_given_then_named_by_number() -> None:
    found = read_membership("dns://tdserve.default.svc:7707?servers=2")
    assert [found.find(server) for server in range(2)] == [
        "tdserve-0.tdserve.default.svc:7707",
        "tdserve-1.tdserve.default.svc:7707",
    ]
    found = read_membership("dns://tdserve.default.svc:7707?servers=1&pods=shard")
    assert found.find(0) == "shard-0.tdserve.default.svc:7707"


def test_name_when_it_has_no_pods_then_its_addresses() -> None:
    found = read_membership("dns://localhost:7707")
    assert found.num_servers == 1
    assert found.find(0) in {"127.0.0.1:7707", "[::1]:7707"}


@pytest.mark.parametrize(
    "address",
    ["a:1,a:1", "a,b", "dns://a", "dns://a:1?servers=0", "dns://a:1?servers=x", "dns://a:1?more=1", "http://a:1"],
)
def test_address_when_it_is_none_then_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_membership(address)


def test_name_when_it_does_not_resolve_then_no_connection() -> None:
    with pytest.raises(ConnectError):
        read_membership("dns://nobody.invalid:7707")
