"""Compares structures, and names their parts in errors."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.trees.dtypes import WIDER, has_all_values
from tdserve.structure.trees.nodes import PACKED, Entry, Form, Node, Path, Ragged, TensorLeaf, ValueLeaf, has_nothing


def show(path: Path) -> str:
    """Returns a path as errors show it: a key of the root alone, a nested one as its tuple."""
    return path[0] if len(path) == 1 else repr(path)


def quote(path: Path) -> str:
    """Returns a path for use in a sentence: quoted as in Python."""
    return repr(path[0]) if len(path) == 1 else repr(path)


def describe(entry: Entry) -> str:
    """Describes an entry as errors show it: ``float32[4, 3]``."""
    if isinstance(entry, TensorLeaf):
        return f"{entry.dtype}{list(entry.shape)}"
    if isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype:
        return f"ragged {entry.ragged.dtype}{[*entry.batch_size, *entry.ragged.shape]}"
    if isinstance(entry, ValueLeaf) and entry.is_unbatched:
        return "UnbatchedTensor"
    if isinstance(entry, ValueLeaf) and entry.ragged is not None:
        return f"entries of any kind{list(entry.batch_size)}"
    if isinstance(entry, ValueLeaf):
        return f"non-tensor{list(entry.batch_size)}"
    return f"{entry.tensorclass or 'TensorDict'}{list(entry.shown_batch_size)}"


def describe_misfit(expected: Entry, actual: Entry) -> str:
    """Describes an entry that does not fit, as errors show it; with the conversion that only the caller may make."""
    if not isinstance(expected, TensorLeaf) or not isinstance(actual, TensorLeaf) or expected.shape != actual.shape:
        return describe(actual)
    if has_all_values(expected.dtype, actual.dtype):
        return describe(actual)
    conversion = f".to(torch.{expected.dtype})"
    of_array = f"torch.from_numpy(array){conversion}" if expected.dtype in WIDER else f".astype({expected.dtype!r})"
    remedy = f"convert it first, as by {conversion}, or {of_array} of an array"
    return f"{describe(actual)}, of which {expected.dtype} does not hold all values: {remedy}"


def describe_destination(expected: Entry, actual: Entry) -> str:
    """Describes an entry of an ``out=`` that does not fit the content for it."""
    if not isinstance(expected, TensorLeaf) or not isinstance(actual, TensorLeaf) or expected.dtype == actual.dtype:
        return describe(actual)
    return f"{describe(actual)} in out=: give a tensor of {expected.dtype}, or read without out= and convert the result"


def describe_only(_: Entry, actual: Entry) -> str:
    """Describes an entry that differs, where nothing is to be done about it."""
    return describe(actual)


def check_node(
    expected: Node,
    actual: Node,
    path: Path,
    store: str,
    *,
    is_packed: bool = False,
    advise: Callable[[Entry, Entry], str] = describe_misfit,
) -> None:
    """Compares nodes at a path as ``check_matches`` does.

    Args:
        is_packed: Whether they summarise elements of a packed node.
        advise: Describes an entry that does not fit, given the expected and the actual one, and what to do about it.
    """
    theirs_inner, inner = actual.inner, expected.inner
    is_fit = expected.batch_size == actual.batch_size and (inner is None) is (theirs_inner is None)
    if not is_fit or len(inner or ()) != len(theirs_inner or ()):
        wanted, found = list(expected.shown_batch_size), list(actual.shown_batch_size)
        kind = "ragged " if inner is not None and theirs_inner is None else ""
        raise _make_mismatch(store, path, f"{kind}batch size {wanted}", f"{found}")
    if expected.tensorclass != actual.tensorclass:
        raise _make_mismatch(store, path, expected.tensorclass or "TensorDict", actual.tensorclass or "TensorDict")
    if expected.entries == actual.entries:
        return
    is_packed = is_packed or inner is not None
    theirs = dict(actual.entries)
    for key, entry in expected.entries:
        other = theirs.pop(key, None)
        if other is None:
            if is_packed:
                continue
            unknown = next((each for each in theirs if each not in dict(expected.entries)), None)
            difference = "no such key" if unknown is None else f"no such key, but {quote((*path, unknown))}"
            raise _make_mismatch(store, (*path, key), describe(entry), difference)
        if isinstance(entry, Node) and isinstance(other, Node):
            check_node(entry, other, (*path, key), store, is_packed=is_packed, advise=advise)
        elif is_packed and (_is_any(entry) or has_nothing(other)):
            continue
        elif type(entry) is not type(other) or not is_compatible(entry, other):
            raise _make_mismatch(store, (*path, key), describe(entry), advise(entry, other))
    if is_packed and expected.tensorclass is not None:
        return  # fields that are not always set
    for key, other in theirs.items():
        raise _make_mismatch(store, (*path, key), "no such key", describe(other))


def is_compatible(expected: Entry, actual: Entry) -> bool:
    """Returns whether one leaf may replace another."""
    if isinstance(expected, ValueLeaf) and isinstance(actual, ValueLeaf):
        is_alike = expected.batch_size == actual.batch_size and expected.is_unbatched == actual.is_unbatched
        return is_alike and _is_ragged_compatible(expected.ragged, actual.ragged)
    return expected[:2] == actual[:2] if isinstance(actual, TensorLeaf) else expected == actual


def _is_any(known: Entry) -> bool:
    """Returns whether elements of a packed node differ in kind at a key."""
    return isinstance(known, ValueLeaf) and known.ragged == PACKED


def _is_ragged_compatible(expected: Ragged | None, actual: Ragged | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    if (expected.form is Form.PACKED) is not (actual.form is Form.PACKED):
        return False
    if expected.dtype != actual.dtype or len(expected.shape) != len(actual.shape):
        return False
    return all(wanted in (-1, size) for wanted, size in zip(expected.shape, actual.shape, strict=True))


def _make_mismatch(store: str, path: Path, expected: str, actual: str) -> SpecMismatchError:
    return SpecMismatchError(store=store, key=show(path) if path else "", expected=expected, actual=actual)
