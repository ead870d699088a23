"""What is stacked in a packed node, as structures of their own: whether that has to be noted. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tdserve.structure.matching import fits
from tdserve.structure.nodes import Entry, Form, Node, Path, TensorLeaf, ValueLeaf, is_marked
from tdserve.structure.tree import Spec


def needs_note(members: Sequence[Node], batch_size: tuple[int, ...], *, is_locked: bool) -> bool:
    """Whether a stack would come back as another if only its elements were known.

    Args:
        members: What is stacked.
        batch_size: Of the elements.
        is_locked: Whether the stack is locked as a whole.
    """
    return 0 in batch_size or not all(_is_told(member, is_locked=is_locked) for member in members)


def is_alike(known: Node, actual: Node) -> bool:
    """Whether a member that was taken apart for a structure has it, in everything but devices and names.

    Of what is packed in there its elements tell the rest.
    """
    is_outside_alike = (
        known.batch_size == actual.batch_size
        and known.tensorclass == actual.tensorclass
        and known.stack_dim == actual.stack_dim
        and known.is_locked == actual.is_locked
        and known.params == actual.params
        and (known.inner is None) is (actual.inner is None)
    )
    if not is_outside_alike or known.inner is not None:
        return is_outside_alike and len(known.shown_batch_size) == len(actual.shown_batch_size)
    mine, theirs = dict(known.entries), dict(actual.entries)
    return mine.keys() == theirs.keys() and all(_is_entry_alike(entry, theirs[key]) for key, entry in mine.items())


def num_levels(node: Node) -> int:
    """How deep nodes lie in one another, this one included; what is stacked in one lies in it."""
    below = [num_levels(entry) for _, entry in node.entries if isinstance(entry, Node) and node.inner is None]
    return 1 + max([*below, *map(num_levels, node.members)], default=0)


def shared_values(member: Node) -> Iterator[Path]:
    """Where a member holds one value for all of its elements: where it has none, nothing has it."""
    for path, leaf in Spec(member).values:
        if not leaf.per_row and leaf.batch_size:
            yield path


def _is_entry_alike(known: Entry, actual: Entry) -> bool:
    if isinstance(known, Node) or isinstance(actual, Node):
        return isinstance(known, Node) and isinstance(actual, Node) and is_alike(known, actual)
    if isinstance(known, TensorLeaf) or isinstance(actual, TensorLeaf):
        return known == actual or _is_even(known, actual)
    if known.ragged is None or actual.ragged is None:
        is_spread_alike = known.per_row == actual.per_row or not known.batch_size
        return fits(known, actual) and is_spread_alike
    is_form_alike = known.ragged[::3] == actual.ragged[::3]
    return fits(known, actual) and is_form_alike and known.requires_grad == actual.requires_grad


def _is_even(known: TensorLeaf | ValueLeaf, actual: TensorLeaf | ValueLeaf) -> bool:
    """Whether rows of a lazy stack have one size, where they may differ."""
    if not isinstance(known, ValueLeaf) or not isinstance(actual, TensorLeaf) or known.ragged is None:
        return False
    even = ValueLeaf(known.batch_size, True, known.ragged._replace(shape=actual.shape[len(known.batch_size) :]))
    return known.ragged.form is Form.STACK and known.ragged.dtype == actual.dtype and fits(known, even)


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
