"""The part of a version of weights that a reader asks for: some of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tdserve.base.errors import KeyNotFoundError
from tdserve.client.content.read_content import on_cpu
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.weights.module_misfits import SHARDED, suggest_dtensor
from tdserve.structure.trees.tree import Path, Spec
from tdserve.structure.trees.version_subset import select_leaves


class VersionPart(NamedTuple):
    """What a reader gets of a version.

    Attributes:
        wanted: Structure that it asks for.
        sent: Structure of what comes: the same, with all non-tensor values of the version if one of them is wanted.
    """

    wanted: Spec
    sent: Spec

    def decode_values(self, content: bytes, *, allow_pickle: bool) -> tuple[Spec, dict[Path, Any]]:
        """Decodes the values that came; returns those that are wanted, and the structure that fits them; errors as in
        ``decode_values`` of ``value_blocks``."""
        spec, values = decode_values(on_cpu(self.sent), content, allow_pickle=allow_pickle)
        if self.sent is self.wanted:
            return spec, values
        return spec.select(self.wanted.leaf_paths), {path: values[path] for path, _ in self.wanted.values}


def choose_part(spec: Spec, keys: Sequence[Path] | None, *, store: str) -> VersionPart:
    """Returns the part of a version that some keys name, each a leaf or a node with all that is below it.

    Args:
        spec: Structure of the version.
        keys: None: all of it.

    Raises:
        KeyNotFoundError: The version has no such key.
    """
    if keys is None:
        return VersionPart(spec, spec)
    try:
        wanted = spec.select(keys, store=store)
    except KeyNotFoundError as error:
        if (SHARDED, "index") not in spec.values_by_path:
            raise
        remedy = f"a sharded trainer has published it, and {suggest_dtensor(store)}"
        raise error.with_fields(listing=f"{remedy}; client.keys({store!r})") from None
    return VersionPart(wanted, select_leaves(spec, number_leaves(spec, wanted)) if wanted.values else wanted)


def number_leaves(spec: Spec, wanted: Spec) -> list[int]:
    """Returns the numbers of the tensor leaves of a part."""
    chosen = {path for path, _ in wanted.tensors}
    return [number for number, (path, _) in enumerate(spec.tensors) if path in chosen]
