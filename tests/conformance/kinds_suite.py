"""The exam of every kind of tensordict over a transport: what comes out equals what went in, or is refused by name.

A class gives fixture ``connect`` and inherits the rest, as in ``service_suite``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds import KINDS, Kind
from tests.conformance.operations import OPERATIONS, Trial
from tests.conformance.refused import NOTES, Note, note_of
from tests.conformance.suite import Suite


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
class KindsSuite(Suite):
    """Tests for every kind over every transport.

    Attributes:
        kinds: Those that are tried, by name.
        in_full_only: Those that only a full run tries.
    """

    kinds: ClassVar[dict[str, Kind]] = KINDS
    in_full_only: ClassVar[Collection[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The test for each kind."""
        if "kind" in metafunc.fixturenames:
            marks = {name: [pytest.mark.full] for name in self.in_full_only}
            metafunc.parametrize("kind", [pytest.param(name, marks=marks.get(name, ())) for name in self.kinds])

    @pytest.mark.slow
    def test_kind_when_every_operation_is_tried_then_equal_or_refused_by_name(
        self, client: tdserve.Client, name: str, kind: str
    ) -> None:
        trial = Trial(client, name, self.kinds[kind])
        transport = client.stats()["transport"]
        faults = []
        for title, operation in OPERATIONS.items():
            if operation.on_rows and not trial.kind.has_rows:
                continue
            is_there = operation.needs in ("", transport)
            faults.append(fault_of(trial, title, note_of(kind, title) if is_there else NOTES["shared"]))
        for store in client.stores():
            if store.startswith(name):
                client.delete(store)
        assert not any(faults), "\n".join(filter(None, faults))


def list_all_but(first: int, every: int = 3) -> list[str]:
    """Returns the names of all kinds except every third one. Neighbours are alike, so that they go different ways.

    Args:
        first: Place of the first kind that is left out of the list.
        every: The distance to the next one.
    """
    return [name for place, name in enumerate(KINDS) if place % every != first]


def fault_of(trial: Trial, title: str, note: Note | None) -> str:
    """What is wrong with an operation on a kind; empty if its result is as expected."""
    try:
        OPERATIONS[title].attempt(trial)
    except Exception as error:  # noqa: BLE001 (each is a fault, or was announced)
        is_announced = note is not None and note.accepts(error)
        return "" if is_announced else f"{title}: {type(error).__name__}: {error}"
    return "" if note is None else f"{title}: was announced to be refused ({note.pattern}), and came out equal"
