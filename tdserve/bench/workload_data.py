"""What the workloads write. Everything that is read back can be traced to the row that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Scale, to_gigabytes

LAYER_PARTS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Pool:
    """Different rows, which a workload writes again and again.

    Attributes:
        rows: The rows.
        number_key: The leaf that holds a row's number in the pool.
        rate_unit: What counts: rows of small ones, bytes of large ones.
    """

    rows: TensorDict
    number_key: str
    rate_unit: Literal["rows/s", "GB/s"]

    @property
    def nbytes(self) -> int:
        """The tensor bytes of all rows."""
        return compute_nbytes(self.rows)

    @property
    def row_nbytes(self) -> int:
        """The tensor bytes of one row."""
        return self.nbytes // len(self.rows)

    def make_rate(self, num_rows: int) -> Scale:
        """Returns the scale of operations on ``num_rows`` rows each."""
        amount = num_rows if self.rate_unit == "rows/s" else to_gigabytes(self.row_nbytes * num_rows)
        return Scale(self.rate_unit, amount)

    def iter_batches(self, num_rows: int) -> Iterator[TensorDict]:
        """Returns the whole batches of ``num_rows`` rows, one after the other, for ever."""
        starts = range(0, len(self.rows) - num_rows + 1, num_rows)
        return cycle([self.rows[start : start + num_rows] for start in starts])

    def check(self, batch: TensorDictBase, *, what: str = "a sample") -> None:
        """Compares every leaf of every row with the pool's row whose number it holds.

        Raises:
            CorruptDataError: A leaf differs, or the pool has no row of this number.
        """
        numbers = batch.get(self.number_key).long()
        if not bool(((numbers >= 0) & (numbers < len(self.rows))).all()):
            expected, actual = f"rows 0 to {len(self.rows) - 1}", str(numbers.tolist())[:200]
            raise CorruptDataError(path=what, expected=expected, actual=actual)
        check_equal(batch, self.rows[numbers], what=what)


def make_transitions(num_rows: int) -> Pool:
    """Returns rows of a control task; ``reward`` is the row's number."""
    generator = torch.Generator().manual_seed(1)
    observation = torch.randn(num_rows + 1, 84, generator=generator)
    action = torch.randn(num_rows, 6, generator=generator)
    reward = torch.arange(num_rows, dtype=torch.float32)
    return Pool(_make_steps(observation, action, reward, generator), "reward", "rows/s")


def make_pixels(num_rows: int) -> Pool:
    """Returns rows of an Atari-like task; ``action`` is the row's number."""
    generator = torch.Generator().manual_seed(2)
    frames = torch.randint(256, (num_rows + 1, 4, 84, 84), dtype=torch.uint8, generator=generator)
    action, reward = torch.arange(num_rows), torch.randn(num_rows, generator=generator)
    return Pool(_make_steps(frames, action, reward, generator), "action", "GB/s")


def _make_steps(
    observation: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, generator: torch.Generator
) -> TensorDict:
    """Returns a row for each action; ``observation`` has one row more."""
    steps = {"observation": observation[:-1].clone(), "action": action, "reward": reward}
    done = torch.rand(len(action), generator=generator) < 0.01
    return TensorDict({**steps, "done": done, "next": {"observation": observation[1:].clone()}}, [len(action)])


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


def compute_nbytes(td: TensorDictBase) -> int:
    """Returns the tensor bytes of a whole tensordict."""
    return sum(leaf.nbytes for leaf in list_tensors(td).values())


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
