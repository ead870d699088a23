"""A structure as the tree that tensordicts show of themselves."""

from __future__ import annotations

from tdserve.spec.nodes import Entry, Node, TensorLeaf, ValueLeaf

_INDENT = "    "


def show_tree(header: str, root: Node, *, kind: str, device: object) -> str:
    """The lines of ``repr(tensordict)`` in full, of a structure.

    Args:
        header: Stands before the fields.
        root: The structure.
        kind: Class to name.
        device: Of what is read: None when tensordicts of it have none.
    """
    return _node(root, kind, str(device), header)


def _node(node: Node, kind: str, device: str, header: str = "") -> str:
    fields = ",\n".join(f"{key}: {_entry(entry, device)}" for key, entry in sorted(node.entries))
    lines = [header] if header else []
    lines.append("fields={\n" + (_indented(fields) if fields else "") + "}")
    lines.append(f"batch_size=torch.Size({list(node.shown_batch_size)})")
    lines.append(f"device={device}")
    lines.append("is_shared=False")
    if node.stack_dim is not None and node.stack_dim >= 0:
        lines.append(f"stack_dim={node.stack_dim}")
    return f"{kind}(\n" + _indented(",\n".join(lines)) + ")"


def _entry(entry: Entry, device: str) -> str:
    if isinstance(entry, Node):
        is_stack = entry.stack_dim is not None or entry.inner is not None
        plain = "LazyStackedTensorDict" if is_stack else "TensorDict"
        return _node(entry, plain if entry.tensorclass is None else entry.tensorclass.rpartition(".")[2], device)
    place = "cpu" if device == "None" else device
    if isinstance(entry, TensorLeaf):
        return _tensor(list(entry.shape), place, entry.dtype)
    if entry.ragged is not None and entry.ragged.dtype:
        return _tensor([*entry.batch_size, *entry.ragged.shape], place, entry.ragged.dtype)
    return _value(entry, device)


def _tensor(shape: list[int], device: str, dtype: str) -> str:
    return f"Tensor(shape=torch.Size({shape}), device={device}, dtype=torch.{dtype}, is_shared=False)"


def _value(leaf: ValueLeaf, device: str) -> str:
    kind = "NonTensorStack" if leaf.per_row and leaf.batch_size else "NonTensorData"
    return f"{kind}(batch_size=torch.Size({list(leaf.batch_size)}), device={device})"


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in text.split("\n"))
