"""tdserve for TorchRL; it needs the package ``torchrl``, which is imported when a name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdserve.torchrl.weight_sync import TDServeWeightSyncScheme as TDServeWeightSyncScheme

_HOMES = {
    "TDServeWeightSyncScheme": "weight_sync",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tdserve.torchrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tdserve.torchrl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
