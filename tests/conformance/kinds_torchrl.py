"""Kinds that torchrl defines for language models, as its users write them.

Not part of ``kinds``: torchrl is not installed everywhere.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import tensordict
import torch
from tensordict import TensorDict, lazy_stack

from tests.conformance.kind import Kind, kind

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data.llm import ContentBase, History
    from torchrl.envs.llm import IFEvalScoreData

TORCHRL_KINDS: dict[str, Kind] = {}
"""Each of these kinds by its name."""

_kind = partial(kind, into=TORCHRL_KINDS)

CALLS = [{"name": "search", "arguments": {"query": "tides", "limit": 3}}]


def history(num_turns: int) -> Any:
    """A conversation that tells its length."""
    with tensordict.set_list_to_stack(True):
        turns = [History(role="system", content="You are terse.")]
        turns += [
            History(role=("user", "assistant")[turn % 2], content=f"turn {turn} of {num_turns}")
            for turn in range(num_turns - 1)
        ]
        return torch.stack(turns)


def with_tools() -> Any:
    """Calls of tools, their answers, and a turn that was cut off."""
    with tensordict.set_list_to_stack(True):
        asks = History(role="assistant", content="", tool_calls=CALLS)
        answers = History(role="tool", content="high at 3", tool_responses=["high at 3", "low at 9"])
        return lazy_stack([asks, answers, History(role="assistant", content="High at", is_complete=False)])


@_kind("History of one turn", has_rows=False)
def turn() -> Any:
    """By itself."""
    return history(1)[0]


@_kind("History")
def conversation() -> Any:
    """Turns as rows."""
    return history(4)


@_kind("History, appended")
def appended() -> Any:
    """One turn after the others."""
    with tensordict.set_list_to_stack(True):
        return history(3).append(History(role="user", content="one more"), inplace=False)


@_kind("History with tools", has_rows=False)
def tools() -> Any:
    """Its turns differ in what they have."""
    return with_tools()


@_kind("History of structured content", has_rows=False)
def structured() -> Any:
    """Content is more than a string."""
    with tensordict.set_list_to_stack(True):
        content = ContentBase(type="image", url="https://example.com/image.jpg", size=7)
        return History(role="user", content=content)


@_kind("History of several conversations")
def conversations() -> Any:
    """As many turns in each."""
    with tensordict.set_list_to_stack(True):
        return torch.stack([history(3) for _ in range(4)])


@_kind("History of conversations of different lengths")
def uneven() -> Any:
    """A lazy stack of them, beside what belongs to them."""
    stack = lazy_stack([history(size) for size in (1, 3, 2, 4)])
    return TensorDict({"history": stack, "reward": torch.arange(4.0)}, [4])


@_kind("IFEvalScoreData", has_rows=False)
def scores() -> Any:
    """Of one answer."""
    return IFEvalScoreData(
        prompt_level_strict_acc=torch.tensor([True]),
        inst_level_strict_acc=torch.tensor([True, False]),
        prompt_level_loose_acc=torch.tensor([True]),
        inst_level_loose_acc=torch.tensor([True, True]),
    )


@_kind("IFEvalScoreData of fields that are None", has_rows=False)
def scores_missing() -> Any:
    """Optional tensors that are not given."""
    strict = torch.tensor([True])
    return IFEvalScoreData(strict, None, None, None, batch_size=[])


@_kind("IFEvalScoreData in a tensordict")
def scores_stacked() -> Any:
    """One for each row, of as many instructions as each has."""
    rows = [
        IFEvalScoreData(
            prompt_level_strict_acc=torch.tensor([True]),
            inst_level_strict_acc=torch.arange(size) > 0,
            prompt_level_loose_acc=torch.tensor([True]),
            inst_level_loose_acc=torch.arange(size) > 1,
        )
        for size in (1, 2, 3, 4)
    ]
    return TensorDict({"score": lazy_stack(rows), "x": torch.arange(4.0)}, [4])
