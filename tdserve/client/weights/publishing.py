"""Publishing versions of weights."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import nn

from tdserve.client.calls import SessionClient
from tdserve.client.outgoing import Outgoing, Target
from tdserve.client.session import Session
from tdserve.client.tables.table import check_count
from tdserve.client.writing import write
from tdserve.deadline import Deadline
from tdserve.errors import InvalidRequestError
from tdserve.ids import check_store_name
from tdserve.spec import codec
from tdserve.spec.capture import Captured, capture
from tdserve.spec.sent import converted
from tdserve.spec.torch_types import to_torch
from tdserve.v1 import control_pb2
from tdserve.values import encode_bytes

MAX_COUNT = (1 << 32) - 1
"""Of versions that are kept, and of readers that one passes a version on to: as the message holds it."""


def publish(
    client: SessionClient,
    name: str,
    td: Any,
    *,
    metadata: dict[str, Any] | None,
    keep: int,
    fanout: int = 0,
    dtype: str = "",
    deadline: Deadline,
) -> int:
    """Stores the next version; see ``Client.publish``."""
    check_store_name(name)
    if isinstance(td, dict):
        reason = (
            f"a {type(td).__qualname__} does not say how its names are nested; give the module itself, publish(name, "
            "module), which latest(into=module) takes, or TensorDict(state_dict) for keys such as '0.weight'"
        )
        raise InvalidRequestError(argument="td", reason=reason)
    content = TensorDict.from_module(td) if isinstance(td, nn.Module) else td
    captured = _in_dtype(capture(content, store=name, allow_pickle=client.allow_pickle), dtype)
    spec = captured.spec
    said = encode_bytes(dict(metadata or {}), key="metadata")
    for argument, number in (("keep", keep), ("fanout", fanout)):
        if number != 0:
            check_count(argument, number, high=MAX_COUNT)

    def make_outgoing(session: Session) -> Outgoing:
        return Outgoing(
            [captured], Target(name, spec.fingerprint, is_packed=True, allow_pickle=client.allow_pickle), session
        )

    def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        request = control_pb2.PublishRequest(
            store=name,
            content=outgoing.message,
            keep=keep,
            fanout=fanout,
            timeout_s=deadline.remaining_s,
            metadata=said,
        )
        if session.told_specs.get(spec.fingerprint) != spec:  # its keys may have been in another order
            session.told_specs[spec.fingerprint] = spec
            request.spec.CopyFrom(codec.encode(spec))
        return {"publish": request}

    return write(client, make_outgoing, make_body, deadline=deadline, what=f"a publish of {name!r}").version


def _in_dtype(captured: Captured, dtype: str) -> Captured:
    spec = converted(captured.spec, dtype)
    if spec is captured.spec:
        return captured
    tensors = {path: captured.tensors[path].to(to_torch(leaf.dtype)) for path, leaf in spec.tensors}
    return Captured(spec, tensors, captured.values, {})
