from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.client.session.requests.client_mover import ClientMover
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2

SPEC = capture(TensorDict({"a": torch.zeros(3)}, [3])).spec


@pytest.fixture
def mover(remote_client: tdserve.Client) -> ClientMover:
    """The mover of a remote client."""
    return remote_client.session(Deadline.after(20.0)).movers.reads


@pytest.mark.parametrize(
    "take",
    [
        lambda mover: mover.open_claim("x", SPEC, control_pb2.Claim()),
        lambda mover: mover.open_mapped("x", SPEC, control_pb2.Accepted(uid="u")),
        lambda mover: mover.locate("stores/x/versions/1.safetensors", "uid"),
    ],
)
def test_permit_when_content_takes_the_network_then_the_server_is_wrong(
    mover: ClientMover, take: Callable[[ClientMover], object]
) -> None:
    with pytest.raises(RemoteProtocolError):
        take(mover)


def test_mover_when_content_takes_the_network_then_nothing_is_mapped(mover: ClientMover) -> None:
    assert mover.transport == "gloo"
    assert mover.find_known("x", SPEC) is None
    with pytest.raises(NotSupportedError, match="was set to use gloo"):
        mover.check_maps("mapping store 'x'", writable=False)
