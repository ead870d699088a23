from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tdserve.structure.trees.canonical import compute_fingerprint, write_node
from tdserve.structure.trees.nodes import Node, Params, TensorLeaf, ValueLeaf
from tdserve.v1 import spec_pb2

LEAF = TensorLeaf("float32", (3, 2))
INNER = Node((3, 2), None, None, None, (("z", LEAF), ("a", LEAF)))
ROOT = Node((3,), ("t",), "cpu", "m.C", (("n", INNER), ("😀", ValueLeaf((3,), False)), ("\uffff", LEAF), ("", LEAF)))


def reversed_entries(node: Node) -> Node:
    entries = ((key, reversed_entries(entry) if isinstance(entry, Node) else entry) for key, entry in node.entries)
    return node._replace(entries=tuple(reversed(list(entries))))


def test_fingerprint_when_order_of_entries_differs_then_is_the_same() -> None:
    assert reversed_entries(ROOT) != ROOT
    assert compute_fingerprint(reversed_entries(ROOT)) == compute_fingerprint(ROOT)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": (4,)},
        {"names": None},
        {"names": (None,)},
        {"device": None},
        {"tensorclass": "m.D"},
        {"is_locked": True},
        {"params": Params()},
        {"entries": (("n", LEAF._replace(requires_grad=True)), *ROOT.entries[1:])},
        {"entries": ROOT.entries[1:]},
        {"entries": (("n", LEAF), *ROOT.entries[1:])},
        {"entries": (("n", INNER._replace(names=("a", None))), *ROOT.entries[1:])},
    ],
)
def test_fingerprint_when_anything_else_differs_then_differs(change: dict[str, Any]) -> None:
    assert compute_fingerprint(ROOT._replace(**change)) != compute_fingerprint(ROOT)


def test_fingerprint_when_taken_then_follows_the_protocol_book() -> None:
    message = spec_pb2.Spec()
    write_node(ROOT, message.root, is_sorted=True)
    keys = [entry.key for entry in message.root.entries]
    assert keys == sorted(keys, key=lambda key: key.encode())
    assert compute_fingerprint(ROOT) == hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def test_fingerprint_when_computed_by_another_release_then_is_still_this() -> None:
    # stored on disk and compared between peers: a change here is a new format version
    assert compute_fingerprint(Node((2,), None, None, None, (("a", TensorLeaf("float32", (2, 3))),))).hex() == KNOWN


KNOWN = "5693ab1dfdb536575c1e6ba712d7d58dad64f9720d3d94985fc78825265f4c8b"
