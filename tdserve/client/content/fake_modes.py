"""Torch's FakeTensorMode, under which real content can be neither made nor written."""

from __future__ import annotations

from tdserve.base.errors import NotSupportedError
from tdserve.structure.torch_private import FakeTensorMode, active_fake_mode, num_dispatch_modes


def fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode that is active in the calling thread; None without one."""
    found: FakeTensorMode | None = active_fake_mode()
    return found


STRUCTURE = "client.load_memmap(name) gives the store's structure as fake tensors; leave the mode for its content"

ROWS = "leave the mode for rows; client.describe(name) tells their structure"

WEIGHTS = "leave the mode for weights; client.describe(name) tells their structure"


def check_real(doing: str, advice: str = STRUCTURE) -> None:
    """Raises NotSupportedError under a FakeTensorMode, where torch takes real tensors for a mistake.

    Without any mode it takes some 30 ns, so that every read of a store can afford it.

    Args:
        doing: What was asked for, for the error.
        advice: What to do instead, for the error.
    """
    if num_dispatch_modes() and fake_mode() is not None:
        raise NotSupportedError(feature=f"{doing} under a FakeTensorMode", reason=advice)
