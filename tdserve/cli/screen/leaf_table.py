"""A structure on the screen: a table with a row for each key, or on a terminal a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from tdserve.cli.screen.render import escape_unprintable, format_key, format_nbytes, print_table
from tdserve.client.session.catalog.structure_leaves import Leaf
from tdserve.structure.trees.tree import Path

COLUMNS = ("key", "type", "shape", "bytes")


def print_leaves(leaves: Sequence[Leaf]) -> None:
    """Prints a table with a row for each key."""
    print_table(COLUMNS, [make_cells(leaf) for leaf in leaves], right=("bytes",))


def make_cells(leaf: Leaf) -> tuple[str, str, str, str]:
    """Returns the row of a table with ``COLUMNS``."""
    nbytes = "" if leaf.nbytes is None else format_nbytes(leaf.nbytes)
    return format_key(leaf.key), leaf.type, str(list(leaf.shape)), nbytes


def is_on_terminal() -> bool:
    """Returns whether the output goes to a terminal, where structures are shown as trees."""
    return Console().is_terminal


def print_tree(title: str, leaves: Iterable[Leaf], *, has_types: bool = True) -> None:
    """Prints a structure as a tree, in the order of its keys.

    Args:
        title: What stands at the root.
        leaves: All keys that are shown, those of nodes too.
        has_types: Whether type, shape and size follow each key.
    """
    tree = Tree(Text(escape_unprintable(title), style="bold"), guide_style="dim")
    found = {_get_path(leaf): leaf for leaf in leaves}
    branches: dict[Path, Tree] = {(): tree}

    def grow(path: Path) -> Tree:
        if path not in branches:
            label = Text(escape_unprintable(path[-1]))
            if has_types and path in found:
                facts = "  ".join(filter(None, make_cells(found[path])[1:]))
                label.append(f"  {escape_unprintable(facts)}", style="dim")
            branches[path] = grow(path[:-1]).add(label)
        return branches[path]

    for path in found:
        grow(path)
    Console(highlight=False).print(tree, soft_wrap=True)


def _get_path(leaf: Leaf) -> Path:
    return (leaf.key,) if isinstance(leaf.key, str) else leaf.key
