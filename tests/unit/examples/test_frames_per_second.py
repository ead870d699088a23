"""The example programs differ from their originals only in the lines that build the buffer."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

import tdserve.examples
from tdserve.examples.frames_per_second import PROGRAMS, parse_args

CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "cleanrl_dqn": (
        ["from stable_baselines3.common.buffers import ReplayBuffer", "rb = ReplayBuffer("],
        ["from tdserve.sb3 import TDServeReplayBuffer", "rb = TDServeReplayBuffer(", 'name="cleanrl",'],
    ),
    "sb3_dqn": (
        [],
        [
            "from tdserve.sb3 import TDServeReplayBuffer",
            "replay_buffer_class=TDServeReplayBuffer,",
            'replay_buffer_kwargs={"name": "sb3"},',
        ],
    ),
    "torchrl_dqn": (
        [
            "from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer",
            "storage=LazyMemmapStorage(args.buffer_size),",
        ],
        [
            "from torchrl.data import TensorDictReplayBuffer",
            "from tdserve.torchrl import TDServeStorage",
            'storage=TDServeStorage(args.buffer_size, name="torchrl"),',
        ],
    ),
}


def read_code(name: str) -> list[str]:
    """The lines of a program after its docstring, without empty ones."""
    source = (Path(tdserve.examples.__file__).parent / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0]
    assert isinstance(docstring, ast.Expr)
    return [line for line in source.splitlines()[docstring.end_lineno :] if line]


def test_changes_when_listed_then_of_every_program() -> None:
    assert CHANGES.keys() == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_when_compared_with_that_before_then_differs_by_the_lines_of_the_buffer(name: str) -> None:
    lines = [*difflib.ndiff(read_code(f"{name}_before"), read_code(name))]
    removed, added = ([line[2:].strip() for line in lines if line.startswith(sign)] for sign in ("- ", "+ "))
    assert (removed, added) == CHANGES[name]


def test_arguments_when_a_program_is_unknown_then_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args([]).programs == []
    with pytest.raises(SystemExit):
        parse_args(["cleanrl_dqn", "ppo"])
    assert "unknown programs: ppo" in capsys.readouterr().err
