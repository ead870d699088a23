"""Which of several servers' answers about one name counts. Imports no torch, for commands."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tdserve.base.errors import StoreMovedError
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.placement import PlacementRecord


def choose_latest(answers: Mapping[int, StoreDescription | StoreMovedError]) -> int:
    """Returns the server whose answer counts: of copies of a record the latest; all else comes after all copies."""
    return max(answers, key=lambda server: _compute_lateness(answers[server]))


def _compute_lateness(answer: StoreDescription | StoreMovedError) -> float:
    if isinstance(answer, StoreMovedError) or answer.kind != "placement":
        return math.inf
    record = PlacementRecord.from_json(answer.settings)
    return record.revision if record.is_copy else math.inf
