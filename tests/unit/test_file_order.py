"""The authors' batches, against triples written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.file_order import in_batches, places
from benchmarks.triples import ungroup
from sattle_dist.graph import Graph
from tests.graphs import write_graph

LINES = ["d\tr\ta", "a\tq\tb", "a\tr\td", "a\tq\tc", "c\tq\ta"]
TRIPLES = [(3, 1, 0), (0, 0, 1), (0, 1, 3), (0, 0, 2), (2, 0, 0)]  # the same; e is known from valid alone


def test_batches_follow_the_file(tmp_path: Path) -> None:
    for name, lines in (("train", LINES), ("valid", ["e\tq\ta"]), ("test", ["b\tr\tc"])):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    graph = Graph.open(write_graph(tmp_path / "g", {"train": TRIPLES}, num_entities=5, num_relations=2))
    index = ungroup(graph.index("train"))
    forward, inverse = places(index, tmp_path)
    order = in_batches(forward, inverse, 2)
    source, relation = index.split_keys(index.queries[order])
    found = list(zip(source.tolist(), relation.tolist(), index.targets[order].tolist(), strict=True))
    backward = [(t, r + 2, s) for s, r, t in TRIPLES]
    assert found == [*TRIPLES[:2], *backward[:2], *TRIPLES[2:4], *backward[2:4], TRIPLES[4], backward[4]]
    assert sorted(order) == list(np.arange(10))
