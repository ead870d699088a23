"""Errors for versions that do not fit a module, with the side that has a name and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import nn

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.trees.tree import Entry, Path, describe

SHARDED = "tdserve.dtensor"
"""The only key of a version that sharded trainers have published: it has the index of the parts, and no weights. Also
a key of its metadata. ``tdserve.dtensor`` writes and reads them."""

COMPILED = "_orig_mod"
"""What torch.compile adds to names: the attribute that is the compiled module."""

_COMPILED_REMEDY = f"torch.compile adds {COMPILED!r} to names: publish and read the module below it, module.{COMPILED}"


def make_misfit_error(
    module: nn.Module,
    path: Path,
    came: Mapping[Path, Entry],
    mine: Mapping[Path, Entry],
    *,
    store: str,
    ways: tuple[str, str] | None = None,
) -> SpecMismatchError:
    """Returns the error for a name at which a version and a module differ.

    Args:
        module: The module.
        path: The name.
        came: What the version has.
        mine: What the module has.
        store: Name of the weights.
        ways: How to read what fits: if only the version has the name, and if only the module has it. None: by
            ``load_state_dict``.
    """
    if any(each[0] == SHARDED for each in came):
        return make_sharded_error("a module", store=store)
    theirs, own = came.get(path), mine.get(path)
    is_compiled = _has_compiled(came) is not _has_compiled(mine)
    skip, load_part = ways or (
        f"load what fits by {_suggest_load(store)}",
        f"load what there is by {_suggest_load(store)}",
    )
    expected, actual = "", ""
    if theirs is not None and own is not None:
        expected, actual = describe(theirs), describe(own)
    elif theirs is not None:
        remedy = _COMPILED_REMEDY if is_compiled else f"publish without it, or {skip}"
        expected = f"{describe(theirs)}, which the published version has"
        actual = f"no parameter or buffer of this name in the module; {remedy}"
    elif own is not None:
        kind = _find_kind(module, ".".join(path))
        remedy = "publish a module that has it"
        if kind == "non-persistent buffer":
            remedy = "publish the module itself, since its state_dict leaves such buffers out"
        remedy = _COMPILED_REMEDY if is_compiled else f"{remedy}, or {load_part}"
        expected = "nothing, since the published version has no such name"
        actual = f"{describe(own)}, a {kind} of the module; {remedy}"
    return SpecMismatchError(store=store, key=".".join(path), expected=expected, actual=actual)


def make_sharded_error(given: str, *, store: str) -> SpecMismatchError:
    """Returns the error for a version of a sharded trainer that is read into something else than its index.

    Args:
        given: What it is read into.
        store: Name of the weights.
    """
    expected = "an index of shards, since a sharded trainer has published this version"
    actual = f"{given}; {suggest_dtensor(store)}"
    return SpecMismatchError(store=store, key=SHARDED, expected=expected, actual=actual)


def suggest_dtensor(store: str) -> str:
    """Says what reads the weights of a sharded trainer."""
    return f"tdserve.dtensor.latest(client, {store!r}, into=module) reads it"


def make_meta_error(module: nn.Module, *, store: str, is_published: bool = False) -> NotSupportedError | None:
    """Returns the error for a module that has parameters or buffers without memory; None if none is on the meta device.

    Args:
        store: Name of the weights.
        is_published: Whether the module is to be published, instead of filled.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    name = next((name for name, tensor in tensors if tensor.is_meta), None)
    if name is None:
        return None
    what = f"{name!r} of a module on the meta device"
    if is_published:
        return NotSupportedError(
            feature=f"publishing {what} as weights {store!r}",
            reason="it has no content; call module.to_empty(device=...) and fill it first",
        )
    return NotSupportedError(
        feature=f"reading weights {store!r} into {what}",
        reason="it has no memory to fill; call module.to_empty(device=...) first",
    )


def _suggest_load(store: str) -> str:
    return f"module.load_state_dict(client.latest({store!r}).data.flatten_keys('.').to_dict(), strict=False)"


def _has_compiled(names: Mapping[Path, Entry]) -> bool:
    return any(COMPILED in path for path in names)


def _find_kind(module: nn.Module, name: str) -> str:
    if name not in dict(module.named_buffers(remove_duplicate=False)):
        return "parameter"
    return "buffer" if name in module.state_dict() else "non-persistent buffer"
