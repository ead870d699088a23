"""Shared by tests of moves: rows that show whether they are whole, and the steps of a move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.moves.move_steps import request_step
from tdserve.v1 import control_pb2

ROW = TensorDict({"number": torch.tensor(0), "body": torch.zeros(5)}, [])


def make_rows(first: int, num_rows: int) -> TensorDict:
    """Returns rows with numbers from ``first`` on."""
    number = torch.arange(first, first + num_rows)
    return TensorDict({"number": number, "body": number[:, None].expand(-1, 5).float()}, [num_rows])


def choose_other(client: tdserve.ClusterClient, name: str) -> int:
    """Returns a server that does not have a store."""
    return (client.find_server(name) + 1) % len(client.members)


def list_files(client: tdserve.ClusterClient, name: str) -> tuple[Callable[..., Any], str]:
    """Returns a call that takes a step at the source, and the incarnation of the store."""
    at_source = partial(request_step, client.members.get(client.find_server(name)), name)
    return at_source, at_source(list_files=True).uid


def release_only(mover: tdserve.ClusterClient, name: str, target: int, *, move: str) -> None:
    """Takes all steps of a move but the last."""
    at_source, uid = complete_only(mover, name, target, move=move)
    at_source(uid=uid, move=move, release=target)


def complete_only(mover: tdserve.ClusterClient, name: str, target: int, *, move: str) -> tuple[Callable[..., Any], str]:
    """Takes all steps of a move but the last two; returns the results of ``list_files``."""
    at_source, uid = list_files(mover, name)
    at_target = partial(request_step, mover.members.get(target), name, move=move)
    sealed = at_source(uid=uid, move=move, seal=True)
    at_target(receive=sealed.files)
    for path, nbytes in zip(sealed.files.paths, sealed.files.nbytes, strict=True):
        block = control_pb2.FileBlock(path=path, nbytes=nbytes)
        (found,) = at_source(uid=uid, read=control_pb2.FileBlocks(blocks=[block])).blocks.blocks
        written = control_pb2.FileBlock(path=path, content=found.content)
        at_target(write=control_pb2.FileBlocks(blocks=[written]))
    at_target(complete=sealed.store)
    return at_source, uid
