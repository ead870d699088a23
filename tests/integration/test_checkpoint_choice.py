"""A restore of a checkpoint that was removed or damaged: the error tells, and names the newest that is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError
from tdserve.client.moves.checkpoint_restore import RestoreProgress
from tdserve.client.moves.manifest import Checkpoint

pytestmark = pytest.mark.integration

NUM_ROWS = 400_000
"""Of eight bytes: several blocks."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[tdserve.Client]:
    """That of a server with one store."""
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS]), "big")
        yield client


def change_all(client: tdserve.Client) -> None:
    """Changes every block of the store."""
    client["big"].set_at_("x", client["big"]["x"] + 1, slice(0, NUM_ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_restore_when_its_checkpoint_is_removed_meanwhile_then_refused_with_the_id_of_the_newest(
    client: tdserve.Client, tmp_path: Path, scheme: str
) -> None:
    place, newest = f"{scheme}{tmp_path}/place", list[Checkpoint]()
    removed = client.checkpoint(place)

    def remove(progress: RestoreProgress) -> None:
        if not newest:
            change_all(client)
            newest.append(client.checkpoint(place, keep=1))

    with pytest.raises(InvalidRequestError) as caught:
        client.restore(place, prefix="new-", on_progress=remove)
    assert f"{place} no longer has {removed.id}, which was removed while it was read" in str(caught.value)
    assert f"--checkpoint {newest[0].id}" in str(caught.value)
    assert client.stores() == ["big"]
    assert client.restore(place, prefix="new-") == ["new-big"]
