from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.selected_reads import read_selection
from tdserve.deadline import Deadline
from tdserve.errors import DeadlineExceededError
from tdserve.selection import Selection, encode
from tdserve.spec.capture import capture

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3), "t": "text"}, [3])


def test_read_when_the_structure_is_known_then_the_selection_of_it(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    selection = encode(slice(1, None), batch_size=(3,))
    deadline = Deadline.after(20.0)
    for spec in (None, capture(TD).spec):
        content = read_selection(client, name, selection, keys=[("b",)], spec=spec, deadline=deadline)
        assert content is not None
        assert content.build()["b"].tolist() == [1, 2]
        assert content.version == 1


def test_read_when_nothing_newer_comes_then_deadline(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    with pytest.raises(DeadlineExceededError, match="newer than version 1"):
        read_selection(client, name, Selection(), newer_than=1, deadline=Deadline.after(0.05))
