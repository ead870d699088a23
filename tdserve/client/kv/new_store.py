"""Creation of keyed stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import check_store_name
from tdserve.client.kv.records import wrap_tensor
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import create_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.rules.kv.keyed_settings import Eviction, KeyedSettings, Like
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.fake_tensors import to_structure_capture
from tdserve.structure.tensors.array_tensors import read_array
from tdserve.v1 import control_pb2


def create_keyed(
    client: SessionClient,
    name: str,
    like: Any,
    *,
    max_bytes: int | None,
    eviction: Eviction,
    ttl_s: float | None,
    exists_ok: bool,
    num_shards: int = 0,
) -> StoreDescription:
    """Creates a keyed store; other arguments and errors as in ``Client.create_kv``.

    Args:
        num_shards: For a part of a shared store: number of all parts.
    """
    if isinstance(like, np.ndarray):
        like = read_array(like, store=name)
    kind: Like = "any" if like is None else "tensor" if isinstance(like, torch.Tensor) else "tensordict"
    if like is not None and kind != "tensor" and not (is_tensor_collection(like) or isinstance(like, dict)):
        reason = f"a {type(like).__name__} is neither a tensordict nor a tensor, nor a dict of arrays nor an array"
        raise InvalidRequestError(argument="like", reason=reason)
    for argument, limit in (("max_bytes", max_bytes), ("ttl_s", ttl_s)):
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit > 0):
            raise InvalidRequestError(
                argument=argument, reason=f"{limit!r} is not a number above 0; None means no limit"
            )
    settings = KeyedSettings(kind, max_bytes or 0, eviction, float(ttl_s or 0.0), num_shards)
    entry = TensorDict({}, []) if like is None else wrap_tensor(like) if kind == "tensor" else like
    captured = to_structure_capture(
        capture(entry, store=check_store_name(name), allow_pickle=client.allow_pickle, takes_structure=True)
    )
    request = StoreOptions(exists_ok, None, None).make_message(name, captured.spec, control_pb2.STORE_KIND_KEYED)
    request.settings = settings.to_json()
    return create_store(client, request, captured.spec)[0]
