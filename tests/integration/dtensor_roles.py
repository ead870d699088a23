"""Ranks of process groups that publish DTensors and read them, each in a process of its own.

What a tensor contains follows from its name and a number, so that every process can compare each bit.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tdserve
from tdserve import dtensor
from tdserve.base.config import check_transport

Say = Callable[..., None]

TIMEOUT_S = 60.0
"""Of calls that succeed, and of collectives."""

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "layers.0.weight": ((7, 5), torch.bfloat16),
    "layers.0.bias": ((7,), torch.float32),
    "layers.1.weight": ((3, 4, 2), torch.float64),
    "embedding": ((11, 6), torch.float32),
    "scale": ((), torch.float32),
    "counts": ((1, 3), torch.int64),
}
"""Leaves, some with sizes that no number of ranks divides, or that are smaller than the number of ranks."""


def make_full(name: str, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns the content of a tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    return (torch.randn(tuple(shape), generator=generator) * 1_000).to(dtype)


def make_state(number: int) -> dict[str, torch.Tensor]:
    """Returns whole tensors of all ``SHAPES``."""
    return {name: make_full(name, number, *kind) for name, kind in SHAPES.items()}


def make_group(folder: str, rank: int, size: int) -> None:
    """Makes the default process group, over gloo."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/group-{size}", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))


@contextmanager
def join(folder: str, rank: int, size: int) -> Iterator[None]:
    """Makes the default process group for a block."""
    make_group(folder, rank, size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def place(shape: Sequence[int], placements: Sequence[Placement]) -> list[Placement]:
    """Returns placements for a tensor: replicas of the dimensions that it does not have."""
    return [each if not isinstance(each, Shard) or each.dim < len(shape) else Replicate() for each in placements]


def shard(state: dict[str, torch.Tensor], mesh: DeviceMesh, placements: Sequence[Placement]) -> dict[str, Any]:
    """Returns whole tensors, which are the same in all ranks, as DTensors; torch cuts them without a collective."""
    return {
        name: distribute_tensor(full.clone(), mesh, place(full.shape, placements), src_data_rank=None)
        for name, full in state.items()
    }


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two tensors are equal in every bit; of DTensors, the part that this rank has."""
    mine, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (found, expected))
    flat, other = (each.detach().reshape(-1).view(torch.uint8) for each in (mine, theirs))
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(flat, other)


MESHES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "replicas of rows": ((2, -1), [Replicate(), Shard(0)]),
    "rows and columns": ((2, -1), [Shard(0), Shard(1)]),
    "rows of rows": ((2, -1), [Shard(0), Shard(0)]),
    "replicas": ((-1,), [Replicate()]),
}


@cache
def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Makes a mesh of all ranks; -1 is as many as are left. Each new one takes a tenth of a second."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", tuple(size // max(1, -_product(shape)) if each < 0 else each for each in shape))


def _product(shape: Sequence[int]) -> int:
    found = 1
    for each in shape:
        found *= each
    return found


def publish_all(say: Say, address: str, name: str, *, folder: str, rank: int, size: int, transport: str) -> None:
    """Publishes a version with each of ``MESHES`` that the ranks can form."""
    with join(folder, rank, size), tdserve.connect(address, transport=check_transport(transport)) as client:
        for number, (kind, (shape, placements)) in enumerate(MESHES.items(), 1):
            mesh = make_mesh(shape)
            state: dict[str, Any] = shard(make_state(number), mesh, placements)
            state["plain"] = torch.full((3,), float(number if rank == 0 else -1))
            state["step"] = number * 10
            found = dtensor.publish(client, f"{name}-{number}", state, metadata={"kind": kind, "rank": rank})
            assert found == 1
        say("done", number)


def read_all(
    say: Say, address: str, name: str, *, folder: str, rank: int, size: int, transport: str, is_thorough: bool
) -> None:
    """Reads each version into two of ``MESHES``, or each of them, and into plain tensors."""
    with join(folder, rank, size), tdserve.connect(address, transport=check_transport(transport)) as client:
        kinds = [*MESHES]
        for number, kind in enumerate(kinds, 1):
            others = kinds if is_thorough else [kinds[number % len(kinds)], kinds[(number + 2) % len(kinds)]]
            for shape, placements in map(MESHES.__getitem__, others):
                mesh = make_mesh(shape)
                into: dict[str, Any] = shard(make_state(0), mesh, placements)
                into.update(plain=torch.zeros(3), step=None)
                before = {key: id(item) for key, item in into.items() if key != "step"}
                found = dtensor.latest(client, f"{name}-{number}", into=into)
                assert found is not None
                assert found.data is into
                assert (found.version, found.metadata) == (1, {"kind": kind, "rank": 0})
                assert into["step"] == number * 10
                assert {key: id(item) for key, item in into.items() if key != "step"} == before
                assert torch.equal(into["plain"], torch.full((3,), float(number)))
                for key, expected in shard(make_state(number), mesh, placements).items():
                    assert is_same(into[key], expected), (kind, placements, key)
        say("done", number)


class Net(nn.Module):
    """The module that is trained. It has buffers, and a tied weight if its number of hidden units is odd.

    Args:
        dtype: Dtype of its parameters.
        num_hidden: Its hidden units.
    """

    def __init__(self, dtype: torch.dtype, num_hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, num_hidden, dtype=dtype)
        self.down = nn.Linear(num_hidden, 4, dtype=dtype)
        self.again = nn.Linear(num_hidden, 4, dtype=dtype)
        if num_hidden % 2:
            self.again.weight = self.down.weight  # tensor parallelism of torch unties weights
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("ramp", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        found: torch.Tensor = self.down(hidden) + self.again(hidden)
        return found


def make_net(seed: int, tp: int, dtype: torch.dtype, num_hidden: int) -> Any:
    """Makes a sharded module; with ``tp`` ranks of tensor parallelism, those of FSDP shard what is sharded."""
    torch.manual_seed(seed)
    net = Net(dtype, num_hidden)
    if tp == 1:
        fully_shard(net.up)
        return fully_shard(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "again": RowwiseParallel()}
    return fully_shard(parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])


def gather(net: nn.Module) -> dict[str, torch.Tensor]:
    """Returns whole parameters and buffers, by name."""
    named = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in named.items()
    }


def train(
    say: Say,
    address: str,
    name: str,
    *,
    folder: str,
    rank: int,
    size: int,
    tp: int,
    dtype: str,
    num_hidden: int,
    transport: str,
) -> None:
    """Trains a module, and publishes it and its optimizer; saves what a reader must find."""
    with join(folder, rank, size), tdserve.connect(address, transport=check_transport(transport)) as client:
        net = make_net(7, tp, getattr(torch, dtype), num_hidden)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
        for _ in range(2):
            net(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.mean.fill_(rank + 5)
        expected = gather(net)
        with torch.no_grad():
            output = net(x)  # after which the module has whole parameters
        assert dtensor.publish(client, f"{name}-net", net) == 1
        expected["mean"].fill_(5)
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dtensor.publish(client, f"{name}-trainer", {"model": model_state, "optimizer": optimizer_state})
        if rank == 0:
            torch.save((expected, x, output), f"{folder}/expected")
    say("done")


def load(
    say: Say,
    address: str,
    name: str,
    *,
    folder: str,
    rank: int,
    size: int,
    tp: int,
    dtype: str,
    num_hidden: int,
    transport: str,
) -> None:
    """Reads what ``train`` has published into a module of other shards, and into a plain one."""
    expected, x, output = torch.load(f"{folder}/../train/expected")
    with join(folder, rank, size), tdserve.connect(address, transport=check_transport(transport)) as client:
        net = make_net(8, tp, getattr(torch, dtype), num_hidden)
        parameters = {key: id(each) for key, each in net.named_parameters()}
        with torch.no_grad():
            net(x)
        assert dtensor.latest(client, f"{name}-net", into=net) is not None
        with torch.no_grad():
            found = net(x)
        torch.testing.assert_close(found, output)
        for each in net.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        assert {key: id(each) for key, each in net.named_parameters()} == parameters
        for key, whole in gather(net).items():
            assert is_same(whole, expected[key]), key

        plain = Net(getattr(torch, dtype), num_hidden)
        assert dtensor.latest(client, f"{name}-net", into=plain) is not None
        for key, whole in gather(plain).items():
            assert is_same(whole, expected[key]), key

        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
        model_state, optimizer_state = get_state_dict(net, optimizer)
        into = {"model": model_state, "optimizer": optimizer_state}  # whose values are replaced in these dicts
        assert dtensor.latest(client, f"{name}-trainer", into=into) is not None
        set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert {float(each["step"]) for each in optimizer.state.values()} == {2.0}
        assert all(bool((each["exp_avg_sq"].full_tensor() > 0).any()) for each in optimizer.state.values())
    say("done")


def fail(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes a version, and then several that fail at one rank each; prints the errors."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        mesh = make_mesh((-1,))
        state: dict[str, Any] = shard(make_state(1), mesh, [Shard(0)])
        assert dtensor.publish(client, name, state, keep=1) == 1
        closed = tdserve.connect(address)
        closed.close()
        for _ in range(4):
            try:
                dtensor.publish(closed if rank == 1 else client, name, state)
            except tdserve.TDServeError as error:
                say(type(error).__name__, error)
        bad: dict[str, dict[str, Any]] = {
            "sparse": {**state, "embedding": torch.eye(2).to_sparse()} if rank == 1 else state,
            "partial": {**state, "sums": DTensor.from_local(torch.ones(2), mesh, [Partial()])},
            "shapes": {**state, "scale": distribute_tensor(torch.ones(2 + rank // 2), mesh, [Replicate()])},
            "numbers": {**state, "m": {3: torch.ones(1)}},
        }
        for kind, each in bad.items():
            try:
                dtensor.publish(client, name, each)
            except tdserve.TDServeError as error:
                say(kind, type(error).__name__, error)
        dist.barrier()
        into = {key: torch.zeros_like(full) for key, full in make_state(1).items()}
        found = dtensor.latest(client, name, into=into)
        assert found is not None
        assert found.version == 1
        assert all(is_same(into[key], full) for key, full in make_state(1).items())
        dist.barrier()
        assert dtensor.publish(client, name, shard(make_state(2), mesh, [Shard(0)])) == 2
    say("done")


def publish_numbers(
    say: Say, address: str, name: str, *, folder: str, rank: int, size: int, num_versions: int, keep: int
) -> None:
    """Publishes versions that contain nothing but their number."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        mesh = make_mesh((-1,))
        leaves = {key: distribute_tensor(torch.zeros(5 * size + 1, 300), mesh, [Shard(0)]) for key in "abc"}
        for _ in range(num_versions):
            for leaf in leaves.values():
                leaf.add_(1)
            number = dtensor.publish(client, name, leaves, keep=keep)
        say("done", number)


def publish_untied(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes two leaves that a reader has tied: ones, divided by rows, and twos, which every rank has whole."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        mesh = make_mesh((-1,))
        kinds: dict[str, tuple[float, Placement]] = {"a": (1.0, Shard(0)), "b": (2.0, Replicate())}
        leaves = {key: distribute_tensor(torch.full((4, 2), of), mesh, [kind]) for key, (of, kind) in kinds.items()}
        dtensor.publish(client, name, {"tied": leaves})
    say("done")


def publish_unanswered(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes a version; its index gets no answer. Prints the error."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        leaves = shard({"a": torch.ones(4)}, make_mesh((-1,)), [Shard(0)])
        try:
            dtensor.publish(client, name, leaves, timeout_s=3.0)
        except tdserve.TDServeError as error:
            say(type(error).__name__, error)


def read_plain(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Reads what was published as a whole into shards, and follows it."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        net = make_net(8, 1, torch.bfloat16, 7)
        found = dtensor.latest(client, f"{name}-net", into=net)
        assert found is not None
        assert found.metadata == {"step": 4}
        torch.manual_seed(5)
        whole = Net(torch.bfloat16, 7)
        for key, each in gather(net).items():
            assert is_same(each, {**dict(whole.named_parameters()), **dict(whole.named_buffers())}.get(key, each)), key
        into = shard(make_state(0), make_mesh((-1,)), [Shard(0)])
        assert dtensor.latest(client, f"{name}-flat", into=into) is not None
        for key, expected in shard(make_state(1), make_mesh((-1,)), [Shard(0)]).items():
            assert is_same(into[key], expected)
    say("done")


def die(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes a version; then a rank is killed instead of publishing another."""
    with tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        make_group(folder, rank, size)
        state: dict[str, Any] = shard(make_state(1), make_mesh((-1,)), [Shard(0)])
        say("published", dtensor.publish(client, name, state))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dtensor.publish(client, name, shard(make_state(2), make_mesh((-1,)), [Shard(0)]))
        except RuntimeError:  # of torch, whose group has lost a rank
            say("noticed")
        os._exit(0)  # a group that has lost a rank does not end well
