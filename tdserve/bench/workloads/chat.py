"""Chat histories, as jobs after pre-training pass them around: texts, dicts, and tokens of every length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Figure, Scale, Target
from tdserve.bench.floors import MEMCPY, memcpy_ring
from tdserve.bench.measure import Pacing, Task, timed_round
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import (
    NUM_BATCHES_UNDER_WAY,
    pipelined_extends,
    pipelined_samples,
    single_samples,
)
from tdserve.client.tables.replay import ReplayHandle

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


BATCH_ROWS = 64
POOL_ROWS = 1_024
NUM_EXTENDS_UNDER_WAY = 8
"""As many as batches in a pipeline of samples."""

NUM_MESSAGES = 5

STORE = "chat"
DIALOGUES = "dialogues"

Dialogue = list[dict[str, str]]
"""The messages of one chat."""

WRITTEN: dict[Wire, Target] = {"gloo": Target("at least", 38_000), "shm": Target("at least", 100_000)}
READ: dict[Wire, Target] = {"gloo": Target("at least", 41_900), "shm": Target("at least", 100_000)}
"""On one machine what the plan asks; over gloo what the best peer reached on this workload."""


@dataclass(frozen=True)
class Chats:
    """The store under test and its content.

    Attributes:
        batches: What is written, built before anything is timed.
    """

    stage: Stage
    replay: ReplayHandle
    histories: list[History]
    batches: list[TensorDict]

    @property
    def nbytes(self) -> int:
        """Payload of a mean batch."""
        return sum(history.nbytes for history in self.histories) // len(self.batches)

    @property
    def pacing(self) -> Pacing:
        """Enough batches for several to be under way."""
        return Pacing(self.stage.sizes.round_s, min_ops=2 * NUM_EXTENDS_UNDER_WAY)

    def check(self, batch: TensorDictBase) -> None:
        """Raises CorruptDataError unless every row is one of the histories."""
        check_histories(batch, self.histories, what="chat histories")


def measure_chat(stage: Stage) -> Iterator[Figure]:
    """Batches of 64 histories: written with several under way, sampled one by one and ahead; messages by number."""
    scale = Scale("rows/s", BATCH_ROWS)
    with _open_chats(stage) as chats:
        name = f"extend {BATCH_ROWS} histories, {NUM_EXTENDS_UNDER_WAY} under way"
        floors, targets = _floor(chats, is_read=False), (WRITTEN[stage.wire],)
        yield stage.measure(STORE, name, scale, _writes(chats), floors, targets=targets)
        checked = (chats.replay, BATCH_ROWS, chats.pacing, chats.check)
        name = f"sample {BATCH_ROWS} histories, one by one"
        yield stage.measure(STORE, name, scale, single_samples(*checked), _floor(chats, is_read=True))
        name = f"sample {BATCH_ROWS} histories, {NUM_BATCHES_UNDER_WAY} under way"
        floors, targets = _floor(chats, is_read=True), (READ[stage.wire],)
        yield stage.measure(STORE, name, scale, pipelined_samples(*checked), floors, targets=targets)
        dialogues = [make_dialogue(chats.histories, number) for number in range(POOL_ROWS)]
    with _open_dialogues(stage, dialogues) as replay:
        name = f"read {BATCH_ROWS} by number, every value forced"
        yield stage.measure(STORE, name, scale, _forced_reads(replay, dialogues, chats.pacing))


def make_dialogue(histories: Sequence[History], number: int) -> Dialogue:
    """Messages of a chat, of several histories from this one on."""
    found = []
    for place in range(NUM_MESSAGES):
        history = histories[(number * NUM_MESSAGES + place) % len(histories)]
        found.append(
            {"role": "assistant", "content": history.response}
            if place % 2
            else {"role": "user", "content": history.prompt}
        )
    return found


@contextmanager
def _open_dialogues(stage: Stage, dialogues: Sequence[Dialogue]) -> Iterator[ReplayHandle]:
    """A store with one dialogue in each row, and its number."""
    like = TensorDict({"messages": NonTensorData(dialogues[0]), "number": torch.tensor(0)}, [])
    replay = stage.client.create_replay(DIALOGUES, like=like, capacity=len(dialogues))
    try:
        for start in range(0, len(dialogues), BATCH_ROWS):
            numbers = torch.arange(start, start + BATCH_ROWS)
            messages = NonTensorStack(*dialogues[start : start + BATCH_ROWS])
            replay.extend(TensorDict({"messages": messages, "number": numbers}, [BATCH_ROWS]))
        yield replay
    finally:
        stage.client.delete(DIALOGUES)


def _forced_reads(replay: ReplayHandle, dialogues: Sequence[Dialogue], pacing: Pacing) -> Task:
    generator = torch.Generator().manual_seed(4)

    def read() -> list[tuple[int, Dialogue]]:
        batch = replay[torch.randint(len(dialogues), (BATCH_ROWS,), generator=generator)]
        return list(zip(batch.get("number").tolist(), batch.get("messages").tolist(), strict=True))

    def check(read: list[tuple[int, Dialogue]]) -> None:
        for number, found in read:
            if found != dialogues[number]:
                raise CorruptDataError(path="dialogues", expected=str(dialogues[number])[:200], actual=str(found)[:200])

    return Task(lambda: timed_round(read, pacing), check)


@contextmanager
def _open_chats(stage: Stage) -> Iterator[Chats]:
    """A full store: no row is written for the first time while it is measured."""
    histories = make_histories(POOL_ROWS)
    batches = [make_batch(histories[start : start + BATCH_ROWS]) for start in range(0, POOL_ROWS, BATCH_ROWS)]
    capacity = stage.sizes.num_histories
    replay = stage.client.create_replay(STORE, like=histories[0].row(), capacity=capacity, ragged=list(RAGGED_KEYS))
    try:
        next_batch = cycle(batches).__next__
        for _ in range(capacity // BATCH_ROWS):
            replay.extend(next_batch())
        yield Chats(stage, replay, histories, batches)
    finally:
        stage.client.delete(STORE)


def _writes(chats: Chats) -> Task:
    def check(index: torch.Tensor, batch: TensorDictBase) -> None:
        found = chats.replay[index]
        chats.check(found)
        prompts, expected = (each.get("prompt").tolist() for each in (found, batch))
        if prompts != expected:
            raise CorruptDataError(path="chat histories read back", expected=expected[0], actual=str(prompts[0]))

    return pipelined_extends(chats.replay, cycle(chats.batches).__next__, NUM_EXTENDS_UNDER_WAY, chats.pacing, check)


def _floor(chats: Chats, *, is_read: bool) -> dict[str, Task]:
    """As many bytes, and nothing of what makes them values: over the wire, or in memory."""
    stage, nbytes = chats.stage, chats.nbytes
    if stage.wire == "gloo":
        stream = stage.gloo.stream_in if is_read else stage.gloo.stream_out
        return {"gloo stream": stream(nbytes)}
    whole = nbytes * len(chats.batches)
    return {MEMCPY: memcpy_ring(nbytes, source_nbytes=whole, ring_nbytes=whole, pacing=chats.pacing)}
