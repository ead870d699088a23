from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import PeerLostError
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.server.movers.permit_mover import read_values
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.values.value_codec import decode_value
from tdserve.values.value_columns import decode_block
from tests.unit.server.replaying import extending
from tests.unit.server.world import Loop, World


def row(number: int) -> TensorDict:
    """Returns a row with values of its own."""
    return TensorDict({"a": torch.tensor(number), "v": NonTensorData(f"v{number}"), "w": NonTensorData(number)}, [])


@pytest.mark.parametrize("part_elements", [1, 3, 8192])
def test_values_when_read_for_a_client_then_of_the_elements_and_leaves_that_it_means(
    world: World, run: Loop, part_elements: int
) -> None:
    store = run(world.create_replay("r", row(0), 4))
    batch: Any = torch.stack([row(number) for number in range(4)])
    run(world.extends.extend(world.session(), 1, extending(store, batch)))

    def read(paths: list[tuple[str, ...]], elements: list[int]) -> list[list[Any]]:
        asked = np.array(elements, np.int64)
        content = run(read_values(world.worker, store, paths, asked, part_elements=part_elements))
        return [[decode_value(value, key="v") for value in column.values] for column in decode_block(content)]

    assert read([("w",), ("v",)], [3, 1]) == [[3, 1], ["v3", "v1"]]
    assert read([("v",)], [0, 1, 2, 3]) == [["v0", "v1", "v2", "v3"]]
    assert read([("v",)], []) == [[]]


def test_values_when_there_is_no_worker_then_peer_lost(world: World, run: Loop) -> None:
    store = run(world.create_replay("r", row(0), 4))
    absent = DataWorker(
        WorkerArguments(1), WorkerProcesses(), on_session=lambda report: None, on_lost=lambda worker: None
    )

    async def read() -> bytes:
        return await read_values(absent, store, [("v",)], np.arange(4))

    with pytest.raises(PeerLostError):
        run(read())
