"""Errors about content that name the group, where the code that checks content names a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.base.errors import NotSupportedError, SpecMismatchError


@contextmanager
def name_group(name: str) -> Iterator[None]:
    """Raises errors of the block, in which the group is given for a store, as those of a group."""
    try:
        yield
    except NotSupportedError as error:
        feature = str(error.fields["feature"]).replace(f"store {name!r}", f"group {name!r}")
        raise error.with_fields(feature=feature) from None
    except SpecMismatchError as error:
        raise error.with_fields(store="", expected=f"{error.fields['expected']} (group {name!r})") from None
