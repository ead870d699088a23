"""Leaves that rows of a table get while it is used."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SpecMismatchError
from tdserve.client.handles.schema_changes import alter, check_fields
from tdserve.client.session.session_client import SessionClient
from tdserve.structure.tree import Path, Spec, check_matches


def find_lacking(known: Spec, row: Spec) -> list[Path]:
    """Returns the leaves of a row that rows of a known structure lack."""
    return [path for path in row.leaf_paths if path not in known.leaf_paths]


def add_leaves(client: SessionClient, name: str, known: Spec, row: Spec, deadline: Deadline) -> None:
    """Adds leaves to a table: those of a row that rows of the known structure lack; there must be some.

    Raises:
        StructureChangedError: The table has other rows by now, or has such a leaf. Nothing was changed.
        SpecMismatchError, NotSupportedError: A leaf does not fit there. Nothing was changed.
    """
    lacking = find_lacking(known, row)
    check_fields(known, lacking)
    added = row.select(lacking).with_device(known.root.device)
    alter(client, name, zeros=added, deadline=deadline)


def check_leaves(expected: Spec, given: Spec, *, store: str) -> None:
    """Raises SpecMismatchError unless rows fit; if they have leaves that the table lacks, says how it gets them."""
    try:
        check_matches(expected, given, store=store)
    except SpecMismatchError as error:
        if expected.packed or not find_lacking(expected, given):
            raise
        actual = f"{error.actual} (add_leaves(like=row) gives the table's rows new keys)"
        raise SpecMismatchError(store=store, key=error.key, expected=error.expected, actual=actual) from None
