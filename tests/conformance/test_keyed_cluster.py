"""The keyed suites on three servers as one: for stores that lie on one server, and for stores that all three share.

Some promises for several keys only a single server can keep. They are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

import tdserve
from tests.conformance.keyed_life_suite import KeyedLifeSuite
from tests.conformance.suite import Connect

OF_ONE_SERVER: Mapping[str, str] = {
    "test_put_when_columns_of_tensors_and_values_then_each_comes_out_equal": "an early put reads its values later",
    "test_put_when_its_future_is_cancelled_then_it_goes_on_and_so_do_later_ones": "each server counts versions",
    "test_put_when_several_then_a_version_for_each": "each server counts versions",
    "test_put_when_early_then_in_the_order_of_the_calls": "an early put of several keys may be overtaken",
    "test_put_when_max_bytes_is_reached_then_refused": "max_bytes is divided among the servers",
    "test_reads_when_batches_are_put_then_never_see_a_mixture": "a put is atomic on each server",
}
"""Tests that a shared store need not pass, each with what its documentation says instead."""


class TestClusterKeyed(KeyedLifeSuite):
    @pytest.fixture
    def connect(self, cluster_address: str) -> Connect:
        return lambda: tdserve.connect(cluster_address, transport="gloo")


class TestSharedKeyed(KeyedLifeSuite):
    @pytest.fixture
    def connect(self, cluster_address: str, request: pytest.FixtureRequest) -> Connect:
        if (reason := OF_ONE_SERVER.get(request.node.originalname)) is not None:
            pytest.skip(reason)

        def connect() -> tdserve.Client:
            client = tdserve.connect(cluster_address, transport="gloo")
            client.create_kv = partial(client.create_kv, shards="all")  # type: ignore[method-assign]
            return client

        return connect
