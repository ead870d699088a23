"""Content as a read returns it, made without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tdserve.client.content.read_content import Content
from tdserve.client.content.received import Received
from tdserve.client.content.value_blocks import decode_values, encode_values
from tdserve.messages.content import ReadStatus, make_rows_layout
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2


def status(kind: int = ReadStatus.WHOLE, version: int = 0, num_torn: int = 0) -> torch.Tensor:
    """Returns the column that ends every read."""
    return torch.tensor([kind, version, num_torn, 0, 0, 0, 0, 0])


def rows_content(
    td: Any, index: list[int], generation: list[int], added: Mapping[str, torch.Tensor] | None = None
) -> Content:
    """Returns rows of a replay as received, with the columns that its table adds."""
    added = added or {}
    captured = capture(td)
    layout = make_rows_layout(captured.spec, len(index), tuple(added))
    leaves = [captured.tensors[slot.path] for slot in layout.slots[: layout.num_leaves]]
    ending = status(num_torn=sum(number < 0 for number in generation))
    received = Received(layout, [*leaves, torch.tensor(index), torch.tensor(generation), *added.values(), ending])
    spec, values = decode_values(captured.spec, encode_values(captured.spec, captured.values, store=""))
    return Content(spec, received.get_leaves(), values, 0, control_pb2.Accepted(), received)
