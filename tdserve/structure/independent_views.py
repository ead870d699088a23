"""Views of memory that has no tensor of its own: each counts its versions for itself.

torch lets views of one tensor share their count, so that what is done in place to one leaf would fail a backward that
needs another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NOTHING_NOTED: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
"""Under it torch does not note what a view is a view of: that takes a third of the time in which the view is made, and
to take ``.data`` of it as long as the view itself (measured)."""


def untracked(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Makes views, as if each were a tensor of its own over its memory.

    Args:
        make: Gives views of tensors that require no grad.
    """
    if _NOTHING_NOTED is None:
        return [view.data for view in make()]
    with _NOTHING_NOTED():
        return make()
