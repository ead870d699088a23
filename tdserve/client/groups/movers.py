"""ClientMovers of agreed content: over the host's connections, or from GPU to GPU with the values over these.

They belong to a group, and to no session as all other movers do.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tdserve.base.deadline import Deadline
from tdserve.client.groups.member_parts import GivenPart, TakenPart, divide_messages
from tdserve.client.groups.reducing import Reducing
from tdserve.messages.content import cut_values
from tdserve.messages.layout import LARGE_LEAF_BYTES
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees.tree import Spec
from tdserve.transport.group_content import CallChannel, recv_content, send_content
from tdserve.transport.group_nccl import NcclGroupChannel
from tdserve.transport.group_ring import reduce_in_ring


class GroupMover(Protocol):
    """The movement of one call's content; every method ends the channel when it fails."""

    def give(self, channel: CallChannel, given: GivenPart, peer: int) -> None:
        """Sends to one rank."""

    def take(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, peer: int) -> None:
        """Receives from one rank."""

    def broadcast_from(self, channel: CallChannel, given: GivenPart) -> None:
        """Sends to all ranks."""

    def broadcast_to(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, src: int) -> None:
        """Receives from the source, or from a rank that passes it on."""

    def reduce(self, channel: CallChannel, reducing: Reducing, op: str) -> None:
        """Reduces over all ranks."""


class HostMover:
    """Mover over the channel; content on a GPU is copied."""

    def give(self, channel: CallChannel, given: GivenPart, peer: int) -> None:
        send_content(channel, given.messages, given.make_source(), [peer])

    def take(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, peer: int) -> None:
        sink = taken.make_sink(spec, values_nbytes, channel.pool)
        recv_content(channel, divide_messages(spec, values_nbytes), sink, peer)

    def broadcast_from(self, channel: CallChannel, given: GivenPart) -> None:
        messages = given.messages
        way = plan_route(channel.rank, channel.rank, channel.world_size, sum(message.nbytes for message in messages))
        send_content(channel, messages, given.make_source(), way.children)

    def broadcast_to(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, src: int) -> None:
        messages = divide_messages(spec, values_nbytes)
        way = plan_route(channel.rank, src, channel.world_size, sum(message.nbytes for message in messages))
        parent = src if way.parent is None else way.parent
        recv_content(channel, messages, taken.make_sink(spec, values_nbytes, channel.pool), parent, way.children)

    def reduce(self, channel: CallChannel, reducing: Reducing, op: str) -> None:
        for flat in reducing.make_flats():
            reduce_in_ring(channel, flat, "sum" if op == "mean" else op)


class DeviceMover:
    """Mover that uses NCCL for tensors and the channel for values.

    Args:
        nccl: NCCL channel of the epoch.
        deadline: Deadline of the call.
    """

    def __init__(self, nccl: NcclGroupChannel, deadline: Deadline) -> None:
        self._nccl = nccl
        self._deadline = deadline

    @property
    def _remaining_s(self) -> float:
        return self._deadline.remaining_s or 0.0

    def give(self, channel: CallChannel, given: GivenPart, peer: int) -> None:
        self._nccl.send(DeviceLeaves(given.tensors).flats, peer, self._remaining_s)
        send_content(channel, cut_values(given.values_nbytes), given.make_values_source(), [peer])

    def take(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, peer: int) -> None:
        leaves = DeviceLeaves(taken.make_tensors(self._nccl.device, spec))
        self._nccl.recv(leaves.flats, peer, self._remaining_s)
        leaves.spread()
        recv_content(channel, cut_values(values_nbytes), taken.make_values_sink(values_nbytes, channel.pool), peer)

    def broadcast_from(self, channel: CallChannel, given: GivenPart) -> None:
        self._nccl.broadcast(DeviceLeaves(given.tensors).flats, channel.rank, self._remaining_s)
        messages = cut_values(given.values_nbytes)
        way = plan_route(channel.rank, channel.rank, channel.world_size, given.values_nbytes)
        send_content(channel, messages, given.make_values_source(), way.children)

    def broadcast_to(self, channel: CallChannel, taken: TakenPart, spec: Spec, values_nbytes: int, src: int) -> None:
        leaves = DeviceLeaves(taken.make_tensors(self._nccl.device, spec))
        self._nccl.broadcast(leaves.flats, src, self._remaining_s)
        leaves.spread()
        way = plan_route(channel.rank, src, channel.world_size, values_nbytes)
        parent = src if way.parent is None else way.parent
        sink = taken.make_values_sink(values_nbytes, channel.pool)
        recv_content(channel, cut_values(values_nbytes), sink, parent, way.children)

    def reduce(self, channel: CallChannel, reducing: Reducing, op: str) -> None:
        self._nccl.all_reduce(reducing.make_flats(), "sum" if op == "mean" else op, self._remaining_s)


class DeviceLeaves:
    """Tensors as flat bytes: the large ones in place, the small ones together.

    Args:
        tensors: On one device, in the order of their layout.

    Attributes:
        flats: One-dimensional, uint8; divided in the same way for equal structures.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._small = [tensor for tensor in tensors if 0 < tensor.nbytes < LARGE_LEAF_BYTES]
        self._large = [tensor for tensor in tensors if tensor.nbytes >= LARGE_LEAF_BYTES]
        self._plain = [view_bytes(tensor.contiguous()) for tensor in self._large]
        self.flats = list(self._plain)
        if self._small:
            self.flats.append(torch.cat([view_bytes(tensor.contiguous()) for tensor in self._small]))

    def spread(self) -> None:
        """Copies the content of the flats back into the tensors."""
        for tensor, plain in zip(self._large, self._plain, strict=True):
            if plain.data_ptr() != tensor.data_ptr():
                tensor.copy_(plain.view(tensor.dtype).view(tensor.shape))
        at = 0
        for tensor in self._small:
            part = self.flats[-1][at : at + tensor.nbytes].clone()  # a clone is aligned, for a view of any dtype
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes


CHAIN_BYTES = 1024 * 1024
"""From this size on the longer way of a chain costs less than sending the content several times."""


class Route(NamedTuple):
    """The place of one rank: the rank it receives from (None at the source), and the ranks it sends to, in order."""

    parent: int | None
    children: tuple[int, ...]


def plan_route(rank: int, src: int, world_size: int, nbytes: int) -> Route:
    """Returns a rank's place in a broadcast of ``nbytes`` bytes from rank ``src``.

    Large content goes along a chain: every rank sends it on once, in pieces, while it still receives, so it takes about
    as long as one transfer, however many ranks there are. Small content goes along a binomial tree, which has fewer
    steps.
    """
    place = (rank - src) % world_size
    parent, children = _plan_chain(place, world_size) if nbytes >= CHAIN_BYTES else _plan_tree(place, world_size)
    return Route(
        None if parent is None else (parent + src) % world_size,
        tuple((child + src) % world_size for child in children),
    )


def _plan_chain(place: int, size: int) -> tuple[int | None, list[int]]:
    return (place - 1 if place else None), ([place + 1] if place + 1 < size else [])


def _plan_tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Returns parent and children in a binomial tree.

    Children are a power of two away that is larger than the place. The nearest is first, because most ranks are below
    it.
    """
    steps = [1 << bit for bit in range(size.bit_length())]
    children = [place + step for step in steps if step > place and place + step < size]
    parent = place - (1 << (place.bit_length() - 1)) if place else None
    return parent, children
