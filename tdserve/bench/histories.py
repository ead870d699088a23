"""Chat histories: two texts, a tool call and a number of tokens of its own per row; and when two of them are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError

WORDS = ("the", "agent", "reads", "a", "page", "and", "answers", "café", "with", "numbers", "from", "two", "tables")

TEXT_CHARACTERS = (50, 500)
NUM_TOKENS = (10, 2_000)
VOCABULARY = 128_000

RAGGED_KEYS = ("tokens",)
"""The leaves whose rows differ in length."""


@dataclass(frozen=True)
class History:
    """One chat. ``prompt`` starts with its number, so that what is read can be traced to what was written."""

    prompt: str
    response: str
    tool_call: dict[str, Any]
    tokens: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and of the texts in UTF-8; the tool call as Python prints it."""
        texts = (self.prompt, self.response, repr(self.tool_call))
        return self.tokens.nbytes + sum(len(text.encode()) for text in texts)

    def row(self) -> TensorDict:
        """A tensordict of one row."""
        return TensorDict(
            {
                "prompt": NonTensorData(self.prompt),
                "response": NonTensorData(self.response),
                "tool_call": NonTensorData(self.tool_call),
                "tokens": self.tokens,
            },
            [],
        )


def make_histories(num_histories: int) -> list[History]:
    """The same ones in every run."""
    chance = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(num_histories):
        num_tokens = chance.randint(*NUM_TOKENS)
        tool_call = {
            "name": chance.choice(("search", "calculate", "open_page")),
            "call_id": number,
            "temperature": chance.random(),
            "arguments": {
                "query": _text(chance, 40),
                "limit": chance.randint(1, 50),
                "is_exact": chance.random() < 0.5,
            },
        }
        tokens = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
        prompt = f"{number} {_text(chance, chance.randint(*TEXT_CHARACTERS))}"
        found.append(History(prompt, _text(chance, chance.randint(*TEXT_CHARACTERS)), tool_call, tokens))
    return found


def make_batch(histories: Sequence[History]) -> TensorDict:
    """One tensordict of all of them; the tokens as a jagged nested tensor."""
    tokens = torch.nested.nested_tensor([history.tokens for history in histories], layout=torch.jagged)
    return TensorDict(
        {
            "prompt": NonTensorStack(*[history.prompt for history in histories]),
            "response": NonTensorStack(*[history.response for history in histories]),
            "tool_call": NonTensorStack(*[history.tool_call for history in histories]),
            "tokens": tokens,
        },
        [len(histories)],
    )


def check_histories(batch: TensorDictBase, histories: Sequence[History], *, what: str) -> None:
    """Compares every row with the history that its prompt names.

    Raises:
        CorruptDataError: Some leaf differs in type or value, or a row is none of these histories.
    """
    prompts, responses, calls = (batch.get(key).tolist() for key in ("prompt", "response", "tool_call"))
    rows = zip(prompts, responses, calls, batch.get("tokens").unbind(), strict=True)
    for prompt, response, tool_call, tokens in rows:
        number = str(prompt).partition(" ")[0]
        history = histories[int(number)] if number.isdecimal() and int(number) < len(histories) else None
        if history is None or prompt != history.prompt:
            raise CorruptDataError(path=f"{what}, key 'prompt'", expected="a history", actual=repr(prompt)[:100])
        for key, found, expected in (
            ("response", response, history.response),
            ("tool_call", tool_call, history.tool_call),
        ):
            if repr(found) != repr(expected):  # 1 == 1.0 == True, and they are printed apart
                raise CorruptDataError(path=f"{what}, key {key!r}", expected=str(expected), actual=str(found)[:200])
        if tokens.dtype != history.tokens.dtype or not torch.equal(tokens, history.tokens):
            raise CorruptDataError(
                path=f"{what}, key 'tokens'", expected=f"{len(history.tokens)} tokens", actual=f"{tuple(tokens.shape)}"
            )


def _text(chance: random.Random, num_characters: int) -> str:
    words: Iterator[str] = cycle(chance.sample(WORDS, len(WORDS)))
    text = ""
    while len(text) < num_characters:
        text += next(words) + " "
    return text[:num_characters]
