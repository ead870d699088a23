"""How a store is created."""

from __future__ import annotations

from typing import NamedTuple

from tdserve.rules.catalog import Durability, check_durability, check_max_object_bytes
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class StoreOptions(NamedTuple):
    """The options that stores of several kinds share.

    Attributes:
        exists_ok: Whether an existing store of the same structure is taken instead.
        max_object_bytes: Room for non-tensor values and ragged tensors; None is the default.
        durability: What a write survives that was answered; None is the default.
        share_non_tensor: Whether non-tensor leaves are live.
        checksum: Whether readers compare its rows with the checksums of the last sync.
    """

    exists_ok: bool
    max_object_bytes: int | None
    durability: Durability | None
    share_non_tensor: bool = False
    checksum: bool = False

    def make_message(self, name: str, spec: Spec, kind: control_pb2.StoreKind) -> control_pb2.CreateStoreRequest:
        """Makes the request for a store. Raises InvalidRequestError for an invalid option."""
        return control_pb2.CreateStoreRequest(
            name=name,
            kind=kind,
            spec=codec.encode(spec),
            exists_ok=self.exists_ok,
            share_non_tensor=self.share_non_tensor,
            max_object_bytes=check_max_object_bytes(self.max_object_bytes),
            durability=check_durability(self.durability),
            checksum=self.checksum,
        )
