"""The kinds of stores: their names, which the catalog and users have, and the numbers that messages have for them."""

from __future__ import annotations

from tdserve.v1 import control_pb2

KIND_NUMBERS: dict[str, control_pb2.StoreKind] = {
    name.removeprefix("STORE_KIND_").lower(): getattr(control_pb2, name) for name in control_pb2.StoreKind.keys()[1:]
}
"""By name: ``"tensordict"``, ``"replay"``, ``"weights"``, ``"keyed"``, ``"placement"``."""

KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}
"""By number."""
