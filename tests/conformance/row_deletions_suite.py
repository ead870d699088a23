"""The tests of deleting a table's rows that the service must pass over every transport."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, SelectionError
from tests.conformance.suite import Suite

NUM_ROWS = 10

MANY_ROWS = 300_000
"""So many rows that their numbers and generations do not fit into one message."""


def make_rows(start: int, num_rows: int = NUM_ROWS) -> TensorDict:
    """Returns rows that show their number."""
    return TensorDict({"number": torch.arange(start, start + num_rows)}, [num_rows])


class RowDeletionsSuite(Suite):
    """The requirements of deletions. A subclass gives ``connect``."""

    def test_delete_when_other_rows_have_the_places_of_a_sample_then_they_stay(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, like=make_rows(0)[0], capacity=NUM_ROWS)
        table.extend(make_rows(0))
        sample = table.sample(8 * NUM_ROWS)
        index, generation = sample["index"], sample["generation"]
        table.extend(make_rows(100, 4))  # in the places of the rows 0 to 3
        kept = set(range(4, NUM_ROWS)) - set(sample["number"].tolist())
        assert table.delete(index, generation=generation) == NUM_ROWS - 4 - len(kept)
        assert sorted(table[:]["number"].tolist()) == sorted({100, 101, 102, 103} | kept)
        for _ in range(2):
            assert table.delete(sample) == 0
        assert len(table) == 4 + len(kept)

    def test_delete_when_part_of_a_row_was_written_then_it_is_still_the_row_of_the_sample(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, like=make_rows(0)[0], capacity=NUM_ROWS)
        table.extend(make_rows(0))
        sample = table.sample(1)
        table.set_at_("number", torch.tensor([-1]), sample)
        assert table.delete(sample) == 1
        assert -1 not in table[:]["number"].tolist()

    def test_delete_when_bare_numbers_are_given_then_whatever_rows_have_them(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, like=make_rows(0)[0], capacity=NUM_ROWS)
        table.extend(make_rows(0))
        sample = table.sample(1)
        table.extend(make_rows(100))
        assert table.delete(sample["index"]) == 1
        with pytest.raises(SelectionError, match="not live"):
            table.delete(sample["index"])
        with pytest.raises(SelectionError, match="has rows 0 to 9"):
            table.delete([NUM_ROWS], generation=[2])
        with pytest.raises(InvalidRequestError, match="2 generations for 3 rows"):
            table.delete([0, 1, 2], generation=[2, 2])
        assert len(table) == NUM_ROWS - 1

    def test_delete_when_a_sample_has_more_rows_than_a_message_names_then_exactly_these(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, like=make_rows(0)[0], capacity=MANY_ROWS)
        table.extend(make_rows(0, MANY_ROWS))
        table.extend(make_rows(0, 5))  # so that generations differ
        anyhow = torch.randperm(MANY_ROWS)
        generation = table.find_generations(anyhow)
        table.extend(make_rows(MANY_ROWS, 100))  # the rows 5 to 104
        gone = anyhow[:200_000]
        is_new = (gone >= 5) & (gone < 105)
        assert table.delete(gone, generation=generation[:200_000]) == 200_000 - int(is_new.sum())
        kept = torch.cat([anyhow[200_000:], gone[is_new]])
        assert (table.find_generations(kept) >= 0).all()
        assert len(table) == len(kept)
