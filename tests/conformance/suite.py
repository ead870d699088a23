"""Fixtures that the suites of the service share: every test has a client of its own, and a name for its stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

import tdserve

Connect = Callable[[], tdserve.Client]
"""Returns a fresh client of one server, which may have other stores."""

_numbers = itertools.count()


class Suite:
    """The fixtures of a suite. A subclass gives the fixture ``connect``, a ``Connect``."""

    @pytest.fixture
    def client(self, connect: Connect) -> Iterator[tdserve.Client]:
        """One client."""
        with connect() as made:
            yield made

    @pytest.fixture
    def name(self) -> str:
        """A name that no store has."""
        return f"store-{next(_numbers)}"
