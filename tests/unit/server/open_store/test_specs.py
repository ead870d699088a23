from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base.errors import InvalidSpecError
from tdserve.server.open_store.specs import MIN_KEPT, STEPS_PER_LEARNT, Specs, get_message, make_keys
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf


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
        Specs(db, set).get(spec.fingerprint)
    assert Specs(db, set).learn(spec) == ""
    assert Specs(db, set).get(spec.fingerprint) == spec


def test_get_when_no_fingerprint_is_given_then_refused(db: CatalogDB) -> None:
    with pytest.raises(InvalidSpecError):
        Specs(db, set).get(b"")


def test_learn_when_only_the_order_of_keys_differs_then_each_has_a_name_that_stays(db: CatalogDB) -> None:
    first, second = spec_of("a", "b"), spec_of("b", "a")
    specs = Specs(db, set)
    assert specs.learn(first) == ""
    order = specs.learn(second)
    assert order
    for known in (specs, Specs(db, set)):
        assert (known.learn(first), known.learn(second)) == ("", order)
        assert known.get(first.fingerprint) == first
        assert known.get(second.fingerprint, order) == second


def test_message_of_when_asked_twice_then_made_once() -> None:
    spec = spec_of("a")
    assert codec.decode(get_message(spec)) == spec
    assert get_message(spec) is get_message(spec)


def test_learn_when_structures_come_and_go_then_only_those_in_use_are_kept(db: CatalogDB) -> None:
    several = [spec_of(f"k{number}") for number in range(1_000)]
    used = {key for spec in several[:3] for key in make_keys(spec.fingerprint, "")}
    specs = Specs(db, lambda: used)
    for spec in several:
        specs.learn(spec)
        assert specs.get(spec.fingerprint) == spec
    assert db.count_records("specs") <= MIN_KEPT
    assert [Specs(db, set).get(spec.fingerprint) for spec in several[:3]] == several[:3]
    with pytest.raises(InvalidSpecError):
        specs.get(several[3].fingerprint)


def test_learn_when_most_are_in_use_then_they_are_seldom_looked_at(db: CatalogDB) -> None:
    used: set[bytes] = set()
    looks: list[int] = []

    def in_use() -> tuple[bytes, ...]:
        looks.append(len(used))
        return tuple(used)

    specs = Specs(db, in_use)
    for number in range(500):
        spec = spec_of(f"k{number}")
        specs.learn(spec)
        used.update(make_keys(spec.fingerprint, ""))
    assert db.count_records("specs") == 500
    assert looks == [64, 128, 256]


def test_learn_when_the_first_order_of_keys_is_forgotten_then_the_next_is_the_first(db: CatalogDB) -> None:
    specs = Specs(db, set)
    first, second = spec_of("a", "b"), spec_of("b", "a")
    specs.learn(first)
    for number in range(MIN_KEPT - 1):
        specs.learn(spec_of(f"k{number}"))
    assert specs.learn(second) == ""
    assert specs.get(second.fingerprint) == second


def test_learn_when_very_many_are_in_use_then_few_are_looked_at_each_time(db: CatalogDB) -> None:
    looks = [0]

    def in_use() -> Iterator[bytes]:
        for number in range(10 * STEPS_PER_LEARNT):
            looks[0] += 1
            yield number.to_bytes(8, "big")

    specs = Specs(db, in_use)
    most = 0
    for number in range(MIN_KEPT + 20):
        before = looks[0]
        specs.learn(spec_of(f"k{number}"))
        most = max(most, looks[0] - before)
    assert 0 < most <= STEPS_PER_LEARNT
    assert db.count_records("specs") <= 20


def test_learn_when_it_is_used_again_while_others_are_looked_at_then_kept(db: CatalogDB) -> None:
    used = [bytes(8)] * (3 * STEPS_PER_LEARNT)
    specs = Specs(db, lambda: used)
    again = spec_of("again")
    specs.learn(again)
    for number in range(MIN_KEPT + 10):
        specs.learn(spec_of(f"k{number}"))
        if number == MIN_KEPT:  # its last user has gone, and was not found: here is another
            specs.learn(again)
    assert db.count_records("specs") < MIN_KEPT
    assert Specs(db, set).get(again.fingerprint) == again
