from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import PeerLostError
from tdserve.client.relays.kept_version import KeptVersion, compute_checksums
from tdserve.messages.content import read_layout
from tdserve.store.weights.version_checksums import DTYPE, compute_leaf_checksum
from tdserve.structure.captures.capture import capture

TD = TensorDict({"b": torch.arange(300_000), "a": torch.tensor([1.5]), "c": torch.arange(7, dtype=torch.uint8)}, [])
SPEC = capture(TD).spec
LAYOUT = read_layout(SPEC, is_packed=True)


def test_wait_when_a_message_is_here_then_returns_and_the_first_part_is_reported_once() -> None:
    counts: list[int] = []
    kept = KeptVersion(
        LAYOUT, torch.empty(LAYOUT.nbytes, dtype=torch.uint8), on_first=lambda: counts.append(kept.num_here)
    )
    waiting = Thread(target=kept.wait, args=(1, 20.0))
    waiting.start()
    kept.add_arrived(1)
    kept.add_arrived(1)
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert (counts, kept.num_here) == ([1], 2)


def test_wait_when_it_does_not_come_then_error() -> None:
    kept = KeptVersion(LAYOUT, torch.empty(0))
    with pytest.raises(PeerLostError, match="message 0"):
        kept.wait(0, 0.01)


def test_wait_when_it_is_dropped_then_error_at_once_also_for_what_was_here() -> None:
    kept = KeptVersion(LAYOUT, torch.empty(0))
    kept.add_arrived(1)
    kept.drop()
    with pytest.raises(PeerLostError):
        kept.wait(0, 60.0)


def test_checksums_when_made_then_in_canonical_order_of_the_leaves() -> None:
    buffer = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    for slot in LAYOUT.slots[: LAYOUT.num_leaves]:
        content = TD[slot.path].contiguous().view(torch.uint8)
        buffer[slot.offset : slot.offset + slot.nbytes] = content
    assert [path for path, _ in SPEC.tensors] == [("a",), ("b",), ("c",)]
    assert [slot.path for slot in LAYOUT.slots[:3]] != [("a",), ("b",), ("c",)]
    expected = [compute_leaf_checksum(TD[path].view(torch.uint8).numpy()) for path, _ in SPEC.tensors]
    assert np.frombuffer(compute_checksums(LAYOUT, buffer, SPEC), DTYPE).tolist() == expected
