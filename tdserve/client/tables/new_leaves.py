"""Leaves that rows of a table get while it is used."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SpecMismatchError
from tdserve.client.handles.schema_changes import alter, check_fields
from tdserve.client.session.session_client import SessionClient
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf, ValueLeaf, check_matches, quote, show
from tdserve.v1 import control_pb2


def find_lacking(known: Spec, row: Spec) -> list[Path]:
    """Returns the leaves of a row that rows of a known structure lack."""
    return [path for path in row.leaf_paths if path not in known.leaf_paths]


def add_leaves(
    client: SessionClient, name: str, known: Spec, row: Spec, deadline: Deadline, *, kind: control_pb2.StoreKind
) -> None:
    """Adds leaves to a table of this kind: those of a row that rows of the known structure lack; there must be some.

    Raises:
        StructureChangedError: The table has other rows by now, or has such a leaf. Nothing was changed.
        SpecMismatchError, NotSupportedError: A leaf does not fit there. Nothing was changed.
    """
    lacking = find_lacking(known, row)
    check_fields(known, lacking)
    added = row.select(lacking).with_device(known.root.device)
    alter(client, name, zeros=added, kind=kind, deadline=deadline)


def check_leaves(expected: Spec, given: Spec, *, store: str) -> None:
    """Raises SpecMismatchError unless rows fit; shows how a table gets leaves that it lacks, or rows of other sizes."""
    try:
        check_matches(expected, given, store=store)
    except SpecMismatchError as error:
        advice = _advise(error.key, expected, given)
        if not advice:
            raise
        raise error.with_fields(actual=f"{error.actual} ({advice})") from None


def _advise(key: str, expected: Spec, given: Spec) -> str:
    wanted: dict[Path, TensorLeaf | ValueLeaf] = dict((*expected.tensors, *expected.values))
    found = dict(given.values)
    path = next((path for path in found if show(path) == key and path in wanted), ())
    dims = _list_differing(wanted[path], found[path]) if path else ()
    if dims:
        return f"create the table with ragged={{{quote(path)}: {dims}}} if these dimensions differ from row to row"
    is_lacking = not expected.packed and bool(find_lacking(expected, given))
    return "add_leaves(like=row) gives the table's rows new keys" if is_lacking else ""


def _list_differing(wanted: TensorLeaf | ValueLeaf, found: ValueLeaf) -> tuple[int, ...]:
    """Returns the dimensions of a row's tensor that would have to be free; () if rows do not differ in these alone."""
    ragged = found.ragged
    if ragged is None or not ragged.dtype:
        return ()
    if isinstance(wanted, TensorLeaf):
        dtype, sizes = wanted.dtype, wanted.shape
    elif wanted.ragged is not None:
        dtype, sizes = wanted.ragged.dtype, (*wanted.batch_size, *wanted.ragged.shape)
    else:
        return ()
    shape = (*found.batch_size, *ragged.shape)
    num_dims = len(found.batch_size)
    if dtype != ragged.dtype or len(sizes) != len(shape) or sizes[:num_dims] != shape[:num_dims]:
        return ()
    fixed = [dim - 1 for dim in range(num_dims, len(shape)) if sizes[dim] not in (-1, shape[dim])]
    free = [dim - 1 for dim in range(num_dims, len(shape)) if sizes[dim] == -1]
    if free == [num_dims - 1]:  # it is declared wherever a key is named without dimensions
        free = []
    return tuple(sorted(fixed + free)) if fixed else ()
