"""The caller's ``out=`` for entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdserve.base.errors import InvalidRequestError, SpecMismatchError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.handles.key_paths import NO_DEFAULT
from tdserve.client.kv.records import wrap_tensor
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.structure.captures.capture import capture


def check_out(out: Any, keys: str | Sequence[str], default: Any, settings: KeyedSettings, *, store: str) -> None:
    """Raises InvalidRequestError for what cannot be filled with entries, whatever they are, before they are read."""
    if default is not NO_DEFAULT:
        reason = "pass it or out=, not both: there is nothing to fill out= with where an entry is absent"
        raise InvalidRequestError(argument="default", reason=reason)
    if not isinstance(keys, str) and settings.like == "any":
        reason = f"entries of {store!r} may differ, so several cannot fill one tensordict"
        remedy = "fill one key at a time, or pass like= to create_kv()"
        raise InvalidRequestError(argument="out", reason=f"{reason}: {remedy}")
    if not isinstance(out, torch.Tensor) and not is_tensor_collection(out):
        raise InvalidRequestError(argument="out", reason=f"a {type(out).__name__} is no tensordict or tensor")


def fill_out(out: Any, found: Any, *, store: str) -> Any:
    """Copies entries into the caller's place, and returns that.

    Args:
        out: The place.
        found: The tensordict or tensor of the entries.
        store: Name, for errors.

    Raises:
        SpecMismatchError, NotSupportedError: The place does not fit, or cannot be written. Nothing was written.
        InvalidRequestError: The entry is neither.
    """
    is_tensor = isinstance(found, torch.Tensor)
    if not is_tensor and not is_tensor_collection(found):
        reason = f"the entry is a {type(found).__name__}, which no place is filled with; read it without out="
        raise InvalidRequestError(argument="out", reason=reason)
    if is_tensor is not isinstance(out, torch.Tensor):
        expected, actual = ("a tensor" if is_tensor else "a tensordict"), f"a {type(out).__name__} as out="
        raise SpecMismatchError(store=store, key="", expected=expected, actual=actual)
    content = capture(wrap_tensor(found) if is_tensor else found, store=store)
    destination = Destination(wrap_tensor(out) if is_tensor else out, store=store)
    destination.check(content.spec)
    destination.finish(Content(content.spec, content.tensors, content.values, 0), was_direct=False)
    return out
