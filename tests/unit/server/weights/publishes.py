"""What tests of publishing share: weights that contain their version, and the requests for them."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, content_of


def weights(number: int) -> TensorDict:
    """Returns weights that contain their version."""
    return TensorDict({"w": torch.full((3, 2), float(number)), "b": torch.tensor([number])}, [])


SPEC = capture(weights(0)).spec


def make_request(number: int, **fields: object) -> control_pb2.PublishRequest:
    """Returns a request for which the server needs no structure."""
    content = content_of(weights(number), is_packed=True)
    return control_pb2.PublishRequest(store="w", spec=codec.encode(SPEC), content=content, **fields)  # type: ignore[arg-type]


def publish(world: World, run: Loop, number: int, **fields: object) -> int:
    """Publishes weights; returns the version."""
    return run(world.publishing.publish(world.session(), number, make_request(number, **fields))).version


def latest(world: World, run: Loop, **fields: object) -> control_pb2.Done:
    """Returns the answer to a request for the newest version."""
    request = control_pb2.LatestRequest(store="w", **fields)  # type: ignore[arg-type]
    done = run(world.publishing.send_latest(world.session(), 1, request))
    assert done is not None
    return done


def files(world: World) -> list[Path]:
    """Lists the files of readable versions."""
    return sorted(world.stores.get("w").folder.glob("versions/*.safetensors"))


def check_nothing_left(world: World) -> None:
    """Checks that no trace of a publish is left."""
    assert not world.stores.catalog.is_taken("w")
    assert list((world.root.path / "stores").iterdir()) == []
