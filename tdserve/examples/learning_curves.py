"""Whether programs learn the same with their buffer on a server: TorchRL's DQN with priorities, and SAC.

``python -m tdserve.examples.learning_curves`` trains with each seed twice, on TorchRL's own storage and on that of a
fresh server, prints the returns, and draws the curves with ``--plot PNG``. TorchRL's own priorities need its C++
library, which a released wheel has for one version of torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, StepCounter, TransformedEnv, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate

import tdserve
from tdserve.torchrl import TDServeStorage

BUFFER_SIZE, BATCH_SIZE, FRAMES_PER_BATCH = 20_000, 128, 100
NUM_EPISODES = 10
"""Episodes of one evaluation, without exploration."""


class Problem(NamedTuple):
    """What is to be learned.

    Attributes:
        env_id: Gymnasium's id of the environment.
        num_frames: Steps of one run.
        updates_per_batch: Steps of the optimizer after each batch of frames.
        has_priorities: Whether rows are drawn by their error.
        make_agent: Makes what acts and learns.
    """

    env_id: str
    num_frames: int
    updates_per_batch: int
    has_priorities: bool
    make_agent: Callable[[Any, int], Agent]


class Agent(NamedTuple):
    """An agent.

    Attributes:
        policy: Acts greedily.
        explored: Acts to collect.
        loss: Its losses are the entries whose names begin with ``loss``.
        target: Moves the target network.
        annealed: Called with the number of frames collected so far; None if nothing is annealed.
    """

    policy: Any
    explored: Any
    loss: Any
    target: SoftUpdate
    annealed: EGreedyModule | None


class Evaluation(NamedTuple):
    """Mean return of some episodes without exploration, after a number of frames."""

    num_frames: int
    mean_return: float


def make_env(env_id: str, seed: int) -> TransformedEnv:
    """Makes a seeded environment that counts steps."""
    env = TransformedEnv(GymEnv(env_id, categorical_action_encoding=True), StepCounter())
    env.set_seed(seed)
    return env


def make_dqn(env: TransformedEnv, num_frames: int) -> Agent:
    """Makes a double-network DQN agent for discrete actions."""
    num_inputs = env.observation_spec["observation"].shape[-1]
    network = MLP(in_features=num_inputs, out_features=env.action_spec.n, num_cells=[120, 84])
    policy = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    annealed = EGreedyModule(env.action_spec, annealing_num_steps=num_frames // 2, eps_end=0.05)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.99)
    return Agent(policy, TensorDictSequential(policy, annealed), loss, SoftUpdate(loss, eps=0.995), annealed)


def make_sac(env: TransformedEnv, num_frames: int) -> Agent:
    """Makes a soft actor-critic agent for bounded actions."""
    num_inputs, num_actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = torch.nn.Sequential(
        MLP(in_features=num_inputs, out_features=2 * num_actions, num_cells=[64, 64]), NormalParamExtractor()
    )
    policy = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
        default_interaction_type=ExplorationType.RANDOM,
    )
    value = MLP(in_features=num_inputs + num_actions, out_features=1, num_cells=[64, 64])
    loss = SACLoss(policy, ValueOperator(value, in_keys=["observation", "action"]))
    loss.make_value_estimator(gamma=0.99)
    return Agent(policy, policy, loss, SoftUpdate(loss, eps=0.995), None)


PROBLEMS: Mapping[str, Problem] = {
    "dqn": Problem("CartPole-v1", 20_000, 10, True, make_dqn),
    "sac": Problem("Pendulum-v1", 6_000, 100, False, make_sac),
}


def make_buffer(problem: Problem, storage: Any) -> TensorDictReplayBuffer:
    """Makes TorchRL's buffer over a storage."""
    if problem.has_priorities:
        return TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH_SIZE)
    return TensorDictReplayBuffer(storage=storage, batch_size=BATCH_SIZE)


def train(problem: Problem, seed: int, buffer: TensorDictReplayBuffer) -> list[Evaluation]:
    """Collects and learns in turn; returns the evaluations, one after each twentieth of the frames."""
    torch.manual_seed(seed)
    env = make_env(problem.env_id, seed)
    agent = problem.make_agent(env, problem.num_frames)
    optimizer = torch.optim.Adam(agent.loss.parameters(), lr=1e-3)
    evaluations, num_frames = list[Evaluation](), 0
    collector = Collector(
        env,
        agent.explored,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=problem.num_frames,
        init_random_frames=10 * FRAMES_PER_BATCH,
        auto_register_policy_transforms=True,
    )
    for frames in collector:
        buffer.extend(frames.reshape(-1).exclude("loc", "scale", "action_value", "chosen_action_value"))
        num_frames += frames.numel()
        if agent.annealed is not None:
            agent.annealed.step(frames.numel())
        if num_frames >= 10 * FRAMES_PER_BATCH:
            for _ in range(problem.updates_per_batch):
                update(agent, optimizer, buffer, has_priorities=problem.has_priorities)
        if num_frames % max(problem.num_frames // 20, 1) == 0:
            evaluations.append(Evaluation(num_frames, evaluate(problem.env_id, 1000 + seed, agent.policy)))
    collector.shutdown()
    return evaluations


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, buffer: TensorDictReplayBuffer, *, has_priorities: bool
) -> None:
    """Learns from one batch, weighted by its importance; rows get their error as their next priority."""
    batch = buffer.sample()
    losses = agent.loss(batch)  # TorchRL's losses weight rows by their priority_weight
    optimizer.zero_grad()
    sum(loss for key, loss in losses.items() if key.startswith("loss")).backward()
    optimizer.step()
    agent.target.step()
    if has_priorities:
        buffer.update_tensordict_priority(batch)


def evaluate(env_id: str, seed: int, policy: Any) -> float:
    """Returns the mean return of some episodes without exploration, which run side by side."""
    envs = gymnasium.make_vec(env_id, num_envs=NUM_EPISODES)
    observation, _ = envs.reset(seed=seed)
    returns, is_running = np.zeros(NUM_EPISODES), np.ones(NUM_EPISODES, dtype=bool)
    while is_running.any():
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            seen = TensorDict({"observation": torch.as_tensor(observation, dtype=torch.float32)}, [NUM_EPISODES])
            action = policy(seen)["action"].numpy()
        observation, reward, is_terminated, is_truncated, _ = envs.step(action)
        returns += reward * is_running
        is_running &= ~(is_terminated | is_truncated)
    envs.close()
    return float(returns.mean())


def run(name: str, num_frames: int, seed: int, has_server: bool) -> list[Evaluation]:
    """Trains once, with the buffer in this process or on a server of its own.

    Args:
        num_frames: 0: as many as the problem needs.
    """
    torch.set_num_threads(1)
    problem = PROBLEMS[name]._replace(num_frames=num_frames or PROBLEMS[name].num_frames)
    if not has_server:
        return train(problem, seed, make_buffer(problem, LazyMemmapStorage(BUFFER_SIZE)))
    with tempfile.TemporaryDirectory(prefix="tdserve-") as root, tdserve.Server(root, port=0) as server:
        storage = TDServeStorage(BUFFER_SIZE, address=server.address, name=name)
        return train(problem, seed, make_buffer(problem, storage))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tdserve.examples.learning_curves")
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=f"of {', '.join(PROBLEMS)}; all by default")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each kind")
    parser.add_argument(
        "--frames", type=int, default=0, metavar="N", help="of each run; as many as the problem needs by default"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves into this file")
    args = parser.parse_args(arguments)
    if unknown := {*args.problems} - {*PROBLEMS}:
        parser.error(f"unknown problems: {', '.join(sorted(unknown))}")
    return args


def compare(args: argparse.Namespace) -> Iterator[tuple[str, list[list[Evaluation]], list[list[Evaluation]]]]:
    """Yields each problem with the evaluations of each seed, of TorchRL's storage and of a server's."""
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as processes:
        for name in args.problems or PROBLEMS:
            runs = [
                [processes.submit(run, name, args.frames, seed, has_server) for seed in range(args.seeds)]
                for has_server in (False, True)
            ]
            before, after = [[each.result() for each in kind] for kind in runs]
            yield name, before, after


def describe(runs: Sequence[Sequence[Evaluation]]) -> str:
    """Returns the mean and deviation over seeds, of the last five evaluations and of all."""
    last = [statistics.fmean(each.mean_return for each in evaluations[-5:]) for evaluations in runs]
    whole = [statistics.fmean(each.mean_return for each in evaluations) for evaluations in runs]
    texts = [f"{statistics.fmean(kind):.0f} ± {statistics.pstdev(kind):.0f}" for kind in (last, whole)]
    return f"{texts[0]:>14} {texts[1]:>14}"


def draw(found: Mapping[str, Sequence[Sequence[Sequence[Evaluation]]]], path: str) -> None:
    """Draws the curves of each problem: the mean over seeds, and the range between the lowest and the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 3.5), layout="constrained")
    for axes, (name, kinds) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for label, runs in zip(("TorchRL's storage", "TDServeStorage"), kinds, strict=True):
            frames = [each.num_frames for each in runs[0]]
            returns = torch.tensor([[each.mean_return for each in evaluations] for evaluations in runs])
            axes.plot(frames, returns.mean(0).tolist(), label=label)
            axes.fill_between(frames, returns.amin(0).tolist(), returns.amax(0).tolist(), alpha=0.2)
        axes.set(title=f"{name} on {PROBLEMS[name].env_id}", xlabel="frames", ylabel="return")
        axes.legend()
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and prints a line for each kind of run."""
    args = parse_args(arguments)
    found = {}
    print(f"{'':24} {'last five':>14} {'all':>14}")
    for name, *kinds in compare(args):
        found[name] = kinds
        for label, runs in zip(("TorchRL's storage", "TDServeStorage"), kinds, strict=True):
            print(f"{name} {label:20} {describe(runs)}", flush=True)
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
