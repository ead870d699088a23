"""Reduces (sum, maximum or minimum) what all members have, around a ring, in pieces.

Every rank has a segment that travels around the ring once and is then complete; in a second round it reaches every
rank. So each rank sends about twice the content, whatever the number of ranks, and all get bitwise the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.transport.group_content import CallChannel
from tdserve.transport.group_gloo import GroupWork
from tdserve.transport.stream import MESSAGES_UNDER_WAY

PIECE_BYTES = 4 * 1024 * 1024
"""While one piece is reduced, the next ones are under way."""

Reduction = Callable[[torch.Tensor, torch.Tensor], object]
"""Reduces the second tensor into the first, element by element."""

_BY_NUMPY = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}
_BY_TORCH: dict[str, Reduction] = {
    "sum": lambda target, other: target.add_(other),
    "product": lambda target, other: target.mul_(other),
    "max": lambda target, other: torch.maximum(target, other, out=target),
    "min": lambda target, other: torch.minimum(target, other, out=target),
}


def find_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """Returns the function for an operation of ``reduce_in_ring``; it runs in the calling thread if possible.

    It uses NumPy if NumPy has the dtype: torch spreads a megabyte over all cores, and waits for the busiest of them.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return _BY_TORCH[op]
    by_numpy = _BY_NUMPY[op]
    return lambda target, other: by_numpy(target.numpy(), other.numpy(), out=target.numpy())


def reduce_in_ring(channel: CallChannel, flat: torch.Tensor, op: str) -> None:
    """Reduces a contiguous one-dimensional CPU tensor over all ranks, in place; all ranks pass equal sizes.

    Args:
        channel: The channel of the call.
        flat: The tensor.
        op: ``"sum"``, ``"product"``, ``"max"`` or ``"min"``.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed; the tensor is undefined.
    """
    reduction = find_reduction(op, flat.dtype)
    rank, size = channel.rank, channel.world_size
    if size == 1:
        return
    segments = _split_segments(flat, size)
    own = segments[rank]
    # A segment that is received at one step is sent at the next.
    steps = [segments[(rank - step - 1) % size] for step in range(2 * size - 2)]
    coming = [(piece, step < size - 1) for step, pieces in enumerate(steps) for piece in pieces]
    num_last = len(steps[-1])
    going = [*own, *(piece for piece, _ in coming[: len(coming) - num_last])]
    left, right = (rank - 1) % size, (rank + 1) % size
    posted: deque[tuple[GroupWork, torch.Tensor]] = deque()
    sent: deque[GroupWork] = deque()
    num_posted = num_sent = 0
    for number, (piece, is_reduced) in enumerate(coming):
        while num_posted < len(coming) and num_posted - number < MESSAGES_UNDER_WAY:
            target, is_staged = coming[num_posted]
            buffer = channel.pool.take(target.nbytes) if is_staged else view_bytes(target)
            posted.append((channel.expect(buffer, left), buffer))
            num_posted += 1
        # Pieces of the own segment can be sent from the start, each other piece when it has arrived.
        while num_sent < len(going) and num_sent < min(number + len(own), number + MESSAGES_UNDER_WAY):
            if len(sent) >= MESSAGES_UNDER_WAY:
                channel.wait([sent.popleft()])
            sent.append(channel.post(view_bytes(going[num_sent]), right))
            num_sent += 1
        work, buffer = posted.popleft()
        channel.wait([work])
        if is_reduced:
            reduction(piece, buffer.view(piece.dtype))
    for rest in going[num_sent:]:
        sent.append(channel.post(view_bytes(rest), right))
    channel.wait(sent)


def _split_segments(flat: torch.Tensor, size: int) -> list[list[torch.Tensor]]:
    """Returns the pieces of each rank's segment."""
    step = max(PIECE_BYTES // flat.element_size(), 1)
    bounds = [flat.numel() * number // size for number in range(size + 1)]
    return [
        [
            flat[start : min(start + step, bounds[number + 1])]
            for start in range(bounds[number], bounds[number + 1], step)
        ]
        for number in range(size)
    ]
