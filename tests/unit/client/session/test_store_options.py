from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.session.store_options import StoreOptions
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2

SPEC = capture(TensorDict({"a": torch.zeros(2)}, [])).spec


def test_request_when_made_then_has_every_option() -> None:
    options = StoreOptions(True, 1 << 20, "disk", share_non_tensor=True)
    request = options.make_message("frames", SPEC, control_pb2.STORE_KIND_TENSORDICT)
    assert (request.name, request.kind) == ("frames", control_pb2.STORE_KIND_TENSORDICT)
    assert codec.decode(request.spec) == SPEC
    assert (request.exists_ok, request.share_non_tensor) == (True, True)
    assert (request.max_object_bytes, request.durability) == (1 << 20, "disk")


def test_request_when_nothing_is_given_then_the_server_chooses() -> None:
    request = StoreOptions(False, None, None).make_message("frames", SPEC, control_pb2.STORE_KIND_REPLAY)
    assert (request.exists_ok, request.max_object_bytes, request.durability) == (False, 0, "")


@pytest.mark.parametrize(("max_object_bytes", "durability"), [(-1, None), ("many", None), (None, "forever")])
def test_request_when_an_option_is_wrong_then_refused(max_object_bytes: Any, durability: Any) -> None:
    with pytest.raises(InvalidRequestError):
        StoreOptions(False, max_object_bytes, durability).make_message("x", SPEC, control_pb2.STORE_KIND_REPLAY)
