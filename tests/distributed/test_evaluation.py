"""Positions against a brute-force ranking with loops and sets, at 1, 2 and 3 processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sattle_dist.collectives import Group
from sattle_dist.evaluator import Positions, break_ties, evaluate, metrics
from sattle_dist.graph import Graph
from tests.distributed.test_step import make_config, make_learner
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

N, R = 23, 2
RULES = ("mean", "optimistic", "pessimistic", "random")


def exact_scores() -> torch.Tensor:
    """Scores of every query [N * 2R, N] in few, exactly representable values: many ties."""
    return torch.randint(-3, 4, (N * 2 * R, N), generator=torch.Generator().manual_seed(5)).float()


def evaluate_exact(group: Group, path: Path, budget: int) -> dict[str, Positions]:
    """Evaluate a model whose score of (source, relation, target) is looked up in exact_scores."""
    graph = Graph.open(path)
    learner, _ = make_learner(make_config("bce", "twomult", dim=N), graph, group)
    learner.loss.budget = budget
    scores = exact_scores()
    shard = learner.table.shard
    # Row of entity e is the unit vector e, so a query vector is the list of its scores.
    learner.table.rows.data = torch.eye(N)[shard.start : shard.stop].contiguous()
    learner.encode = lambda source, relation: scores[source.argmax(1) * 2 * R + relation]  # type: ignore[method-assign]
    return {rule: evaluate(learner, graph, "test", rule, seed=3) for rule in RULES}


def brute_force(splits: dict[str, list[Any]]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Count by hand: for each (source, relation, target), both directions, the candidates above and equal."""
    scores = exact_scores()
    both = {
        name: {(s, r, t) for s, r, t in triples} | {(t, r + R, s) for s, r, t in triples}
        for name, triples in splits.items()
    }
    known = set.union(*both.values())
    counts = {}
    for s, r, t in both["test"]:
        mine = scores[s * 2 * R + r]
        candidates = [c for c in range(N) if c == t or (s, r, c) not in known]
        above = sum(bool(mine[c] > mine[t]) for c in candidates)
        equal = sum(bool(mine[c] == mine[t]) for c in candidates) - 1
        counts[s, r, t] = (above, equal)
    return counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_positions_equal_brute_force(world_size: int, tmp_path: Path) -> None:
    splits = random_splits(2, num_entities=N, num_relations=R, num_triples=400)
    path = write_graph(tmp_path / "g", splits, num_entities=N, num_relations=R)
    expected = brute_force(splits)
    assert sum(equal > 0 for _, equal in expected.values()) > 20
    for budget in (1, 1 << 20):  # one query at a time, and all at once
        for by_rule in run_processes(world_size, evaluate_exact, path, budget):
            for rule, p in by_rule.items():
                triples = list(zip(p.source.tolist(), p.relation.tolist(), p.target.tolist(), strict=True))
                assert len(triples) == len(set(triples))
                assert set(triples) == set(expected)
                for triple, position in zip(triples, p.position, strict=True):
                    above, equal = expected[triple]
                    low, high = 1 + above, 1 + above + equal
                    want = {"mean": (low + high) / 2, "optimistic": low, "pessimistic": high}
                    if rule == "random":
                        assert low <= position <= high
                        assert position == int(position)
                    else:
                        assert position == want[rule]


def test_random_ties_are_uniform_and_seeded() -> None:
    above, equal = np.full(60_000, 4), np.full(60_000, 2)
    positions = break_ties(above, equal, "random", seed=1)
    assert np.bincount(positions.astype(int), minlength=8)[5:8] == pytest.approx([20_000] * 3, rel=0.03)
    assert np.array_equal(positions, break_ties(above, equal, "random", seed=1))
    assert not np.array_equal(positions, break_ties(above, equal, "random", seed=2))


def test_a_model_that_scores_everything_equal_gets_chance() -> None:
    above, equal = np.zeros(50_000, np.int64), np.full(50_000, 99)
    chance = np.mean(1 / np.arange(1, 101))
    assert metrics(break_ties(above, equal, "random", seed=0))["mrr"] == pytest.approx(chance, rel=0.05)
    assert metrics(break_ties(above, equal, "mean", seed=0))["mrr"] == pytest.approx(1 / 50.5)


def test_metrics_by_hand() -> None:
    assert metrics(np.array([1.0, 2.0, 4.0, 20.0])) == pytest.approx(
        {"mrr": (1 + 1 / 2 + 1 / 4 + 1 / 20) / 4, "hits@1": 0.25, "hits@3": 0.5, "hits@10": 0.75}
    )


def evaluate_broken(group: Group, path: Path) -> float:
    graph = Graph.open(path)
    learner, _ = make_learner(make_config("bce", "twomult"), graph, group)
    learner.table.rows.data.fill_(float("nan"))
    return float(evaluate(learner, graph, "test", "optimistic", seed=0).position.min())


def test_a_diverged_model_ranks_last(tmp_path: Path) -> None:
    """Not-a-number scores must not look like a perfect model."""
    splits = {"train": [(0, 0, 1)], "test": [(1, 0, 2)]}
    path = write_graph(tmp_path / "g", splits, num_entities=N, num_relations=1)
    assert run_processes(2, evaluate_broken, path)[0] > N / 2
