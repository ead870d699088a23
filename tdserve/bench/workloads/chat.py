"""Chat histories, as jobs after pre-training pass them around: texts, dicts, and tokens of every length."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Scale
from tdserve.bench.floors import MEMCPY, make_memcpy
from tdserve.bench.measure import Pacing, Task, make_task
from tdserve.bench.stage import Case, Stage
from tdserve.bench.workload_data import check_equal
from tdserve.bench.workloads.replay_rounds import NUM_BATCHES_UNDER_WAY, describe_window, make_extends, make_samples

WORDS = ("the", "agent", "reads", "a", "page", "and", "answers", "café", "with", "numbers", "from", "two", "tables")

TEXT_CHARACTERS = (50, 500)
NUM_TOKENS = (10, 2_000)
VOCABULARY = 128_000

BATCH_ROWS = 64
POOL_ROWS = 1_024
NUM_EXTENDS_UNDER_WAY = 8
"""Extends under way: as many as a pipeline of samples has batches."""

NUM_MESSAGES = 5

STORE = "chat"
DIALOGUES = "dialogues"

History = dict[str, Any]
"""One chat: prompt, response, tool call and tokens. The prompt starts with the number of the history, so that what is
read can be traced to what was written."""

Dialogue = list[dict[str, str]]
"""The messages of one chat."""


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
        found.append({"prompt": f"{number} {prompt}", "response": response, "tool_call": tool_call, "tokens": tokens})
    return found


def compute_nbytes(history: History) -> int:
    """Returns the bytes of the tokens and of the texts in UTF-8; the tool call counts as Python prints it."""
    return sum(
        value.nbytes if isinstance(value, torch.Tensor) else len(str(value).encode()) for value in history.values()
    )


def make_batch(histories: Sequence[History]) -> TensorDict:
    """Returns one tensordict of all histories; their tokens are a jagged nested tensor."""
    columns: dict[str, Any] = {key: [history[key] for history in histories] for key in histories[0]}
    tokens = torch.nested.nested_tensor(columns.pop("tokens"), layout=torch.jagged)
    values = {key: NonTensorStack(*column) for key, column in columns.items()}
    return TensorDict({**values, "tokens": tokens}, [len(histories)])


def make_row(history: History) -> TensorDict:
    """Returns a tensordict of one row."""
    return TensorDict({key: value if key == "tokens" else NonTensorData(value) for key, value in history.items()}, [])


def check_histories(batch: TensorDictBase, histories: Sequence[History], *, what: str) -> None:
    """Compares every row with the history that its prompt names.

    Raises:
        CorruptDataError: A leaf differs in type or value, or a row is not one of these histories.
    """
    values = {key: batch.get(key).tolist() for key in ("prompt", "response", "tool_call")}
    columns = {**values, "tokens": batch.get("tokens").unbind()}
    for row in zip(*columns.values(), strict=True):
        number = str(row[0]).partition(" ")[0]
        if not number.isdecimal() or int(number) >= len(histories):
            raise CorruptDataError(path=f"{what}, key 'prompt'", expected="a history", actual=repr(row[0])[:100])
        for key, found in zip(columns, row, strict=True):
            expected = histories[int(number)][key]
            if not _is_same(found, expected):
                expected, actual = str(expected)[:200], str(found)[:200]
                raise CorruptDataError(path=f"{what}, key {key!r}", expected=expected, actual=actual)


def _is_same(found: object, expected: object) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return repr(found) == repr(expected)  # 1 == 1.0 == True, but they are printed differently


def make_dialogue(histories: Sequence[History], number: int) -> Dialogue:
    """Returns the messages of a chat, taken from several histories from this one on."""
    first = number * NUM_MESSAGES
    chosen = [histories[place % len(histories)] for place in range(first, first + NUM_MESSAGES)]
    turns = cycle([("user", "prompt"), ("assistant", "response")])
    return [{"role": role, "content": history[key]} for history, (role, key) in zip(chosen, turns, strict=False)]


def _make_text(chance: random.Random, num_characters: int) -> str:
    words = cycle(chance.sample(WORDS, len(WORDS)))
    text = ""
    while len(text) < num_characters:
        text += next(words) + " "
    return text[:num_characters]


def measure_chat(stage: Stage) -> Generator[Case]:
    """Measures batches of 64 histories, written and sampled, and of dialogues, whose values are all decoded."""
    histories = make_histories(POOL_ROWS)
    pacing = Pacing(stage.sizes.round_s, min_ops=2 * NUM_EXTENDS_UNDER_WAY)  # enough for several to be under way
    yield from _measure_histories(stage, histories, pacing)
    yield from _measure_dialogues(stage, [make_dialogue(histories, number) for number in range(POOL_ROWS)], pacing)


def _measure_histories(stage: Stage, histories: list[History], pacing: Pacing) -> Iterator[Case]:
    """Writes histories with several extends under way, and samples them one by one and ahead.

    The floors move as many bytes, and nothing of what makes them values: over the wire, or in memory. The store is full
    before anything is measured.
    """
    batches = [make_batch(histories[start : start + BATCH_ROWS]) for start in range(0, POOL_ROWS, BATCH_ROWS)]
    whole = sum(map(compute_nbytes, histories))
    nbytes = whole // len(batches)
    check = partial(check_histories, histories=histories, what="chat histories")

    def make_floors(*, is_read: bool) -> dict[str, Task]:
        if stage.transport == "shm":
            return {MEMCPY: make_memcpy(nbytes, source_nbytes=whole, ring_nbytes=whole)}
        return {"gloo stream": stage.link.make_floor(**{"back" if is_read else "out": nbytes})}

    capacity = stage.sizes.num_histories
    filling = islice(cycle(batches), capacity // BATCH_ROWS)
    with stage.open_replay(STORE, make_row(histories[0]), capacity, filling, ragged=["tokens"]) as replay:

        def check_written(index: torch.Tensor, batch: TensorDictBase) -> None:
            found = replay[index]
            check(found)
            prompts, expected = (each.get("prompt").tolist() for each in (found, batch))
            if prompts != expected:
                raise CorruptDataError(path="chat histories read back", expected=expected[0], actual=str(prompts[0]))

        rate = Scale("rows/s", BATCH_ROWS)
        extends = make_extends(replay, cycle(batches), NUM_EXTENDS_UNDER_WAY, check_written)
        name = f"extend {BATCH_ROWS} histories, {describe_window(NUM_EXTENDS_UNDER_WAY)}"
        yield Case(name, rate, extends, make_floors(is_read=False), pacing)
        for window in (1, NUM_BATCHES_UNDER_WAY):
            samples = make_samples(replay, BATCH_ROWS, window, check)
            name = f"sample {BATCH_ROWS} histories, {describe_window(window)}"
            yield Case(name, rate, samples, make_floors(is_read=True), pacing)


def _measure_dialogues(stage: Stage, dialogues: Sequence[Dialogue], pacing: Pacing) -> Iterator[Case]:
    """Writes and reads rows with one dialogue and its number in each; what is read is decoded, every value of it."""
    like = TensorDict({"messages": NonTensorData(dialogues[0]), "number": torch.tensor(0)}, [])
    batches = [
        TensorDict(
            {
                "messages": NonTensorStack(*dialogues[start : start + BATCH_ROWS]),
                "number": torch.arange(start, start + BATCH_ROWS),
            },
            [BATCH_ROWS],
        )
        for start in range(0, POOL_ROWS, BATCH_ROWS)
    ]
    generator = torch.Generator().manual_seed(4)
    rate = Scale("rows/s", BATCH_ROWS)
    with stage.open_replay(DIALOGUES, like, POOL_ROWS, batches) as replay:

        def read() -> list[tuple[int, Dialogue]]:
            return force(replay[torch.randint(len(dialogues), (BATCH_ROWS,), generator=generator)])

        def force(batch: TensorDictBase) -> list[tuple[int, Dialogue]]:
            return list(zip(batch.get("number").tolist(), batch.get("messages").tolist(), strict=True))

        def check(read: list[tuple[int, Dialogue]]) -> None:
            for number, found in read:
                if found != dialogues[number]:
                    expected, actual = str(dialogues[number])[:200], str(found)[:200]
                    raise CorruptDataError(path="dialogues", expected=expected, actual=actual)

        def check_written(index: torch.Tensor, batch: TensorDictBase) -> None:
            found = replay[index]
            check(force(found))
            check_equal(found, batch.select("number"), what="dialogues read back")

        for window in (1, NUM_EXTENDS_UNDER_WAY):
            extends = make_extends(replay, cycle(batches), window, check_written)
            yield Case(f"write {BATCH_ROWS} dialogues, {describe_window(window)}", rate, extends, pacing=pacing)
        yield Case(f"read {BATCH_ROWS} dialogues by number", rate, make_task(read, check), pacing=pacing)
        samples = make_samples(
            replay, BATCH_ROWS, NUM_BATCHES_UNDER_WAY, lambda batch: check(force(batch)), after_each=force
        )
        name = f"sample {BATCH_ROWS} dialogues, {describe_window(NUM_BATCHES_UNDER_WAY)}"
        yield Case(name, rate, samples, pacing=pacing)
