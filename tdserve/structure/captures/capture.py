"""Captures a tensordict: its spec, its tensors and its values; copies nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.structure.captures.adapting import NO_KEYS, adapt
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture_cache import MakeView, Recall
from tdserve.structure.captures.captured import Captured, conform, share_spec
from tdserve.structure.captures.known_structures import KnownStructures
from tdserve.structure.captures.node_capture import NodeReader
from tdserve.structure.tensordicts.module_state import add_extra_state
from tdserve.structure.tensors.tensor_view import view_module, view_tensordict
from tdserve.structure.trees.nodes import Node
from tdserve.structure.trees.tree import Spec

__all__ = ["Captured", "capture", "capture_module", "capture_packed"]

_RECALL = Recall()
_KNOWN = KnownStructures()


def capture(
    td: Any,
    *,
    store: str = "",
    is_destination: bool = False,
    like: Spec | None = None,
    allow_pickle: bool = False,
    is_exact: bool = False,
    takes_structure: bool = False,
    ignores: frozenset[str] = NO_KEYS,
) -> Captured:
    """Captures a tensordict or tensorclass instance.

    Args:
        td: TensorDict (also memory-mapped or locked), TensorDictParams, a PersistentTensorDict (whose tensors are then
            FileTensor), a sub-tensordict or lazy view, a lazy stack, or a tensorclass instance; also a dict as for
            ``read_dict``, unless it is a destination.
        store: Name, for errors.
        is_destination: True refuses what cannot be written: conjugate and negative views, expanded leaves,
            sub-tensordicts, lazy views and files. False resolves conjugate and negative views into copies, because only
            bytes are sent.
        like: A structure, of any number of rows, for which it is captured. Its ragged and packed parts are ragged and
            packed in the result; if ``td`` has them in another form, they are converted. What is to be sent also gets
            the dtypes of this structure where they hold all of its values.
        allow_pickle: Whether non-tensor values of any type are accepted; those of a destination always are.
        is_exact: True also records what is part of a tensordict besides its content: locks, ``requires_grad``,
            parameters and buffers. False ignores all of that.
        takes_structure: Whether ``td`` is taken for its structure: meta and fake tensors are accepted, as meta tensors,
            and the numbers of a dict declare leaves.
        ignores: Keys of the root that are left out where ``like`` does not have them.

    Raises:
        NotSupportedError: There is a sparse, quantized or meta tensor, a tensor subclass without memory of its own, or
            a non-tensor value that cannot be sent; the error names the key. Nothing was changed.
        InvalidSpecError: The tensordict is inconsistent (it was made by an unchecked constructor).
    """
    if isinstance(td, dict) and not is_destination:
        td = read_dict(td, like, store=store, declares=takes_structure)
    if like is not None and like.packed:
        checks = not (allow_pickle or is_destination)
        reader = NodeReader(
            store, is_destination, like.packed, checks=checks, is_exact=is_exact, takes_structure=takes_structure
        )
        if is_destination:
            reader.join_stacks()
        else:
            reader.take_forms(td, like.packed_nodes)
        captured = _read_for(td, like, reader)
        return conform(captured if is_destination else adapt(captured, like, ignores), like)
    checks = not (allow_pickle or is_destination)

    def read() -> Captured:
        reader = NodeReader(store, is_destination, checks=checks, is_exact=is_exact, takes_structure=takes_structure)
        if is_destination and like is not None:
            reader.join_stacks()
        root = reader.capture_node(td, ())
        return Captured(share_spec(root), reader.tensors, reader.values, {})

    captured = (
        read()
        if is_exact or takes_structure
        else _recall_or_read(td, view_tensordict, read, is_destination=is_destination)
    )
    if like is None:
        return captured
    if not is_destination:
        captured = adapt(captured, like, ignores)
    return conform(captured, like) if like.has_ragged or captured.spec.has_ragged else captured


def capture_module(
    module: torch.nn.Module, *, store: str = "", is_destination: bool = False, allow_pickle: bool = False
) -> Captured:
    """Captures the parameters and buffers of a module, as ``capture`` does of ``TensorDict.from_module(module)``.

    Its extra state is captured with them, unless it is a destination.

    Raises:
        NotSupportedError: As raised by ``capture``; or it saves state that cannot be captured.
    """

    def read() -> Captured:
        td = TensorDict.from_module(module)
        return capture(td, store=store, is_destination=is_destination, allow_pickle=allow_pickle)

    if isinstance(module, TensorDictBase):
        return read()
    extended = None if is_destination else add_extra_state(module, store=store)
    if extended is not None:
        return capture(extended, store=store, allow_pickle=allow_pickle)
    return _recall_or_read(module, view_module, read, is_destination=is_destination)


def _recall_or_read(
    source: Any, make_view: MakeView, read: Callable[[], Captured], *, is_destination: bool
) -> Captured:
    """Returns the kept capture of the same tensors, or captures them: by their structure, if it is known."""
    kept, view = _RECALL.find(source, is_destination, make_view=make_view)
    if kept is not None or view is None:
        return kept or read()
    known = _KNOWN.capture(view) if not is_destination or view.is_dense else None
    captured = known or read()
    if known is None:
        _KNOWN.keep(view, captured)
    if _RECALL.has_met(view):
        tensors = {path: leaf.detach() for path, leaf in captured.tensors.items()}
        captured = captured._replace(tensors=tensors, memo={}, is_kept=True)
        _RECALL.keep(view, captured)
    return captured


def capture_as(td: Any, like: Spec) -> Captured:
    """Captures a tensordict that was just built from stored content, for a structure, exactly as it is.

    Raises:
        NotSupportedError, InvalidSpecError: As raised by ``capture``.
    """
    return conform(_read_for(td, like, NodeReader("", False, like.packed, checks=False, is_exact=True)), like)


def _read_for(td: Any, like: Spec, reader: NodeReader) -> Captured:
    is_one = like.root.inner is not None and not like.root.batch_size
    root = reader.capture_node(td, (), () if is_one else None)  # its own dimensions are those of the element
    return Captured(share_spec(root), reader.tensors, reader.values, {})


def capture_packed(
    td: Any, wanted: Node, *, store: str = "", allow_pickle: bool = False, is_exact: bool = True
) -> tuple[Node, Any]:
    """Captures a tensordict as elements that carry their own structure.

    Args:
        td: As in ``capture``.
        wanted: The packed node that it is for; has the first dimensions of its batch, or none if the tensordict is its
            only element.
        store: Name, for errors.
        allow_pickle, is_exact: As in ``capture``.

    Returns:
        The summary of the elements, and the elements as nested lists.

    Raises:
        NotSupportedError, InvalidSpecError: As raised by ``capture``.
    """
    reader = NodeReader(store, False, frozenset({()}), checks=not allow_pickle, is_exact=is_exact)
    reader.take_forms(td, {(): wanted})
    return reader.capture_node(td, (), wanted.batch_size), reader.values[()]
