"""Rows that hold their own numbers, and extends by them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.tables.extends.extend_parts import ExtendPart
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2


def rows(num_rows: int, first: int = 0) -> TensorDict:
    """Returns rows that hold their own numbers."""
    number = torch.arange(first, first + num_rows)
    return TensorDict({"number": number, "obs": number[:, None].expand(num_rows, 8).float()}, [num_rows])


def part(num_rows: int, **said: Any) -> ExtendPart:
    """Returns an extend by such rows, with these fields of its request."""
    request = control_pb2.ExtendRequest(store="replay", num_rows=num_rows, **said)
    return ExtendPart((capture(rows(num_rows)),), request, Deadline.never, "an extend", AwaitableFuture())
