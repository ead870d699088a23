"""tdserve/cli/screen/leaf_table.py: a structure as a table and as a tree."""

from __future__ import annotations

import pytest

from tdserve.cli.screen.leaf_table import print_leaves, print_tree
from tdserve.client.session.catalog.structure_leaves import describe_leaves
from tdserve.structure.trees.nodes import Node, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

OBS = TensorLeaf("float32", (10, 84))
NEXT = Node((10,), None, None, None, (("obs", OBS), ("text\x1b[2J", ValueLeaf((10,), per_row=True))))
LEAVES = describe_leaves(Spec(Node((10,), None, None, None, (("next", NEXT), ("a", NEXT), ("done", OBS)))))


def test_leaves_when_printed_then_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_leaves(LEAVES)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["key", "type", "shape", "bytes"]
    assert ["('next',", "'obs')", "float32", "[10,", "84]", "3.28", "KiB"] in shown
    assert ["done", "float32", "[10,", "84]", "3.28", "KiB"] in shown


def test_tree_when_printed_then_each_key_below_its_own_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    print_tree("a\x9bstore", LEAVES)
    assert capsys.readouterr().out.splitlines() == [
        "a\\x9bstore",
        "├── next  tensordict  [10]",
        "│   ├── obs  float32  [10, 84]  3.28 KiB",
        "│   └── text\\x1b[2J  value per row  [10]",
        "├── a  tensordict  [10]",
        "│   ├── obs  float32  [10, 84]  3.28 KiB",
        "│   └── text\\x1b[2J  value per row  [10]",
        "└── done  float32  [10, 84]  3.28 KiB",
    ]
    print_tree("store", LEAVES, has_types=False)
    assert capsys.readouterr().out.splitlines()[:3] == ["store", "├── next", "│   ├── obs"]
