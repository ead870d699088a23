"""Chat histories, as jobs after pre-training pass them around: texts, dicts, and tokens of every length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Figure, Scale
from tdserve.bench.floors import MEMCPY, make_ring_memcpy
from tdserve.bench.measure import Pacing, make_task
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import (
    NUM_BATCHES_UNDER_WAY,
    make_pipelined_extends,
    make_pipelined_samples,
    make_single_samples,
)

WORDS = ("the", "agent", "reads", "a", "page", "and", "answers", "café", "with", "numbers", "from", "two", "tables")

TEXT_CHARACTERS = (50, 500)
NUM_TOKENS = (10, 2_000)
VOCABULARY = 128_000

RAGGED_KEYS = ("tokens",)
"""The leaves whose rows differ in length."""

VALUE_KEYS = ("prompt", "response", "tool_call")
"""The leaves that are no tensors."""

BATCH_ROWS = 64
POOL_ROWS = 1_024
NUM_EXTENDS_UNDER_WAY = 8
"""As many as batches in a pipeline of samples."""

NUM_MESSAGES = 5

STORE = "chat"
DIALOGUES = "dialogues"

Dialogue = list[dict[str, str]]
"""The messages of one chat."""


@dataclass(frozen=True)
class History:
    """One chat. ``prompt`` starts with its number, so that what is read can be traced to what was written."""

    prompt: str
    response: str
    tool_call: dict[str, Any]
    tokens: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and of the texts in UTF-8; the tool call counts as Python prints it."""
        texts = (self.prompt, self.response, repr(self.tool_call))
        return self.tokens.nbytes + sum(len(text.encode()) for text in texts)

    def make_row(self) -> TensorDict:
        """Returns a tensordict of one row."""
        values = {key: NonTensorData(getattr(self, key)) for key in VALUE_KEYS}
        return TensorDict({**values, "tokens": self.tokens}, [])


def make_histories(num_histories: int) -> list[History]:
    """Returns histories, the same ones in every run."""
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
                "query": _make_text(chance, 40),
                "limit": chance.randint(1, 50),
                "is_exact": chance.random() < 0.5,
            },
        }
        tokens = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
        prompt, response = (_make_text(chance, chance.randint(*TEXT_CHARACTERS)) for _ in range(2))
        found.append(History(f"{number} {prompt}", response, tool_call, tokens))
    return found


def make_batch(histories: Sequence[History]) -> TensorDict:
    """Returns one tensordict of all histories; their tokens are a jagged nested tensor."""
    values = {key: NonTensorStack(*[getattr(history, key) for history in histories]) for key in VALUE_KEYS}
    tokens = torch.nested.nested_tensor([history.tokens for history in histories], layout=torch.jagged)
    return TensorDict({**values, "tokens": tokens}, [len(histories)])


def check_histories(batch: TensorDictBase, histories: Sequence[History], *, what: str) -> None:
    """Compares every row with the history that its prompt names.

    Raises:
        CorruptDataError: A leaf differs in type or value, or a row is none of these histories.
    """
    values = (batch.get(key).tolist() for key in VALUE_KEYS)
    for prompt, response, tool_call, tokens in zip(*values, batch.get("tokens").unbind(), strict=True):
        number = str(prompt).partition(" ")[0]
        history = histories[int(number)] if number.isdecimal() and int(number) < len(histories) else None
        if history is None or prompt != history.prompt:
            raise CorruptDataError(path=f"{what}, key 'prompt'", expected="a history", actual=repr(prompt)[:100])
        for key, found in (("response", response), ("tool_call", tool_call)):
            expected = getattr(history, key)
            if repr(found) != repr(expected):  # 1 == 1.0 == True, but they are printed differently
                raise CorruptDataError(path=f"{what}, key {key!r}", expected=str(expected), actual=str(found)[:200])
        if tokens.dtype != history.tokens.dtype or not torch.equal(tokens, history.tokens):
            expected, actual = f"{len(history.tokens)} tokens", f"{tuple(tokens.shape)}"
            raise CorruptDataError(path=f"{what}, key 'tokens'", expected=expected, actual=actual)


def make_dialogue(histories: Sequence[History], number: int) -> Dialogue:
    """Returns the messages of a chat, taken from several histories from this one on."""
    found = []
    for place in range(NUM_MESSAGES):
        history = histories[(number * NUM_MESSAGES + place) % len(histories)]
        role, content = ("assistant", history.response) if place % 2 else ("user", history.prompt)
        found.append({"role": role, "content": content})
    return found


def _make_text(chance: random.Random, num_characters: int) -> str:
    words: Iterator[str] = cycle(chance.sample(WORDS, len(WORDS)))
    text = ""
    while len(text) < num_characters:
        text += next(words) + " "
    return text[:num_characters]


def measure_chat(stage: Stage) -> Iterator[Figure]:
    """Measures batches of 64 histories, written and sampled, and dialogues that are read by number."""
    histories = make_histories(POOL_ROWS)
    pacing = Pacing(stage.sizes.round_s, min_ops=2 * NUM_EXTENDS_UNDER_WAY)  # enough for several to be under way
    yield from _measure_histories(stage, histories, pacing)
    yield _read_dialogues(stage, [make_dialogue(histories, number) for number in range(POOL_ROWS)], pacing)


def _measure_histories(stage: Stage, histories: list[History], pacing: Pacing) -> Iterator[Figure]:
    """Writes histories with several extends under way, and samples them one by one and ahead.

    The floors move as many bytes, and nothing of what makes them values: over the wire, or in memory. The store is full
    before anything is measured.
    """
    batches = [make_batch(histories[start : start + BATCH_ROWS]) for start in range(0, POOL_ROWS, BATCH_ROWS)]
    whole = sum(history.nbytes for history in histories)
    nbytes = whole // len(batches)
    check = partial(check_histories, histories=histories, what="chat histories")
    if stage.wire == "gloo":
        written, read = (
            {"gloo stream": stage.make_gloo_floor(out=nbytes)},
            {"gloo stream": stage.make_gloo_floor(back=nbytes)},
        )
    else:
        ring = nbytes * len(batches)
        written = read = {MEMCPY: make_ring_memcpy(nbytes, source_nbytes=ring, ring_nbytes=ring)}
    capacity = stage.sizes.num_histories
    filling = islice(cycle(batches), capacity // BATCH_ROWS)
    with stage.open_replay(STORE, histories[0].make_row(), capacity, filling, ragged=list(RAGGED_KEYS)) as replay:

        def check_written(index: torch.Tensor, batch: TensorDictBase) -> None:
            found = replay[index]
            check(found)
            prompts, expected = (each.get("prompt").tolist() for each in (found, batch))
            if prompts != expected:
                raise CorruptDataError(path="chat histories read back", expected=expected[0], actual=str(prompts[0]))

        extends = make_pipelined_extends(replay, cycle(batches).__next__, NUM_EXTENDS_UNDER_WAY, check_written)
        sampled = (replay, BATCH_ROWS, check)
        for what, subject, floors in (
            (f"extend {BATCH_ROWS} histories, {NUM_EXTENDS_UNDER_WAY} under way", extends, written),
            (f"sample {BATCH_ROWS} histories, one by one", make_single_samples(*sampled), read),
            (
                f"sample {BATCH_ROWS} histories, {NUM_BATCHES_UNDER_WAY} under way",
                make_pipelined_samples(*sampled),
                read,
            ),
        ):
            yield stage.measure(STORE, what, Scale("rows/s", BATCH_ROWS), subject, floors, pacing=pacing)


def _read_dialogues(stage: Stage, dialogues: Sequence[Dialogue], pacing: Pacing) -> Figure:
    """Reads rows of a store with one dialogue and its number in each."""
    like = TensorDict({"messages": NonTensorData(dialogues[0]), "number": torch.tensor(0)}, [])
    messages = (NonTensorStack(*dialogues[start : start + BATCH_ROWS]) for start in range(0, POOL_ROWS, BATCH_ROWS))
    numbers = torch.arange(POOL_ROWS).view(-1, BATCH_ROWS)
    batches = (
        TensorDict({"messages": values, "number": rows}, [BATCH_ROWS])
        for values, rows in zip(messages, numbers, strict=True)
    )
    generator = torch.Generator().manual_seed(4)
    with stage.open_replay(DIALOGUES, like, POOL_ROWS, batches) as replay:

        def read() -> list[tuple[int, Dialogue]]:
            batch = replay[torch.randint(len(dialogues), (BATCH_ROWS,), generator=generator)]
            return list(zip(batch.get("number").tolist(), batch.get("messages").tolist(), strict=True))

        def check(read: list[tuple[int, Dialogue]]) -> None:
            for number, found in read:
                if found != dialogues[number]:
                    expected, actual = str(dialogues[number])[:200], str(found)[:200]
                    raise CorruptDataError(path="dialogues", expected=expected, actual=actual)

        what, subject = f"read {BATCH_ROWS} by number, every value forced", make_task(read, check)
        return stage.measure(STORE, what, Scale("rows/s", BATCH_ROWS), subject, pacing=pacing)
