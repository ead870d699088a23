"""Calls that give views, each performed on a store and on a local tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from tests.tensordict_examples import Call


def local_rows() -> TensorDict:
    """Two batch dimensions with tensors and values at two depths; every element has a number of its own."""
    deep = {"b": torch.arange(12).view(4, 3), "t": NonTensorData("deep", batch_size=[4, 3])}
    leaves = {"a": torch.arange(24.0).view(4, 3, 2), "n": deep, "t": "one"}
    return TensorDict(leaves, [4, 3], names=["x", "y"])


CALLS: dict[str, Call] = {
    "select": lambda each: each.select("a"),
    "select nested": lambda each: each.select(("n", "b")),
    "select some": lambda each: each.select("t", ("n", "t")),
    "select nothing": lambda each: each.select(),
    "select unknown": lambda each: each.select("zz"),
    "select unknown, not strict": lambda each: each.select("zz", "a", strict=False),
    "exclude": lambda each: each.exclude("a"),
    "exclude nested": lambda each: each.exclude(("n", "b"), "t"),
    "exclude all of a node": lambda each: each.exclude(("n", "b"), ("n", "t")),
    "exclude all there is": lambda each: each.exclude(("n", "b"), ("n", "t"), "a", "t"),
    "exclude all of a node, view": lambda each: each.exclude(("n", "b"), ("n", "t")).view(-1),
    "exclude unknown": lambda each: each.exclude("zz"),
    "view": lambda each: each.view(-1),
    "view of two": lambda each: each.view(2, 6),
    "view of a size": lambda each: each.view(torch.Size([12])),
    "view, size": lambda each: each.view(size=[12]),
    "view that does not fit": lambda each: each.view(7),
    "reshape": lambda each: each.reshape(3, 4),
    "permute": lambda each: each.permute(1, 0),
    "permute tuple": lambda each: each.permute((1, 0)),
    "permute dims": lambda each: each.permute(dims=(-1, 0)),
    "permute too many": lambda each: each.permute(0, 1, 2),
    "transpose": lambda each: each.transpose(0, -1),
    "swapaxes": lambda each: each.swapaxes(0, 1),
    "swapdims": lambda each: each.swapdims(0, 1),
    "movedim": lambda each: each.movedim(0, 1),
    "moveaxis": lambda each: each.moveaxis(1, 0),
    "squeeze": lambda each: each.squeeze(),
    "unsqueeze": lambda each: each.unsqueeze(0),
    "unsqueeze and squeeze": lambda each: each.unsqueeze(-1).squeeze(-1),
    "flatten": lambda each: each.flatten(),
    "flatten some": lambda each: each.flatten(0, 1),
    "unflatten": lambda each: each.unflatten(0, (2, 2)),
    "expand": lambda each: each.expand(2, 4, 3),
    "expand size": lambda each: each.expand(torch.Size([2, 4, 3])),
    "expand_as": lambda each: each.expand_as(torch.zeros(2, 4, 3)),
    "broadcast_to": lambda each: each.broadcast_to((2, 4, 3)),
    "flatten_keys": lambda each: each.flatten_keys(),
    "flatten_keys, separator": lambda each: each.flatten_keys("_"),
    "flatten and unflatten keys": lambda each: each.flatten_keys(",").unflatten_keys(","),
    "flatten_keys, select": lambda each: each.flatten_keys().select("n.b"),
    "flatten_keys, exclude": lambda each: each.flatten_keys().exclude("n.b"),
    "split": lambda each: each.split(3)[1],
    "split sizes": lambda each: each.split([1, 3])[1],
    "split columns": lambda each: each.split([1, 2], 1)[1],
    "split backwards": lambda each: each.split(2, -1)[1],
    "split, empty part": lambda each: each.split([4, 0])[1],
    "split, wrong sum": lambda each: each.split([1, 1]),
    "split, no such dimension": lambda each: each.split(1, 2),
    "chunk": lambda each: each.chunk(3)[1],
    "chunk columns": lambda each: each.chunk(2, dim=1)[0],
    "tensor_split": lambda each: each.tensor_split(3)[2],
    "tensor_split at": lambda each: each.tensor_split((1, 3))[1],
    "narrow": lambda each: each.narrow(0, 1, 2),
    "narrow columns": lambda each: each.narrow(-1, -2, 2),
    "unbind": lambda each: each.unbind(0)[2],
    "unbind columns": lambda each: each.unbind(-1)[1],
    "unbind, no such dimension": lambda each: each.unbind(2),
    "unbind both": lambda each: each.unbind(1)[1].unbind(0)[2],
    "unbind, split": lambda each: each.unbind(0)[2].split(2)[0],
    "permute, split": lambda each: each.permute(1, 0).split(2)[1],
    "view, split, unsqueeze": lambda each: each.view(-1).split(5)[1].unsqueeze(0),
    "split, permute, unbind": lambda each: each.split(3)[0].permute(1, 0).unbind(1)[2],
    "expand, split": lambda each: each.expand(2, 4, 3).split(1)[1],
    "select, permute, unbind": lambda each: each.select("a").permute(1, 0).unbind(0)[1],
    "keys, view, chunk, select": lambda each: each.flatten_keys().view(-1).chunk(4)[3].select("n.b"),
    "select, select": lambda each: each.select("a", "n").select(("n", "t")),
}

INDICES: dict[str, Any] = {
    "all": ...,
    "int": 0,
    "last": -1,
    "slice": slice(0, 2),
    "step": slice(None, None, 2),
    "list": [0, 0],
    "tensor": torch.tensor([0, -1]),
    "matrix": torch.tensor([[0, -1], [0, 0]]),
    "None": None,
    "two": (0, slice(None)),
    "last dimension": (..., 0),
    "a": "a",
    "n": "n",
    "n, b": ("n", "b"),
    "n, t": ("n", "t"),
    "t": "t",
    "n.b": "n.b",
    "missing": "zz",
}
