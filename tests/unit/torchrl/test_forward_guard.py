from __future__ import annotations

import copy
import pickle
from threading import Thread

import pytest
import torch
from torch import nn

from tdserve.torchrl.forward_guard import ForwardGuard

UNBLOCKED_S = 0.2
"""Far more than a change needs that is not held up."""


class Passing(nn.Module):
    """Starts a change in another thread during its pass, and records which came first."""

    def __init__(self, guard: ForwardGuard, *, fails: bool = False) -> None:
        super().__init__()
        self.guards = [guard]
        self.fails = fails
        self.order: list[str] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.changer = Thread(target=self.change)
        self.changer.start()
        self.changer.join(UNBLOCKED_S)
        self.order.append("pass")
        if self.fails:
            raise ArithmeticError
        return value

    def change(self) -> None:
        with self.guards[0].change():
            self.order.append("change")


@pytest.mark.parametrize("is_copied", [False, True])
def test_change_when_a_pass_is_under_way_then_comes_after_it(is_copied: bool) -> None:
    guard = ForwardGuard()
    module = Passing(guard)
    guard.guard(module)
    guard.guard(module)
    if is_copied:
        module = copy.deepcopy(module)
        module.guards = [guard]
    module(torch.zeros(1))
    module.changer.join()
    assert module.order == ["pass", "change"]


def test_change_when_the_module_is_not_guarded_then_does_not_wait() -> None:
    module = Passing(ForwardGuard())
    module(torch.zeros(1))
    assert module.order == ["change", "pass"]


def test_change_when_a_pass_has_failed_then_does_not_wait() -> None:
    guard = ForwardGuard()
    module = Passing(guard, fails=True)
    guard.guard(module)
    with pytest.raises(ArithmeticError):
        module(torch.zeros(1))
    module.changer.join()
    assert module.order == ["pass", "change"]


def test_guard_when_the_module_is_pickled_then_the_copy_has_its_own() -> None:
    guard = ForwardGuard()
    module = nn.Linear(2, 2)
    guard.guard(module)
    copied = pickle.loads(pickle.dumps(module))
    with guard.change():
        passing = Thread(target=copied, args=(torch.zeros(2),))
        passing.start()
        passing.join()  # it does not wait for the guard of the original


def test_guard_when_a_pass_began_before_then_its_end_releases_nothing() -> None:
    guard = ForwardGuard()

    class Late(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            guard.guard(self)
            return value

    module = Late()
    module(torch.zeros(1))
    module(torch.zeros(1))
    with guard.change():
        pass


def test_guard_when_it_is_no_module_then_nothing_happens() -> None:
    ForwardGuard().guard(lambda td: td)
