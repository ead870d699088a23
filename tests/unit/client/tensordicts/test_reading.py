from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import WrongStateError
from tdserve.client.tensordicts.reading import open_store, show_content
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.messages.selection.selection import Selection

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "t": "text"}, [3])


def test_open_store_when_of_another_kind_then_the_error_names_the_kind(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    client.create_replay(f"{name}.r", TD[0], 5)
    client.publish(f"{name}.w", TD)
    assert open_store(client, client.describe(name), "send()").name == name
    for suffix, reason in (("r", r"is a replay"), ("w", r"holds weights")):
        with pytest.raises(WrongStateError, match=reason):
            open_store(client, client.describe(f"{name}.{suffix}"), "send()")


@pytest.mark.parametrize("is_live", [False, True])
def test_show_content_when_values_are_shared_then_they_are_live(
    client: tdserve.Client, name: str, is_live: bool
) -> None:
    client.init_remote(TD, name, share_non_tensor=is_live)
    content = require_content(read_selection(client, name, Selection(), deadline=client.make_deadline(None)))
    td = show_content(client, name, content, None, None, client.make_deadline(None))
    assert torch.equal(td["a"], TD["a"])
    client[name].set_non_tensor("t", "another")
    assert td["t"] == ("another" if is_live else "text")
