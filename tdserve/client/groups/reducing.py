"""The tensors of a tensordict as a few flat ones to reduce: small leaves of one dtype are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.client.groups.group_errors import name_group
from tdserve.client.groups.member_parts import check_device, compute_fingerprint
from tdserve.messages.layout import LARGE_LEAF_BYTES
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec, check_matches

OPERATIONS = ("sum", "product", "mean", "max", "min")

_REDUCE_OPS = {"sum": "sum", "product": "product", "avg": "mean", "max": "max", "min": "min"}
"""Names of ``torch.distributed.ReduceOp``, which is compared by name since it may be missing."""


def parse_operation(op: Any) -> str:
    """Returns the operation as one of ``OPERATIONS`` if it is one; accepts a ``ReduceOp`` of torch.distributed too."""
    if isinstance(op, str):
        return op
    name = str(getattr(op, "name", "")).lower()
    return _REDUCE_OPS.get(name, str(op))


@dataclass
class _Bucket:
    """Leaves of one dtype, and a tensor of all their elements.

    For a single contiguous leaf that is its own memory, if it shares that with no leaf before it.
    """

    leaves: list[torch.Tensor]
    flat: torch.Tensor


class Reducing:
    """A tensordict in an all_reduce, filled in place.

    Args:
        td: TensorDict or tensorclass instance.
        op: One of ``OPERATIONS``.
        name: Name of the group, for errors.
        device: Where the reduction is done; None: on the CPU.

    Attributes:
        spec: Its structure.
        fingerprint: Fingerprint of the structure.

    Raises:
        InvalidRequestError: There is no such operation.
        NotSupportedError: A leaf cannot be reduced in this way, or not be written; the error names its key.
    """

    def __init__(self, td: Any, op: str, *, name: str, device: torch.device | None = None) -> None:
        if op not in OPERATIONS:
            raise InvalidRequestError(argument="op", reason=f"it must be one of {', '.join(OPERATIONS)}, got {op!r}")
        with name_group(name):
            captured = capture(td, store=name, is_destination=True)
        self.spec = captured.spec
        self._name = name
        self._op = op
        self._device = device or torch.device("cpu")
        self._tensors = captured.tensors
        self._buckets: list[_Bucket] = []
        self.fingerprint = compute_fingerprint(self.spec)
        check_device(captured, device)
        if self.spec.has_ragged:
            raise NotSupportedError(feature="all_reduce of ragged tensors", reason="their sizes may differ by member")
        for path, leaf in self.spec.tensors:
            tensor = captured.tensors[path]
            fault = _explain_fault(tensor, op)
            if fault:
                raise NotSupportedError(feature=f"op={op!r} at key {'.'.join(path)!r}", reason=f"{leaf.dtype} {fault}")

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless it has this structure."""
        with name_group(self._name):
            check_matches(spec, self.spec, store=self._name)

    def make_flats(self) -> list[torch.Tensor]:
        """Returns one-dimensional contiguous tensors, divided in the same way at every member."""
        large: list[list[torch.Tensor]] = []
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for path, leaf in self.spec.tensors:
            tensor = self._tensors[path]
            if leaf.nbytes >= LARGE_LEAF_BYTES:
                large.append([tensor])
            elif leaf.nbytes:
                small.setdefault(tensor.dtype, []).append(tensor)
        divided = [*large, *small.values()]
        # Other members may have no tied leaves, so that each leaf is reduced for itself, from what it was before.
        firsts = iter(find_first_of_memory([leaf for leaves in divided for leaf in leaves]))
        for leaves in divided:
            is_first = [next(firsts) for _ in leaves]
            self._buckets.append(_Bucket(leaves, self._get_flat(leaves, in_place=all(is_first))))
        return [bucket.flat for bucket in self._buckets]

    def finish(self, world_size: int) -> None:
        """Writes the results into the leaves."""
        for bucket in self._buckets:
            if self._op == "mean":
                bucket.flat.div_(world_size)
            at = 0
            for leaf in bucket.leaves:
                part = bucket.flat[at : at + leaf.numel()]
                if part.data_ptr() != leaf.data_ptr():
                    leaf.copy_(part.view(leaf.shape))
                at += leaf.numel()

    def _get_flat(self, leaves: list[torch.Tensor], *, in_place: bool) -> torch.Tensor:
        if in_place and len(leaves) == 1 and leaves[0].is_contiguous() and leaves[0].device == self._device:
            return leaves[0].view(-1)
        return torch.cat([leaf.reshape(-1).to(self._device) for leaf in leaves])


def find_first_of_memory(leaves: list[torch.Tensor]) -> list[bool]:
    """Returns for each leaf whether it is the first of those whose memory is connected: leaves that overlap, and what
    overlaps these. One that overlaps no other is the first."""
    spans = sorted((_find_span(leaf), at) for at, leaf in enumerate(leaves))
    firsts = [True] * len(leaves)
    end, first = (-1, 0), 0
    for (place, start, stop), at in spans:
        if (place, start) < end:
            firsts[max(first, at)] = False
            first = min(first, at)
        else:
            first = at
        end = max(end, (place, stop))
    return firsts


def _find_span(leaf: torch.Tensor) -> tuple[int, int, int]:
    """Returns where the memory of a leaf is: number of its device, -1 for the CPU, first byte and end."""
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    start = leaf.data_ptr()
    return leaf.get_device(), start, start + num_elements * leaf.element_size()


def _explain_fault(tensor: torch.Tensor, op: str) -> str:
    """Returns why a tensor cannot be reduced in this way; "" if it can."""
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return "has no arithmetic; convert it first"
    if tensor.dtype is torch.bool and op in ("sum", "product", "mean"):
        return "has no arithmetic; use op='max' for or, 'min' for and"
    if tensor.is_complex() and op in ("max", "min"):
        return "has no order"
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        return "has no mean; use op='sum'"
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex32):
        return "has no arithmetic in torch; convert it first"
    return ""
