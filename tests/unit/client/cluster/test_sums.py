from __future__ import annotations

from dataclasses import replace

import tdserve
from tdserve.client.cluster.sums import add_up_parts


def test_parts_when_rows_of_some_are_damaged_then_counted_and_named_by_the_numbers_that_they_have_in_the_store(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote({"x": [1.0]}, name)
    part = client.describe(name)
    assert (part.num_damaged, part.damaged_rows) == (0, ())
    parts = {
        1: replace(part, num_damaged=1, damaged_rows=(5,)),
        0: replace(part, num_damaged=9, damaged_rows=tuple(range(7))),
        2: replace(part, num_damaged=1, damaged_rows=(1,)),
    }
    whole = add_up_parts(name, "", parts, lambda shard: 100 * shard, num_shards=3)
    assert (whole.num_damaged, whole.damaged_rows) == (11, (*range(7), 105))
    assert add_up_parts(name, "", parts, num_shards=3).damaged_rows == ()
