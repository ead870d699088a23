from __future__ import annotations

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.moves.checkpoint_restore import take_back


def test_take_back_when_a_restore_has_failed_then_what_it_brought_is_gone_and_its_moves_are_given_up(
    client: tdserve.Client,
) -> None:
    for name in ("one", "two"):
        client.init_remote(TensorDict({"x": torch.zeros(2)}, [2]), name)
    uids = {name: client.describe(name).uid for name in ("one", "two")}
    client.init_remote(TensorDict({"x": torch.zeros(2)}, [2]), "of another")
    take_back(client, {"absent": f"{8:032x}", **uids, "of another": f"{9:032x}"}, {"three": f"{7:032x}"})
    assert {"one", "two", "of another"} & {*client.stores()} == {"of another"}
    client.delete("of another")
