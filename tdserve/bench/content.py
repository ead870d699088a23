"""What the workloads write. Everything that is read back can be traced to the row that it came from."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError

LAYER_PARTS = ("query", "key", "value", "output")


def make_transitions(num_rows: int) -> TensorDict:
    """Returns rows of a control task; ``reward`` is the row's number in this pool."""
    generator = torch.Generator().manual_seed(1)
    observation = torch.randn(num_rows + 1, 84, generator=generator)
    action = torch.randn(num_rows, 6, generator=generator)
    return _make_steps(observation, action, torch.arange(num_rows, dtype=torch.float32), generator)


def make_pixels(num_rows: int) -> TensorDict:
    """Returns rows of an Atari-like task; ``action`` is the row's number in this pool."""
    generator = torch.Generator().manual_seed(2)
    frames = torch.randint(256, (num_rows + 1, 4, 84, 84), dtype=torch.uint8, generator=generator)
    return _make_steps(frames, torch.arange(num_rows), torch.randn(num_rows, generator=generator), generator)


def _make_steps(
    observation: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, generator: torch.Generator
) -> TensorDict:
    """Returns a row for each action; ``observation`` has one row more."""
    num_rows = len(action)
    return TensorDict(
        {
            "observation": observation[:-1].clone(),
            "action": action,
            "reward": reward,
            "done": torch.rand(num_rows, generator=generator) < 0.01,
            "next": TensorDict({"observation": observation[1:].clone()}, [num_rows]),
        },
        [num_rows],
    )


def make_weights(num_tensors: int, nbytes: int) -> TensorDict:
    """Returns float32 tensors of equal size, ``nbytes`` in all, nested as modules nest them: four in each layer."""
    width = nbytes // num_tensors // 4
    generator = torch.Generator().manual_seed(3)
    tree = TensorDict({}, [])
    for number in range(num_tensors):
        layer, part = divmod(number, len(LAYER_PARTS))
        tree[f"layer_{layer:05d}", LAYER_PARTS[part]] = torch.randn(width, generator=generator)
    return tree


def stamp(tree: TensorDictBase, number: int) -> None:
    """Writes ``number`` to both ends of every tensor of a tree, so that two versions have no tensor in common."""
    for leaf in list_tensors(tree).values():
        leaf[0] = float(number)
        leaf[-1] = float(number)


def list_tensors(td: TensorDictBase) -> dict[object, torch.Tensor]:
    """Returns the tensor leaves by nested key."""
    return {key: leaf for key, leaf in td.items(True, True) if isinstance(leaf, torch.Tensor)}


def compute_row_nbytes(pool: TensorDictBase) -> int:
    """Returns the tensor bytes of one row."""
    return compute_total_nbytes(pool) // len(pool)


def compute_total_nbytes(td: TensorDictBase) -> int:
    """Returns the tensor bytes of a whole tensordict."""
    return sum(leaf.numel() * leaf.element_size() for leaf in list_tensors(td).values())


def check_rows(batch: TensorDictBase, pool: TensorDictBase, *, source_key: str, what: str) -> None:
    """Compares every leaf of every row with the pool's row whose number it holds in ``source_key``.

    Raises:
        CorruptDataError: A leaf differs, or the pool has no row of this number.
    """
    sources = batch.get(source_key).long()
    if not bool(((sources >= 0) & (sources < len(pool))).all()):
        raise CorruptDataError(path=what, expected=f"rows 0 to {len(pool) - 1}", actual=str(sources.tolist())[:200])
    check_equal(batch, pool[sources], what=what)


def check_equal(actual: TensorDictBase, expected: TensorDictBase, *, what: str) -> None:
    """Compares the leaves of ``expected`` with those of the same keys in ``actual``, which may have more keys.

    Raises:
        CorruptDataError: A leaf differs; the error names the first such key.
    """
    found_leaves = list_tensors(actual)
    for key, leaf in list_tensors(expected).items():
        found = found_leaves.get(key)
        if found is None or found.dtype != leaf.dtype or not torch.equal(found, leaf):
            where = "no such key" if found is None else f"{found.dtype} {tuple(found.shape)}, other values"
            raise CorruptDataError(path=f"{what}, key {key!r}", expected="what was written", actual=where)
