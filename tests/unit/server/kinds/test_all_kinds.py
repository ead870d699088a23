"""Every kind of the messages has its class; and a new kind is one class, and one entry of ``KINDS``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidSpecError, WrongStateError
from tdserve.messages.store_kinds import KIND_NUMBERS
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog import descriptions
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.store_kind import KindStores, StoreKind
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, new_store

TD = TensorDict({"a": torch.zeros(4, 2)}, [4])


class ToyKind(StoreKind):
    """Stores with rows of a tensordict, which has no other key than "a"."""

    name = "toy"

    def make_stored_spec(self, record: StoreRecord, spec: Spec) -> Spec:
        if [key for key, _ in spec.root.entries] != ["a"]:
            raise InvalidSpecError(store=record.name, reason="a toy has no other key than 'a'")
        return spec

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        folder, spec = stores.root.store_folder(record.name), stores.specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / FILE_NAME, uid=record.uid, writable=True)
        return OpenedStore(record, spec, folder, generations=generations)

    def describe(self, store: OpenedStore, stores: KindStores, description: control_pb2.StoreDescription) -> None:
        super().describe(store, stores, description)
        description.min_size = 3

    def repair(self, folder: Path, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        return ""


def test_kinds_when_messages_name_them_then_each_has_a_class() -> None:
    assert KINDS.keys() == KIND_NUMBERS.keys()
    assert list(KIND_NUMBERS) == ["tensordict", "replay", "weights", "keyed", "placement"]


def test_toy_kind_when_it_is_entered_then_its_stores_are_made_opened_described_and_deleted(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number is that of a kind that is not used here: a new one is a line of the protocol.
    monkeypatch.setitem(KIND_NUMBERS, "toy", control_pb2.STORE_KIND_KEYED)
    monkeypatch.setitem(KINDS, "keyed", toy := ToyKind())
    monkeypatch.setitem(KINDS, "toy", toy)
    run(world.create("t", TD, kind=control_pb2.STORE_KIND_KEYED))
    with pytest.raises(InvalidSpecError, match="no other key"):
        run(world.creation.create(new_store("u", TD.clone().set("b", TD["a"]), kind=control_pb2.STORE_KIND_KEYED)))
    world.reopen()
    store = world.stores.get("t")
    assert store.record.kind == "toy"
    described = descriptions.describe(world.stores, store)
    assert (described.num_rows, described.min_size) == (4, 3)
    with pytest.raises(WrongStateError, match="'t' is a toy store"):
        store.get_table()
    run(world.creation.delete("t"))
    assert world.stores.find("t") is None
