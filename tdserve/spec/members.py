"""What is stacked in a packed node, as structures of their own: whether that has to be noted. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tdserve.spec.nodes import Node, Path, TensorLeaf, ValueLeaf, is_marked
from tdserve.spec.tree import Spec


def needs_note(members: Sequence[Node], batch_size: tuple[int, ...], *, is_locked: bool) -> bool:
    """Whether a stack would come back as another if only its elements were known.

    Args:
        members: What is stacked.
        batch_size: Of the elements.
        is_locked: Whether the stack is locked as a whole.
    """
    return 0 in batch_size or not all(_is_told(member, is_locked=is_locked) for member in members)


def num_levels(node: Node) -> int:
    """How deep nodes lie in one another, this one included; what is stacked in one lies in it."""
    below = [num_levels(entry) for _, entry in node.entries if isinstance(entry, Node) and node.inner is None]
    return 1 + max([*below, *map(num_levels, node.members)], default=0)


def shared_values(member: Node) -> Iterator[Path]:
    """Where a member holds one value for all of its elements: where it has none, nothing has it."""
    for path, leaf in Spec(member).values:
        if not leaf.per_row and leaf.batch_size:
            yield path


def _is_told(node: Node, *, is_locked: bool) -> bool:
    """Whether elements of a node that agree tell everything of it."""
    if node.stack_dim is not None or node.inner is not None or node.params is not None:
        return False
    if node.is_locked and not is_locked:
        return False
    return all(
        _is_told(entry, is_locked=is_locked) if isinstance(entry, Node) else _is_leaf_told(entry)
        for _, entry in node.entries
    )


def _is_leaf_told(leaf: TensorLeaf | ValueLeaf) -> bool:
    return not is_marked(leaf) and (isinstance(leaf, TensorLeaf) or not (leaf.per_row or leaf.ragged))
