"""The part of a version of weights that a reader asks for: some of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tdserve.client.content.read_content import Content
from tdserve.structure.tree import Path, Spec
from tdserve.structure.version_subset import select_leaves


def find_leaves(spec: Spec, keys: Sequence[Path], *, store: str) -> list[int]:
    """Returns the numbers of the tensor leaves that some keys name, each a leaf or a node with all that is below it.

    Raises:
        KeyNotFoundError: The version has no such key.
    """
    chosen = {path for path, _ in spec.select(keys, store=store).tensors}
    return [number for number, (path, _) in enumerate(spec.tensors) if path in chosen]


def select_sent(spec: Spec, keys: Sequence[Path] | None, *, store: str) -> Spec:
    """Returns the structure of what is sent for some keys: their tensor leaves, and all non-tensor values; errors as of
    ``find_leaves``."""
    return spec if keys is None else select_leaves(spec, find_leaves(spec, keys, store=store))


def drop_others(content: Content, keys: Sequence[Path]) -> Content:
    """Returns the content without the non-tensor values that no key names."""
    spec = content.spec.select(keys)
    values = {path: content.values[path] for path, _ in spec.values}
    return replace(content, spec=spec, values=values)
