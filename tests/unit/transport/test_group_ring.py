from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tdserve.transport import group_ring
from tdserve.transport.group_content import CallChannel
from tdserve.transport.group_ring import reduce_in_ring
from tests.unit.transport.group_channels import Channels, open_channels

PIECE = 1024
"""Floats of a piece here."""

SIZES = (0, 1, 2, 5, 3 * PIECE + 17, 100 * PIECE)


def numbers(numel: int) -> torch.Tensor:
    """Returns floats that can be added without rounding."""
    return torch.arange(numel, dtype=torch.float32) % 1000


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_when_added_then_every_rank_has_the_sum(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_ring, "PIECE_BYTES", 4 * PIECE)

    def reduce(channel: CallChannel) -> list[torch.Tensor]:
        flats = [numbers(numel) * (channel.rank + 1) for numel in SIZES]
        for flat in flats:
            reduce_in_ring(channel, flat, "sum")
        return flats

    with open_channels(size) as channels:
        for flats in channels.each(reduce):
            for numel, flat in zip(SIZES, flats, strict=True):
                assert torch.equal(flat, numbers(numel) * sum(range(1, size + 1)))


@pytest.fixture(scope="module")
def three() -> Iterator[Channels]:
    with open_channels(3) as channels:
        yield channels


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("op", ["sum", "product", "max", "min"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_all_reduce_when_of_any_dtype_then_bitwise_the_same_everywhere(
    three: Channels, dtype: torch.dtype, op: str
) -> None:
    if dtype is torch.complex64 and op in ("max", "min"):
        return
    inputs = [torch.randint(0, 5, (1000,), generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]

    def reduce(channel: CallChannel) -> torch.Tensor:
        flat = inputs[channel.rank].clone()
        reduce_in_ring(channel, flat, op)
        return flat

    first, *others = three.each(reduce)
    stacked = torch.stack([each.to(torch.complex128 if dtype.is_complex else torch.float64) for each in inputs])
    name = {"sum": "sum", "product": "prod", "max": "amax", "min": "amin"}[op]
    expected: torch.Tensor = getattr(stacked, name)(0)
    assert torch.equal(first, expected.to(dtype))
    assert all(torch.equal(other, first) for other in others)
