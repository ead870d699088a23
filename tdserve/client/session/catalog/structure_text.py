"""The structure of a store as text, like a tree or like the repr of a tensordict, and as a torchrl Composite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tdserve.base.errors import NotSupportedError
from tdserve.structure.trees.matching import describe
from tdserve.structure.trees.nodes import Entry, Node, TensorKind, TensorLeaf, ValueLeaf

_INDENT = "    "


def format_tree(title: str, root: Node) -> str:
    """Returns a tree with one line for each entry and its type; a key that is no plain word is quoted."""
    return "\n".join([f"{title}: {_describe_entry(root)}", *_format_lines(root, "")])


def format_repr(header: str, root: Node, *, kind: str, device: object) -> str:
    """Returns the text of ``repr(tensordict)`` for a structure.

    Args:
        header: Precedes the fields.
        root: The structure.
        kind: Class name.
        device: Device of the tensordicts that are read; None if they have none.
    """
    return _format_node(root, kind, str(device), header)


def make_composite(root: Node) -> Any:
    """Returns the structure as a torchrl ``Composite``: unbounded tensors, non-tensor values, -1 where rows differ.

    Raises:
        NotSupportedError: torchrl is not installed.
    """
    try:
        import torch  # imported late: a mere description needs neither
        from torchrl.data import Composite, NonTensor, Unbounded
    except ImportError:
        reason = "install torchrl (pip install --no-deps torchrl, if it requires an older tensordict)"
        raise NotSupportedError(feature="a Composite without torchrl", reason=reason) from None

    def make_spec(entry: Entry, device: str | None) -> Any:
        if isinstance(entry, TensorLeaf):
            return Unbounded(shape=entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        if isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype:
            shape = (*entry.batch_size, *entry.ragged.shape)
            return Unbounded(shape=shape, dtype=getattr(torch, entry.ragged.dtype), device=device)
        if isinstance(entry, ValueLeaf):
            return NonTensor(shape=entry.batch_size, device=device)
        entries = {key: make_spec(child, entry.device) for key, child in entry.entries}
        return Composite(entries, shape=entry.shown_batch_size, device=entry.device)

    return make_spec(root, None)


def _format_lines(node: Node, indent: str) -> Iterator[str]:
    for number, (key, entry) in enumerate(node.entries, 1):
        is_last = number == len(node.entries)
        shown = key if key.isidentifier() else repr(key)
        yield f"{indent}{'└─' if is_last else '├─'} {shown}: {_describe_entry(entry)}"
        if isinstance(entry, Node):
            yield from _format_lines(entry, f"{indent}{'   ' if is_last else '│  '}")


def _describe_entry(entry: Entry) -> str:
    words = [describe(entry)]
    if isinstance(entry, TensorLeaf) and entry.kind is not TensorKind.PLAIN:
        words.append(entry.kind.value)
    if isinstance(entry, Node):
        if entry.params is not None:
            words[0] = f"TensorDictParams of {words[0]}"
        if entry.names is not None:
            words.append(f"names {list(entry.names)}")
        if entry.device is not None:
            words.append(f"on {entry.device}")
        if entry.stack_dim is not None or entry.inner is not None:
            words.append("rows may differ" if entry.inner is not None else f"lazy stack along {entry.stack_dim}")
        if entry.is_locked:
            words.append("locked")
    elif entry.requires_grad:
        words.append("requires grad")
    return ", ".join(words)


def _format_node(node: Node, kind: str, device: str, header: str = "") -> str:
    fields = ",\n".join(f"{key}: {_format_entry(entry, device)}" for key, entry in sorted(node.entries))
    lines = [header] if header else []
    lines.append("fields={\n" + (_indent(fields) if fields else "") + "}")
    lines.append(f"batch_size=torch.Size({list(node.shown_batch_size)})")
    lines.append(f"device={device}")
    lines.append("is_shared=False")
    if node.stack_dim is not None and node.stack_dim >= 0:
        lines.append(f"stack_dim={node.stack_dim}")
    return f"{kind}(\n" + _indent(",\n".join(lines)) + ")"


def _format_entry(entry: Entry, device: str) -> str:
    if isinstance(entry, Node):
        is_stack = entry.stack_dim is not None or entry.inner is not None
        plain = "LazyStackedTensorDict" if is_stack else "TensorDict"
        return _format_node(entry, plain if entry.tensorclass is None else entry.tensorclass.rpartition(".")[2], device)
    place = "cpu" if device == "None" else device
    if isinstance(entry, TensorLeaf):
        return _format_tensor(list(entry.shape), place, entry.dtype)
    if entry.ragged is not None and entry.ragged.dtype:
        return _format_tensor([*entry.batch_size, *entry.ragged.shape], place, entry.ragged.dtype)
    return _format_value(entry, device)


def _format_tensor(shape: list[int], device: str, dtype: str) -> str:
    return f"Tensor(shape=torch.Size({shape}), device={device}, dtype=torch.{dtype}, is_shared=False)"


def _format_value(leaf: ValueLeaf, device: str) -> str:
    kind = "NonTensorStack" if leaf.per_row and leaf.batch_size else "NonTensorData"
    return f"{kind}(batch_size=torch.Size({list(leaf.batch_size)}), device={device})"


def _indent(text: str) -> str:
    return "\n".join(_INDENT + line for line in text.split("\n"))
