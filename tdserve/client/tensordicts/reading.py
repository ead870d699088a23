"""Reads of whole tensordict stores."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import WrongStateError
from tdserve.client.content.padding import Pad
from tdserve.client.content.read_content import Content
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.live_stores import with_live_leaves
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.store_kinds import describe_kind


def open_store(client: SessionClient, description: StoreDescription, event: str) -> StoreHandle:
    """Returns the handle of a tensordict store.

    Args:
        event: What is asked of the store, for the error.

    Raises:
        WrongStateError: It is a store of another kind.
    """
    if description.kind == "weights":
        state = f"store {description.name!r} holds weights (latest() pulls them)"
        raise WrongStateError(state=state, event=event)
    if description.kind == "placement":
        state = f"several servers share store {description.name!r} (connect to all of them: connect('a:7707,b:7707'))"
        raise WrongStateError(state=state, event=event)
    if description.kind != "tensordict":
        raise WrongStateError(
            state=f"store {description.name!r} is {describe_kind(description.shown_kind)}", event=event
        )
    return StoreHandle(client, description)


def show_content(client: SessionClient, name: str, content: Content, device: Any, pad: Pad, deadline: Deadline) -> Any:
    """Builds what was read of a store; live if the store shares its non-tensor leaves."""
    td = content.build(device, pad)
    if not content.spec.values:
        return td
    known = client.known_stores.find(name)
    is_same = known is not None and known.spec is content.stored
    if known is not None and is_same and known.shares_non_tensor is False:
        return td
    description = client.catalog.describe_existing(name, deadline)
    if known is not None and is_same:
        client.known_stores.learn(name, known._replace(shares_non_tensor=description.share_non_tensor))
    return with_live_leaves(td, StoreHandle(client, description)) if description.share_non_tensor else td
