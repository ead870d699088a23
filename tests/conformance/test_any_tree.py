"""Any tree comes out of a store as it went in, over every transport. Writing rows gives what it gives on a local
copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import tdserve
from tests.sameness import assert_same
from tests.tensordict_strategies import tensordicts
from tests.trees import trees, trees_around_stacks

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype"),
]

_numbers = itertools.count()

modest = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(params=["gloo", "gloo, large", "shm"])
def client(
    request: pytest.FixtureRequest, server: tdserve.Server, channels: tdserve.Server
) -> Iterator[tdserve.Client]:
    """A client for content in messages, over the channel, and in shared memory."""
    transport, _, size = request.param.partition(", ")
    with (channels if size else server).client(transport=transport) as connected:
        yield connected


@pytest.mark.slow
@modest
@given(td=trees())
def test_tree_when_of_any_kinds_then_comes_out_as_it_went_in(client: tdserve.Client, td: Any) -> None:
    name = f"tree-{next(_numbers)}"
    client.init_remote(td, name)
    assert_same(client.from_remote_init(name), td)
    client.send(td, name)
    assert_same(client[name].to_tensordict(), td)
    client.delete(name)


@pytest.mark.slow
@modest
@given(td=trees_around_stacks())
def test_tree_when_around_a_stack_of_any_members_then_comes_out_as_it_went_in(client: tdserve.Client, td: Any) -> None:
    name = f"stack-{next(_numbers)}"
    client.init_remote(td, name)
    assert_same(client.from_remote_init(name), td)
    client.send(td, name)
    assert_same(client[name].to_tensordict(), td)
    client.delete(name)


@pytest.mark.slow
@modest
@given(td=tensordicts(is_named=False).filter(lambda td: td.batch_size and td.batch_size[0]), data=st.data())
def test_rows_when_written_in_any_order_then_as_of_a_local_copy(
    client: tdserve.Client, td: Any, data: st.DataObject
) -> None:
    name = f"rows-{next(_numbers)}"
    client.init_remote(td, name)
    handle, order = client[name], list(range(td.batch_size[0]))
    rows = st.integers(0, len(order) - 1)
    for _ in range(3):
        places = data.draw(st.lists(rows, min_size=1, max_size=3, unique=True))
        sources = data.draw(st.lists(rows, min_size=len(places), max_size=len(places)))
        index: Any = data.draw(st.sampled_from([places, torch.tensor(places), places[0]]))
        handle[index] = td[sources[0]] if isinstance(index, int) else td[sources]
        for place, source in zip(places[:1] if isinstance(index, int) else places, sources, strict=False):
            order[place] = source
    # without names: tensordict loses the names of a NonTensorStack when it indexes it;
    # and the local copy is made from rows, since torch cannot write rows of some dtypes
    assert_same(handle[list(range(len(order)))], td[order])
    client.delete(name)
