"""Handles of keyed stores that were deleted and made anew for other entries."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import tdserve

pytestmark = pytest.mark.integration


def test_keyed_handle_when_the_store_was_made_anew_for_other_entries_then_errors_name_how_to_open_it(
    client: tdserve.Client, name: str
) -> None:
    former = client.create_kv(name, like=torch.zeros(2))
    former.put("key", torch.zeros(2))
    client.delete(name)
    anew = client.create_kv(name, like=torch.zeros(3))
    anew.put("key", torch.ones(3))
    calls: list[Callable[[], object]] = [
        lambda: former.put("key", torch.zeros(2)),
        lambda: former.get("key"),
        lambda: former.versions("key"),
        lambda: former.pop("key"),
        lambda: former.delete(["key", "other"], missing_ok=True),
        former.keys,
        lambda: len(former),
    ]
    for call in calls:
        with pytest.raises(tdserve.SpecMismatchError, match=rf"open it again: client\['{re.escape(name)}'\]"):
            call()
    assert client[name]["key"].tolist() == [1.0, 1.0, 1.0]
