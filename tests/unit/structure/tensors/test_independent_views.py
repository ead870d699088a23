from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tdserve.structure.tensors import independent_views as module
from tdserve.structure.tensors.independent_views import make_independent_views


@pytest.fixture(params=[True, False], ids=["this torch", "a torch without it"], autouse=True)
def _torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the tests with and without the private context manager, which another version of torch may lack."""
    if not request.param:
        monkeypatch.setattr(module, "nothing_noted", None)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_make_independent_views_when_one_view_is_changed_then_the_others_versions_stay(mode: Any) -> None:
    buffer = torch.zeros(6)
    with mode():
        first, second = make_independent_views(lambda: [*buffer.view(2, 3).unbind(0)])
    second.add_(1)
    assert (first._version, second._version) == (0, 1)
    assert buffer.tolist() == [0, 0, 0, 1, 1, 1]
    assert first._base is None
    assert not first.is_inference()


def test_make_independent_views_when_a_backward_needs_one_view_then_another_may_be_changed_and_either_trained() -> None:
    buffer = torch.ones(6)
    first, second = make_independent_views(lambda: [*buffer.view(2, 3).unbind(0)])
    weight = torch.ones(3, requires_grad=True)
    loss: Any = (weight * first).sum()
    second.mul_(5)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 3
    second.requires_grad_(True)
    torch.autograd.backward([second.sum()])
    assert second.grad is not None
    second.data = torch.zeros(1)
    assert buffer.tolist() == [1, 1, 1, 5, 5, 5]
