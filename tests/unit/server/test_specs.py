from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.errors import InvalidSpecError
from tdserve.server.specs import Specs, message_of
from tdserve.spec import codec
from tdserve.spec.tree import Node, Spec, TensorLeaf
from tdserve.store.catalog_db import CatalogDB


def spec_of(*keys: str) -> Spec:
    """A structure with these keys, in this order."""
    return Spec(Node((4,), None, None, None, tuple((key, TensorLeaf("int64", (4,))) for key in keys)))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    """An empty catalog."""
    (tmp_path / "catalog").mkdir()
    made = CatalogDB(tmp_path / "catalog")
    yield made
    made.close()


def test_get_when_learnt_then_known_also_after_a_restart(db: CatalogDB) -> None:
    spec = spec_of("a")
    with pytest.raises(InvalidSpecError, match=spec.fingerprint.hex()[:16]):
        Specs(db).get(spec.fingerprint)
    assert Specs(db).learn(spec) == ""
    assert Specs(db).get(spec.fingerprint) == spec


def test_get_when_no_fingerprint_is_given_then_refused(db: CatalogDB) -> None:
    with pytest.raises(InvalidSpecError):
        Specs(db).get(b"")


def test_learn_when_only_the_order_of_keys_differs_then_each_has_a_name_that_stays(db: CatalogDB) -> None:
    first, second = spec_of("a", "b"), spec_of("b", "a")
    specs = Specs(db)
    assert specs.learn(first) == ""
    order = specs.learn(second)
    assert order
    for known in (specs, Specs(db)):
        assert (known.learn(first), known.learn(second)) == ("", order)
        assert known.get(first.fingerprint) == first
        assert known.get(second.fingerprint, order) == second


def test_message_of_when_asked_twice_then_made_once() -> None:
    spec = spec_of("a")
    assert codec.decode(message_of(spec)) == spec
    assert message_of(spec) is message_of(spec)
