from __future__ import annotations

from typing import Any

import pytest

from tdserve.messages.content import ADDED_DTYPES
from tdserve.rules.replay.remover import LowestPriority
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.settings import Settings

PRIORITIZED = ("priority", "probability", "priority_weight", "times_sampled")


@pytest.mark.parametrize(
    ("parts", "of_rows", "of_groups"),
    [
        ({}, (), ()),
        ({"sampler": Prioritized()}, PRIORITIZED, ("priority", "times_sampled")),
        ({"remover": LowestPriority()}, ("priority",), ("priority",)),
        ({"sampler": Fifo(), "max_times_sampled": 3}, ("times_sampled",), ("times_sampled",)),
        ({"sampler": Slices(slice_len=2)}, ("slice_end",), ()),
        ({"sampler": Slices(slice_len=2), "remover": LowestPriority()}, ("priority", "slice_end"), ("priority",)),
    ],
)
def test_added_columns_when_of_any_settings_then_what_is_known_of_a_row(
    parts: dict[str, Any], of_rows: tuple[str, ...], of_groups: tuple[str, ...]
) -> None:
    settings = Settings(**parts)
    assert settings.list_added_columns() == of_rows
    assert settings.list_added_columns(is_grouped=True) == of_groups


def test_added_columns_when_there_are_several_then_in_the_order_in_which_they_travel() -> None:
    places = [list(ADDED_DTYPES).index(name) for name in Settings(sampler=Prioritized()).list_added_columns()]
    assert places == sorted(places)
