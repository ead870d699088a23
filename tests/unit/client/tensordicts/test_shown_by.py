from __future__ import annotations

import gc

import pytest
import torch
from tensordict import TensorDict

from tdserve.client.tensordicts.loading import ShownStores
from tests.memory import count_bytes


def make_td() -> TensorDict:
    """Returns a tensordict that equals every other result of this function."""
    return TensorDict({"x": torch.zeros(2)}, [2])


def test_name_of_when_added_then_known_by_identity() -> None:
    shows, td = ShownStores(), make_td()
    shows.add(td, "a")
    assert (shows.find_name(td), shows.find_name(make_td())) == ("a", None)
    shows.add(td, "b")
    assert shows.find_name(td) == "b"


@pytest.mark.slow
def test_name_of_when_the_tensordict_is_gone_then_nothing_is_kept() -> None:
    shows, kept, sizes = ShownStores(), make_td(), []
    shows.add(kept, "kept")
    for _ in range(5):
        for _ in range(50):
            shows.add(make_td(), "gone")
        gc.collect()
        sizes.append(count_bytes(shows))
    assert max(sizes) == sizes[0]
    assert shows.find_name(kept) == "kept"
    assert shows.find_name(make_td()) is None
