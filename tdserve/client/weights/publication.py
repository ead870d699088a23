"""Publishing versions of weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.base.integers import check_integer
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.write import write
from tdserve.client.weights.lru_names import NewestNames
from tdserve.client.weights.module_misfits import make_meta_error
from tdserve.rules.weights import check_metadata
from tdserve.structure.captures.capture import Captured, capture, capture_module
from tdserve.structure.tensordicts.module_state import EXTRA_STATE
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.structure.trees.version_subset import convert_floats
from tdserve.v1 import control_pb2
from tdserve.values.value_codec import encode_value

MAX_COUNT = (1 << 32) - 1
"""Largest ``keep`` and ``fanout`` that the message can hold."""


MAX_KNOWN_SPECS = 16
"""Structures that are sent once per session. The server remembers four times as many."""

MIN_ANNOUNCED_LEAVES = 64
"""Fewer leaves are captured in a tenth of a millisecond."""


class Published:
    """Structures of the last publishes, by which the next one can be announced before it is captured.

    Threads: safe, by the atomicity of dict operations. Keeps no tensordict alive.
    """

    def __init__(self) -> None:
        self._last: NewestNames[tuple[weakref.ReferenceType[Any], str, Spec]] = NewestNames()
        self._changing: NewestNames[bool] = NewestNames()

    def take(self, name: str, td: Any, dtype: str) -> Spec | None:
        """Returns the structure that a tensordict or module had when it was last published, with this name and dtype.

        Returns None if there is little to gain. The structure is forgotten until it is kept again.
        """
        last = self._last.pop(name)
        return last[2] if last is not None and last[0]() is td and last[1] == dtype else None

    def keep(self, name: str, td: Any, dtype: str, spec: Spec, *, announced: Spec | None) -> None:
        """Keeps a structure.

        Keeps nothing for this name after an announcement that was wrong, since that costs a session.
        """
        if announced is not None and announced != spec:
            self._changing.put(name, True)
        if self._changing.get(name) or spec.values or len(spec.tensors) < MIN_ANNOUNCED_LEAVES:
            return
        if announced is None and any(EXTRA_STATE in path for path, _ in spec.tensors):
            return  # its shape may be another at any time
        with suppress(TypeError):  # objects of some classes have no weak references
            self._last.put(name, (weakref.ref(td), dtype, spec))


def publish(
    client: SessionClient,
    name: str,
    td: Any,
    published: Published,
    *,
    metadata: dict[str, Any] | None,
    keep: int,
    fanout: int = 0,
    dtype: str = "",
    deadline: Deadline,
) -> int:
    """Stores the next version; see ``Client.publish``."""
    _check_named(td)
    encoded = _encode_metadata(metadata)
    keep, fanout = (
        check_integer(argument, number, 0, maximum=MAX_COUNT)
        for argument, number in (("keep", keep), ("fanout", fanout))
    )
    settings = control_pb2.PublishRequest(store=name, keep=keep, fanout=fanout, metadata=encoded)
    attempt = _PublishAttempt(client, name, td, dtype, published, settings)
    what = f"a publish of {name!r}"
    version = write(client, attempt.make_outgoing, attempt.make_body, deadline=deadline, what=what).version
    attempt.remember_spec()
    return version


class _PublishAttempt:
    """One publish, including its retries.

    Args:
        settings: The request, without its content.
    """

    def __init__(
        self,
        client: SessionClient,
        name: str,
        td: Any,
        dtype: str,
        published: Published,
        settings: control_pb2.PublishRequest,
    ) -> None:
        self._client = client
        self._name = name
        self._td = td
        self._dtype = dtype
        self._published = published
        self._settings = settings
        self._announced: Spec | None = None
        self._captured: Captured | None = None
        self._unknown: tuple[Session, Spec] | None = None
        self._num_attempts = 0

    def make_outgoing(self, session: Session) -> Outgoing:
        """Prepares the content; only announces it where it was not captured yet, and its structure is likely known.

        Capturing thousands of leaves takes as long as the server takes to prepare for them.
        """
        is_captured = self._captured is not None
        self._announced = None if is_captured else self._published.take(self._name, self._td, self._dtype)
        announced = self._announced
        is_announced = announced is not None and announced.nbytes > session.movers.writes.inline_bytes
        captured = Captured(announced, {}, {}, {}) if announced is not None and is_announced else self._fetch()
        fingerprint = captured.spec.fingerprint
        target = WriteTarget(self._name, fingerprint, is_packed=True, allow_pickle=self._client.allow_pickle)
        return session.movers.writes.prepare([captured], target, fetch=self._fetch if is_announced else None)

    def make_body(self, session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        """Makes the request."""
        self._num_attempts += 1
        spec = outgoing.spec
        request = control_pb2.PublishRequest(content=outgoing.message, timeout_s=deadline.remaining_s)
        request.MergeFrom(self._settings)
        is_known = session.known_specs.get(spec.fingerprint) == spec  # the order of the keys may differ
        self._unknown = None if is_known else (session, spec)
        if not is_known:
            request.spec.CopyFrom(codec.encode(spec))
        return {"publish": request}

    def _fetch(self) -> Captured:
        """Captures the content, once."""
        if self._captured is None:
            take: Callable[..., Captured] = capture_module if isinstance(self._td, nn.Module) else capture
            try:
                captured = take(self._td, store=self._name, allow_pickle=self._client.allow_pickle)
            except NotSupportedError as error:
                is_module = isinstance(self._td, nn.Module) and not isinstance(self._td, TensorDictBase)
                raise (is_module and make_meta_error(self._td, store=self._name, is_published=True)) or error from None
            self._captured = _convert_dtype(captured, self._dtype)
            self._published.keep(self._name, self._td, self._dtype, self._captured.spec, announced=self._announced)
        return self._captured

    def remember_spec(self) -> None:
        """Marks the structure as sent. Call it after the server's answer: a request may have been refused unread.

        Not after a retry: of one that was carried out over a lost session, the server reads but the number.
        """
        if self._unknown is None or self._num_attempts > 1:
            return
        session, spec = self._unknown
        known = {**session.known_specs, spec.fingerprint: spec}  # another thread may be reading the old dict
        session.known_specs = dict(list(known.items())[-MAX_KNOWN_SPECS:])


def _check_named(td: Any) -> None:
    if isinstance(td, dict) and any("." in key and isinstance(td[key], torch.Tensor) for key in td):
        reason = (
            f"{type(td).__qualname__} does not show how its names are nested; give the module itself, publish(name, "
            "module), or TensorDict(state_dict).unflatten_keys('.'), both of which latest(into=module) takes"
        )
        raise InvalidRequestError(argument="td", reason=reason)


def _encode_metadata(metadata: Any) -> bytes:
    try:
        encoded = encode_value(dict(metadata or {}), key="metadata")
    except (TypeError, ValueError) as fault:
        raise InvalidRequestError(argument="metadata", reason=f"a {type(metadata).__name__} is not a dict") from fault
    check_metadata(encoded)
    return encoded


def _convert_dtype(captured: Captured, dtype: str) -> Captured:
    spec = convert_floats(captured.spec, dtype)
    if spec is captured.spec:
        return captured
    tensors = {path: captured.tensors[path].to(to_torch(leaf.dtype)) for path, leaf in spec.tensors}
    return Captured(spec, tensors, captured.values, {})
