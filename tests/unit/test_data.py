"""How a global batch is cut over the ranks."""

from __future__ import annotations

import math

import pytest

from sattle_dist.data import part_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("num_queries", [1, 5, 63, 64, 150, 512, 563, 4096])
def test_parts_hold_the_batch(num_queries: int, world_size: int) -> None:
    size = part_size(num_queries, world_size)
    least = math.ceil(num_queries / world_size)
    assert least <= size < least + 16
    if least >= 64:
        assert size * world_size % 16 == 0  # whole cache lines of scores
    else:
        assert size == least
