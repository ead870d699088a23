"""Every kind of tensordict, by name: an example of each, and what comes back."""

from __future__ import annotations

from tests.conformance import kinds_classes, kinds_dense, kinds_held, kinds_params, kinds_stacks
from tests.conformance.kind import KINDS, ROWS, Kind, kind, numbers

__all__ = [
    "KINDS",
    "ROWS",
    "Kind",
    "kind",
    "kinds_classes",
    "kinds_dense",
    "kinds_held",
    "kinds_params",
    "kinds_stacks",
    "numbers",
]
