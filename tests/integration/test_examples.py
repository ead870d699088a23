"""The example programs run for a short time, and their rows are in the tables of the server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tdserve
from tdserve.examples import frames_per_second, vector_envs
from tests.event_files import read_scalars
from tests.processes import wait_for

FRAMES = {"cleanrl_dqn": 400, "sb3_dqn": 512, "torchrl_dqn": 1_200}
OPTIONS = {
    "cleanrl_dqn": ["--learning-starts", "100", "--train-frequency", "10"],
    "sb3_dqn": ["--learning-starts", "300"],
    "torchrl_dqn": ["--updates-per-batch", "2"],
}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that the programs use


@pytest.fixture(params=["gloo", "shm"])
def client(server: tdserve.Server, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tdserve.Client]:
    """A client of the server that programs find, over the transport that they take."""
    monkeypatch.setenv("TDSERVE_ADDRESS", server.address)
    monkeypatch.setenv("TDSERVE_TRANSPORT", request.param)
    with server.client(transport=request.param, timeout_s=20.0) as connected:
        yield connected
        for name in {"cleanrl", "sb3", "torchrl", "steps"} & {*connected.stores()}:
            connected.delete(name)


def run(name: str, module: str, *options: str) -> None:
    """Runs a program in this process."""
    pytest.importorskip(name.partition("_")[0].replace("cleanrl", "gymnasium").replace("sb3", "stable_baselines3"))
    program = importlib.import_module(f"tdserve.examples.{module}")
    program.train(program.parse_args([frames_per_second.PROGRAMS[name], str(FRAMES[name]), *OPTIONS[name], *options]))


@pytest.mark.slow
@pytest.mark.once("shm")  # the programs are the same
@pytest.mark.parametrize("name", FRAMES)
def test_program_when_run_then_its_rows_are_on_the_server(
    client: tdserve.Client, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = name.removesuffix("_dqn")
    run(name, name)
    wait_for(lambda: client.describe(table).inserts == FRAMES[name], "the rows that were on their way")
    assert client.describe(table).as_dict()["samples"] > 0
    assert " updates/s" in capsys.readouterr().out


LOGGED = {
    "cleanrl_dqn": (["--log-dir"], {"charts/episodic_return", "charts/SPS", "losses/td_loss", "losses/q_values"}),
    "sb3_dqn": (["--tensorboard-log"], {"rollout/ep_rew_mean", "rollout/exploration_rate", "time/fps"}),
    "torchrl_dqn": (["--logger", "tensorboard", "--log-dir"], {"train/loss", "train/episode_length"}),
}
"""Options that name a folder for TensorBoard, and what is found there."""


@pytest.mark.full
@pytest.mark.once("shm")
@pytest.mark.parametrize("name", FRAMES)
def test_program_when_it_logs_then_tensorboard_finds_its_curves(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    options, logged = LOGGED[name]
    run(name, name, *options, str(tmp_path))
    scalars = read_scalars(tmp_path)
    assert scalars.keys() >= logged
    assert all(0 <= step <= FRAMES[name] for values in scalars.values() for step, _ in values)


@pytest.mark.full
@pytest.mark.parametrize("name", FRAMES)
def test_program_when_as_before_then_it_needs_no_server(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, f"{name}_before")
    assert " updates/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.once("shm")
def test_vector_environments_when_each_has_a_writer_then_slices_are_of_one_episode(
    client: tdserve.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--address", client.address, "--num-steps", "300", "--num-envs", "4"]
    slices = vector_envs.main(arguments)
    assert slices.shape == (vector_envs.NUM_SLICES, vector_envs.SLICE_STEPS, 4)
    position, velocity = slices[:, :, 0], slices[:, :, 1]
    moved = position[:, 1:] - position[:, :-1]
    assert np.allclose(moved, 0.02 * velocity[:, :-1], atol=1e-6), "CartPole moves by its velocity, within an episode"
    table = client.replay("steps")
    assert (table.info()["inserts"], len(table)) == (1_200, 1_200)
    assert "frames/s of 4 environments" in capsys.readouterr().out


@pytest.mark.full
def test_rates_when_measured_then_of_both_programs_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    frames_per_second.main(["cleanrl_dqn", "--rounds", "1", "--frames", "300"])
    assert "| cleanrl_dqn |" in capsys.readouterr().out
    with pytest.raises(tdserve.PeerLostError, match="not_a_program"):
        frames_per_second.run_program("not_a_program", [])


@pytest.mark.full
def test_curves_when_made_then_each_kind_of_storage_has_a_line_and_they_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchrl")
    from tdserve.examples import learning_curves

    picture = tmp_path / "curves.png"
    learning_curves.main(["sac", "--seeds", "2", "--frames", "1200", "--plot", str(picture)])
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["last", "five", "all"]
    assert [line.split(" -")[0].strip() for line in lines] == ["sac TorchRL's storage", "sac TDServeStorage"]
    assert picture.read_bytes().startswith(b"\x89PNG")
