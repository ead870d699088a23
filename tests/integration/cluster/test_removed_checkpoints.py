"""A restore of a cluster whose checkpoint was removed from one server's place, or is damaged there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.client.moves.checkpoint_restore import RestoreProgress
from tests.integration.cluster.names import name_owned_by

pytestmark = pytest.mark.integration

NUM_ROWS = 400_000
"""Of eight bytes: several blocks."""


@pytest.mark.slow
def test_restore_when_one_of_its_checkpoints_goes_then_refused_with_the_id_of_one_that_is_whole_on_all_servers(
    client: tdserve.ClusterClient, tmp_path: Path
) -> None:
    name, place = name_owned_by(1, 3), tmp_path / "place"
    client.memmap(TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS]), name)
    try:
        first, second, third = (client.checkpoint(place) for _ in range(3))
        damaged = [
            place / f"server-{n}" / "checkpoints" / f"{made[n].id}.json" for n, made in ((2, third), (0, second))
        ]
        for manifest in damaged:
            manifest.write_bytes(b"")
        with pytest.raises(CorruptDataError, match=f"{third[2].id}.*--checkpoint {first[0].id}"):
            client.restore(place, names=[name], prefix="new-")
        for manifest in damaged:
            manifest.unlink()

        def remove(progress: RestoreProgress) -> None:
            (place / "server-1" / "checkpoints" / f"{first[1].id}.json").unlink(missing_ok=True)
            for block in place.glob("server-1/blocks/*/*"):
                block.unlink()

        with pytest.raises(InvalidRequestError, match=f"no longer has {first[1].id}.*no other one of all servers"):
            client.restore(place, names=[name], prefix="new-", on_progress=remove)
        assert client.stores("new-") == []
    finally:
        client.delete(name)
