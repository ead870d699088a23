from __future__ import annotations

from tdserve.client.weights.lru_names import MAX_NAMES, NewestNames


def test_put_when_there_are_ever_more_names_then_those_that_were_put_last_are_known() -> None:
    names: NewestNames[int] = NewestNames()
    for number in range(1_000):
        names.put(f"n{number}", number)
        names.put("often", number)
    assert len(names) == MAX_NAMES
    assert [names.get(name) for name in ("n0", "n999", "often")] == [None, 999, 999]


def test_pop_when_known_then_forgotten() -> None:
    names: NewestNames[int] = NewestNames()
    names.put("a", 1)
    assert [names.pop("a"), names.pop("a"), names.get("a")] == [1, None, None]
