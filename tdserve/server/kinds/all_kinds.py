"""The registry of store kinds, by name."""

from __future__ import annotations

from tdserve.server.kinds.keyed_kind import KeyedKind
from tdserve.server.kinds.placement_kind import PlacementKind
from tdserve.server.kinds.store_kind import StoreKind
from tdserve.server.kinds.table_kind import TableKind
from tdserve.server.kinds.tensordict_kind import TensordictKind
from tdserve.server.kinds.weights_kind import WeightsKind

KINDS: dict[str, StoreKind] = {
    kind.name: kind
    for kind in (
        TensordictKind(),
        TableKind(),
        WeightsKind(),
        KeyedKind(),
        PlacementKind(),
    )
}
