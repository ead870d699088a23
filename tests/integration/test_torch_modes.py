"""Calls under the modes of torch that change what every operation of a thread does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration


@pytest.fixture(params=["shm", "gloo"])
def fresh(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that has mapped nothing yet, over each transport."""
    with server.client(transport=request.param, timeout_s=20.0) as made:
        yield made


# ------------------------------------------------------------------------------------------ inference mode


def test_store_when_first_read_in_inference_mode_then_others_write_it_as_before(
    fresh: tdserve.Client, name: str
) -> None:
    fresh.init_remote({"a": torch.zeros(5, 3), "none": torch.zeros(5, 0)}, name, batch_size=[5])
    store = fresh[name]
    with torch.inference_mode():
        assert store["a"].sum() == 0
    store.set_at_("a", torch.ones(2, 3), torch.tensor([1, 3]))
    fresh.send(TensorDict({"a": store["a"].expand(5, 3), "none": torch.zeros(5, 0)}, [5]), name)
    with torch.inference_mode():
        store.set_at_("a", torch.full((3,), 2.0), 0)
    assert store["a"].sum(1).tolist() == [6, 3, 0, 3, 0]


def test_version_when_first_mapped_in_inference_mode_then_others_may_change_their_own(
    server: tdserve.Server, name: str
) -> None:
    with server.client(transport="shm", timeout_s=20.0) as client:
        client.publish(name, {"a": torch.zeros(3), "none": torch.zeros(0)})
        with torch.inference_mode():
            found: Any = client.latest(name, copy=False)
        assert not found.data["a"].is_inference()
        assert found.data["a"].add_(1).tolist() == [1, 1, 1]
