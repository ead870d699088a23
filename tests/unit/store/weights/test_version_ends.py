from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tdserve.messages.content import read_layout, write_layout
from tdserve.messages.layout import LARGE_LEAF_BYTES
from tdserve.store.weights.version_ends import VersionEnd
from tdserve.store.weights.versions import VersionFile
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.version_subset import select_leaves

LARGE = LARGE_LEAF_BYTES // 4 + 3
TD = TensorDict(
    {
        "a": torch.randint(256, (5,), dtype=torch.uint8),
        "b": torch.rand(LARGE),
        "c": torch.arange(7),
        "d": {"e": torch.rand(3).half(), "f": torch.rand(2_500_000).double(), "g": torch.zeros(0)},
    },
    [],
)
CAPTURED = capture(TD)
SPEC = CAPTURED.spec


class NotedReads:
    """The content of a file, which records what parts of it were read."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self.content = content
        self.parts: list[slice] = []

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        self.parts.append(part)
        return self.content[part]


def file_in(folder: Path) -> VersionFile:
    """Makes a file that is not filled."""
    return VersionFile.create(folder / "1.safetensors", SPEC)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4, 5], [1, 3], [0, 2, 5], []])
def test_end_when_messages_go_in_and_out_then_every_leaf_is_what_it_was(tmp_path: Path, numbers: list[int]) -> None:
    file = file_in(tmp_path)
    whole = write_layout(SPEC, is_packed=True)
    sink, flat = VersionEnd(file.content, SPEC, SPEC, whole), torch.zeros(whole.nbytes, dtype=torch.uint8)
    for slot in whole.slots:
        content = CAPTURED.tensors[slot.path].contiguous().view(-1).view(torch.uint8)
        flat[slot.offset : slot.offset + slot.nbytes] = content
    for message in whole.messages:
        part = flat[message.offset : message.offset + message.nbytes]
        place = sink.find_memory(message)
        if place is None:
            sink.drain(message, part)
        else:
            place.copy_(part)
    assert all(torch.equal(leaf, CAPTURED.tensors[path]) for path, leaf in file.leaves.items())
    sent = select_leaves(SPEC, numbers)
    layout = read_layout(sent, is_packed=True)
    source = VersionEnd(file.content, SPEC, sent, layout, lambda slot: np.full(64, slot, np.uint8))
    found = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    for message in layout.messages:
        place = found[message.offset : message.offset + message.nbytes]
        memory = source.find_memory(message)
        if memory is None:
            source.fill(message, place)
            assert all(not place[start:stop].any() for start, stop in message.gaps)
        else:
            place.copy_(memory)
    for slot in layout.slots[: layout.num_leaves]:
        content = CAPTURED.tensors[slot.path].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(found[slot.offset : slot.offset + slot.nbytes], content), slot.path
    assert found[layout.slots[-1].offset :][:64].eq(layout.num_leaves).all()


def test_end_when_leaves_are_neighbours_in_file_and_message_then_they_move_as_one_piece(tmp_path: Path) -> None:
    many = capture(TensorDict({f"l{number}": torch.rand(100) for number in range(50)}, [])).spec
    file = VersionFile.create(tmp_path / "1.safetensors", many)
    for sent, num_pieces in ((many, 1), (select_leaves(many, [0, 1, 2, 7, 8, 30]), 3)):
        layout = read_layout(sent, is_packed=True)
        content: Any = NotedReads(file.content)
        end = VersionEnd(content, many, sent, layout, lambda slot: np.ones(64, np.uint8))
        (message,) = layout.messages
        end.fill(message, torch.empty(message.nbytes, dtype=torch.uint8))
        assert len(content.parts) == num_pieces


def test_end_when_the_message_lies_in_the_file_as_it_travels_then_its_memory_is_used(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    layout = write_layout(SPEC, is_packed=True)
    end = VersionEnd(file.content, SPEC, SPEC, layout)
    direct = [end.find_memory(message) is not None for message in layout.messages]
    is_large = [layout.slots[message.parts[0].slot].nbytes >= LARGE_LEAF_BYTES for message in layout.messages]
    assert any(is_large)
    assert all(found for found, large in zip(direct, is_large, strict=True) if large)
    many = capture(TensorDict({f"l{number}": torch.rand(100) for number in range(50)}, [])).spec
    file = VersionFile.create(tmp_path / "2.safetensors", many)
    layout = write_layout(many, is_packed=True)
    assert VersionEnd(file.content, many, many, layout).find_memory(layout.messages[0]) is not None
