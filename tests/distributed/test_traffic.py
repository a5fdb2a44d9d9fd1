"""What travels and what is stored: bytes per step do not grow with the entities, the table is cut evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sattle_dist.collectives import Group
from sattle_dist.graph import Graph
from tests.distributed.test_step import make_config, make_learner
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes


def count_bytes(group: Group, path: Path, loss: str) -> dict[str, Any]:
    learner, batches = make_learner(make_config(loss, "twomult", batch_size=64), Graph.open(path), group)
    for step, batch in enumerate(batches.epoch(0)):
        learner.step(batch, 0, step, rate=0.001, report=False)
    table = [p for name, p in learner.named_parameters() if name.startswith("table.")]
    state = [t for p in table for t in (p, *learner.optimizer.state[p].values()) if t.dim()]
    return {"sent": dict(group.bytes_sent), "state_bytes": sum(t.numel() * t.element_size() for t in state)}


@pytest.mark.parametrize("loss", ["bce", "softmax", "filtered"])
def test_traffic_does_not_grow_with_entities(loss: str, tmp_path: Path) -> None:
    """The same facts among 10^4 and 10^6 entities; counted at the collectives."""
    splits = random_splits(0, num_entities=500, num_relations=2, num_triples=400)
    sent = {}
    for num_entities in (10_000, 1_000_000):
        spread = num_entities // 500
        spread_out = {name: [(s * spread, r, t * spread) for s, r, t in triples] for name, triples in splits.items()}
        path = write_graph(tmp_path / str(num_entities), spread_out, num_entities=num_entities, num_relations=2)
        results = run_processes(2, count_bytes, path, loss)
        sent[num_entities] = [result["sent"] for result in results]
        row_bytes = (9 + 1) * 4 * 3  # a row and its bias, each with two moments
        total = num_entities * row_bytes
        for result in results:
            assert abs(result["state_bytes"] - total / 2) <= row_bytes
    assert sent[10_000] == sent[1_000_000]
    kinds = {"batch plan", "source rows", "source gradients", "queries", "query gradients"}
    kinds |= {"batch-norm moments", "encoder gradients"}
    assert set(sent[10_000][0]) == kinds | ({"softmax"} if loss != "bce" else set())
    assert all(n > 0 for rank in sent[10_000] for n in rank.values())


def repeated_sources(group: Group, path: Path) -> int:
    learner, batches = make_learner(make_config("bce", "twomult", batch_size=64), Graph.open(path), group)
    batch = next(batches.epoch(0))
    learner.table.lookup(batch.lookup)
    return group.bytes_sent["source rows"]


def test_a_repeated_source_travels_once(tmp_path: Path) -> None:
    """Entity 9, on the second rank, asks 8 queries with different relations: its row is sent to the first rank once."""
    splits = {"train": [(9, r, r) for r in range(8)]}
    path = write_graph(tmp_path / "g", splits, num_entities=10, num_relations=8)
    row = 9 * 4
    first, second = run_processes(2, repeated_sources, path)
    # 16 queries: 8 with source 9, and 8 inverse ones with sources 0 to 7. Rank 1 owns 5 to 9, rank 0 owns 0 to 4.
    assert first % row == 0
    assert second % row == 0
    assert 0 < second <= 4 * row  # of 5, 6, 7 and 9, each at most once, though 9 stands in several of rank 0's queries
    assert 0 < first <= 5 * row
