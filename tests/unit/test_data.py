"""How a global batch is cut over the ranks, and what its queries weigh."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from sattle_dist.data import part_size, weigh
from sattle_dist.graph import SPLITS, Graph
from tests.graphs import random_splits, write_graph


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


def test_a_graph_that_is_held_stays_what_it_was(tmp_path: Path) -> None:
    """Also where a graph of the same size takes its place: a run goes on with what it began with."""
    for seed in (1, 2):
        splits = random_splits(seed, num_entities=20, num_relations=2, num_triples=60)
        write_graph(tmp_path / str(seed), splits, num_entities=20, num_relations=2)
    graph = Graph.open(tmp_path / "1")
    graph.hold()
    before = [graph.index(split).targets.tolist() for split in SPLITS]
    for name in SPLITS:
        assert len(graph.index(name)) > 0
    (tmp_path / "1").rename(tmp_path / "old")
    (tmp_path / "2").rename(tmp_path / "1")
    shutil.rmtree(tmp_path / "old")
    assert [graph.index(split).targets.tolist() for split in SPLITS] == before
    assert [Graph.open(tmp_path / "1").index(split).targets.tolist() for split in SPLITS] != before


def test_weights_are_powers_of_the_number_of_targets() -> None:
    count = np.array([1, 4, 9, 0])
    for power, query, target in [(0.5, [1, 2, 3, 0], [1, 1 / 2, 1 / 3, 0]), (0, [1, 1, 1, 0], [1, 1 / 4, 1 / 9, 0])]:
        query_weight, target_weight = weigh(count, power)
        np.testing.assert_allclose(query_weight, query)
        np.testing.assert_allclose(target_weight, target)
    query_weight, target_weight = weigh(count, 1)
    assert query_weight.tolist() == [1, 4, 9, 0]
    assert target_weight is None
