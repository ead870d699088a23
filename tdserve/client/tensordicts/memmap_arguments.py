"""Arguments of tensordict's memmap family, and what they mean if a store's name replaces the path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import MemoryMappedTensor

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, NotSupportedError, WrongStateError
from tdserve.base.integers import to_integer
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf, ValueLeaf, quote


def check_no_archive(archive: bool | None, compression: str | int | None) -> None:
    """Raises NotSupportedError for arguments that only an archive supports."""
    advice = "a store is a folder on the server; save client.load_memmap(name) with .save('x.tdz') for an archive"
    if archive:
        raise NotSupportedError(feature="archive=True", reason=advice)
    if compression is not None:
        raise NotSupportedError(feature=f"compression={compression!r}", reason=advice)


def check_no_files(td: Any) -> None:
    """Raises WrongStateError for a leaf that is memory-mapped to a file already, as ``copy_existing=False`` asks."""

    def check(key: str | Path, leaf: Any) -> Any:
        file = _find_file(leaf)
        if file is not None:
            path = key if isinstance(key, tuple) else (key,)
            state = f"the leaf at {quote(path)} is memory-mapped to {file} (pass copy_existing=True to copy it)"
            raise WrongStateError(state=state, event="memmap(copy_existing=False)")
        return leaf  # if a TensorDictParams in a stack returns None, tensordict fails at its lock

    td.named_apply(check, nested_keys=True, filter_empty=True)


def has_parameters(td: Any) -> bool:
    """Returns whether leaves are parameters: other objects refer to them too, so they are written, never replaced."""
    found: list[bool] = []

    def look(leaf: torch.Tensor) -> torch.Tensor:
        found.append(isinstance(leaf, torch.nn.Parameter))
        return leaf  # as above

    td.apply(look, filter_empty=True)
    return any(found)


def _find_file(leaf: Any) -> str | None:
    try:
        return str(leaf.filename) if isinstance(leaf, MemoryMappedTensor) else None
    except RuntimeError:  # of anonymous memory
        return None


def check_sizes(batch_size: Sequence[int] | int) -> tuple[int, ...]:
    """Returns sizes of dimensions; a number is a single one.

    Raises InvalidRequestError for what is no natural number.
    """
    given = tuple(batch_size) if isinstance(batch_size, Iterable) else (batch_size,)
    sizes = tuple(number for size in given if (number := to_integer(size)) is not None and number >= 0)
    if len(sizes) != len(given):
        raise InvalidRequestError(
            argument="batch_size", reason=f"{batch_size!r} has a size that is not a natural number"
        )
    return sizes


def split_name(name: str, subpath: Any) -> tuple[str, Path]:
    """Splits ``"store/part"`` into a store and the path of a nested part, which ``subpath`` may give instead."""
    path = check_subpath(subpath)
    if not isinstance(name, str):
        return name, path
    store, _, part = name.partition("/")
    return (store, (*check_subpath(part), *path)) if store and part else (name, path)


def check_subpath(subpath: Any) -> Path:
    """Returns the path of a nested part, () for everything.

    ``"a/b"``, ``("a", "b")`` and ``("a", ("b",))`` are equal.
    """
    if subpath is None:
        return ()
    path = (
        tuple(part for part in subpath.split("/") if part) if isinstance(subpath, str) else tuple(_flatten_key(subpath))
    )
    if not path and not isinstance(subpath, str):
        raise InvalidRequestError(argument="subpath", reason=f"{subpath!r} names nothing")
    return path


def _flatten_key(key: Any) -> Sequence[str]:
    if isinstance(key, str):
        return [key]
    if not isinstance(key, tuple):
        raise InvalidRequestError(argument="subpath", reason=f"{key!r} is neither a str nor a tuple of str")
    return [part for each in key for part in _flatten_key(each)]


def check_mode(mode: str | None, device: Any) -> None:
    """Raises InvalidRequestError for an unknown mode, or one that contradicts ``device``."""
    if mode not in (None, "r", "r+"):
        raise InvalidRequestError(argument="mode", reason=f"it must be one of 'r', 'r+' and None, got {mode!r}")
    if mode == "r+" and device is not None and parse_device(device).type not in ("cpu", "meta"):
        reason = "what 'r+' returns is the server's memory; leave device out, or mode"
        raise InvalidRequestError(argument="mode", reason=reason)


def parse_device(device: torch.device | str | int) -> torch.device:
    """Returns a device by name; a number means a GPU, whether or not there is one here."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def check_device(out: Any, device: Any) -> Any:
    """Returns the device of ``out``, where its content goes. Raises InvalidRequestError if ``device`` is another."""
    if out.device is None or device is None:
        return device if out.device is None else out.device
    asked = parse_device(device)
    if asked.type != out.device.type or (
        None not in (asked.index, out.device.index) and asked.index != out.device.index
    ):
        raise InvalidRequestError(argument="device", reason=f"out is on {out.device}, not on {asked}")
    return out.device


def check_part(spec: Spec, path: Path, *, store: str) -> None:
    """Raises InvalidRequestError (a ValueError, as in tensordict) if there is nothing at a path, or a tensor."""
    try:
        entry = spec.find(path, store=store)
    except KeyNotFoundError as error:
        raise InvalidRequestError(argument="subpath", reason=str(error)) from error
    if isinstance(entry, TensorLeaf) or (isinstance(entry, ValueLeaf) and entry.ragged is not None):
        reason = f"at {quote(path)} there is a tensor; client[{store!r}].get() reads one"
        raise InvalidRequestError(argument="subpath", reason=reason)
