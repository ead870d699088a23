"""tdserve for TorchRL; it needs the package ``torchrl``, which is imported when a name is first used.

``TDServeStorage`` stands where ``LazyMemmapStorage`` stood, see ``tdserve guide torchrl``. A reading order:
``table_storage`` is the storage, ``shared_table`` its table on the server, ``table_rows`` converts rows on the way;
``table_samplers``, ``slice_draws`` and ``table_writer`` take the places of TorchRL's sampler and writer, and
``torchrl_private`` puts them into a buffer.

``table_draws`` is what samplers share, ``local_slices`` draws in this process. ``table_edits`` and
``conditional_updates`` change rows, ``table_checkpointer`` dumps and loads them. ``weight_sync`` publishes weights,
with ``receivers`` and ``forward_guard`` at the other end.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdserve.torchrl.table_storage import TDServeStorage as TDServeStorage
    from tdserve.torchrl.weight_sync import TDServeWeightSyncScheme as TDServeWeightSyncScheme

_HOMES = {
    "TDServeStorage": "table_storage",
    "TDServeWeightSyncScheme": "weight_sync",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tdserve.torchrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tdserve.torchrl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
