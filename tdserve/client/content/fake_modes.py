"""Torch's FakeTensorMode, in which no real content can be made or written."""

from __future__ import annotations

from tdserve.base.errors import NotSupportedError
from tdserve.structure.torch_private import FakeTensorMode, active_fake_mode, num_dispatch_modes


def find_fake_mode() -> FakeTensorMode | None:
    """Returns the FakeTensorMode that is active in the calling thread; None if there is none."""
    found: FakeTensorMode | None = active_fake_mode()
    return found


STRUCTURE = "client.load_memmap(name) gives the store's structure as fake tensors; leave the mode for its content"

ROWS = "leave the mode for rows; client.describe(name) has their structure"

WEIGHTS = "leave the mode for weights; client.describe(name) has their structure"


def check_real(doing: str, advice: str = STRUCTURE) -> None:
    """Raises NotSupportedError under a FakeTensorMode, where torch treats real tensors as mistakes.

    Without a mode this takes some 30 ns, which every read of a store can afford.

    Args:
        doing: What was requested, for the error.
        advice: What to do instead, for the error.
    """
    if num_dispatch_modes() and find_fake_mode() is not None:
        raise NotSupportedError(feature=f"{doing} under a FakeTensorMode", reason=advice)
