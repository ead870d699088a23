"""Expects errors of tdserve by their class and fields, so that tests do not hold the wording of messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from tdserve.base.errors import TDServeError

_Error = TypeVar("_Error", bound=TDServeError)


@contextmanager
def raises(cls: type[_Error], **fields: Any) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Expects that a block raises an error of this class, or of one below it, with these values in its fields.

    Args:
        cls: The class.
        fields: Expected fields by name; others may have any value.
    """
    __tracebackhide__ = True
    with pytest.raises(cls) as caught:
        yield caught
    found = caught.value.fields
    assert fields.keys() <= found.keys(), f"{cls.__name__} has no field {sorted(fields.keys() - found.keys())}"
    differing = {name: found[name] for name, value in fields.items() if found[name] != value}
    assert not differing, f"expected { ({name: fields[name] for name in differing}) }, got {differing}"
