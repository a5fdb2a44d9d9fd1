"""Positions against a brute-force ranking with loops and sets, at 1, 2 and 3 processes and in chunks of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sattle_dist.collectives import Group
from sattle_dist.counting import Counter, Pairs, Sizes
from sattle_dist.evaluator import Positions, break_ties, evaluate
from sattle_dist.graph import Graph
from sattle_dist.metrics import metrics
from sattle_dist.results import make_protocol, make_result
from sattle_dist.sharding import Shard
from tests.distributed.test_step import make_config, make_learner
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

N, R = 23, 2
# Queries at once and rows in a chunk: neither divides a shard of 23, 12 or 8 rows; one of each; all at once.
SHAPES = {
    (3, 5): ("mean", "optimistic", "pessimistic", "random"),
    (1, 1): ("random",),
    (7, 9): ("mean", "random"),
    (1000, N): ("mean", "random"),
}


def exact_scores() -> torch.Tensor:
    """Scores of every query [N * 2R, N] in few, exactly representable values: many ties."""
    return torch.randint(-3, 4, (N * 2 * R, N), generator=torch.Generator().manual_seed(5)).float()


def evaluate_exact(group: Group, path: Path) -> dict[tuple[Any, ...], Positions]:
    """Evaluate a model whose score of (source, relation, target) is looked up in exact_scores, in all ways."""
    graph = Graph.open(path)
    learner, _ = make_learner(make_config("bce", "twomult", dim=N), graph, group)
    scores = exact_scores()
    shard = learner.table.shard
    # Row of entity e is the unit vector e, so a query vector is the list of its scores.
    learner.table.rows.data = torch.eye(N)[shard.start : shard.stop].contiguous()
    learner.encode = lambda source, relation: scores[source.argmax(1) * 2 * R + relation]  # type: ignore[method-assign]
    found = {}
    for shape, rules in SHAPES.items():
        sizes = Sizes(num_queries=shape[0], num_rows=shape[1])
        with mock.patch.object(Sizes, "within", lambda *_, sizes=sizes: sizes):
            for filtered in (True, False):
                for rule in rules:
                    found[shape, filtered, rule] = evaluate(learner, graph, "test", rule, seed=3, filtered=filtered)
    return found


def brute_force(splits: dict[str, list[Any]], *, filtered: bool) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """Count by hand: for each (source, relation, target), both directions, the candidates, those above, those equal."""
    scores = exact_scores()
    both = {
        name: {(s, r, t) for s, r, t in triples} | {(t, r + R, s) for s, r, t in triples}
        for name, triples in splits.items()
    }
    known = set.union(*both.values()) if filtered else set()
    counts = {}
    for s, r, t in both["test"]:
        mine = scores[s * 2 * R + r]
        candidates = [c for c in range(N) if c == t or (s, r, c) not in known]
        above = sum(bool(mine[c] > mine[t]) for c in candidates)
        equal = sum(bool(mine[c] == mine[t]) for c in candidates) - 1
        counts[s, r, t] = (len(candidates), above, equal)
    return counts


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Any]]:
    """Random triples, some of them in two splits, and a query with more targets than are compared at once."""
    drawn = random_splits(2, num_entities=N, num_relations=R, num_triples=400)
    drawn["test"] += drawn["train"][:5] + drawn["valid"][:5] + [(0, 0, t) for t in range(0, N, 2)]
    return {name: sorted(set(triples)) for name, triples in drawn.items()}


ENTITIES = 101


def train_a_little(group: Group, path: Path) -> dict[str, Any]:
    """Give the state of a model after three epochs."""
    learner, batches = make_learner(make_config("softmax", "twomult"), Graph.open(path), group)
    for epoch in range(3):
        for step, batch in enumerate(batches.epoch(epoch)):
            learner.step(batch, epoch, step, rate=0.01, report=False)
    return {"model": learner.model.state_dict(), "rows": learner.table.rows.data, "bias": learner.table.bias.data}


def evaluate_models(group: Group, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a model that was trained a little, one that scores everything equal, and one of not-a-number scores."""
    graph = Graph.open(path)
    learner, _ = make_learner(make_config("softmax", "twomult"), graph, group)
    learner.model.load_state_dict(state["model"])
    shard = learner.table.shard
    learner.table.rows.data = state["rows"][shard.start : shard.stop].clone()
    learner.table.bias.data = state["bias"][shard.start : shard.stop].clone()
    positions = evaluate(learner, graph, "train", "random", 0)
    protocol = make_protocol(graph, split="train", ties="random", seed=0, filtered=True, checkpoint="", epoch=2)
    found: dict[str, Any] = {"trained": make_result(positions, graph, protocol)}
    learner.table.rows.data[:] = torch.randn(9, generator=torch.Generator().manual_seed(2))
    learner.table.bias.data[:] = 0.3
    for rule in ("random", "mean", "optimistic"):
        constant = evaluate(learner, graph, "test", rule, 0)
        found[rule] = metrics(constant.position, constant.candidates)
        found["candidates"] = constant.candidates
    learner.table.rows.data.fill_(float("nan"))
    broken = evaluate(learner, graph, "test", "optimistic", 0)
    found["all last"] = bool((broken.position == broken.candidates).all())
    return found


def evaluate_everything(
    group: Group, exact_path: Path, path: Path, state: dict[str, Any]
) -> tuple[dict[tuple[Any, ...], Positions], dict[str, Any]]:
    models = evaluate_models(group, path, state)
    return evaluate_exact(group, exact_path), models


@pytest.fixture(scope="module")
def everything(splits: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What every rank of 1, 2 and 3 processes finds."""
    folder = tmp_path_factory.mktemp("evaluation")
    exact_path = write_graph(folder / "exact", splits, num_entities=N, num_relations=R)
    drawn = random_splits(7, num_entities=ENTITIES, num_relations=3, num_triples=12_000)
    drawn["test"] += drawn["valid"]
    path = write_graph(folder / "models", drawn, num_entities=ENTITIES, num_relations=3)
    state = run_processes(1, train_a_little, path)[0]
    return {
        world_size: run_processes(world_size, evaluate_everything, exact_path, path, state) for world_size in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def exact(everything: dict[int, list[Any]]) -> dict[int, list[dict[tuple[Any, ...], Positions]]]:
    return {world_size: [exact for exact, _ in ranks] for world_size, ranks in everything.items()}


@pytest.fixture(scope="module")
def models(everything: dict[int, list[Any]]) -> dict[int, dict[str, Any]]:
    return {world_size: ranks[0][1] for world_size, ranks in everything.items()}


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "raw"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_positions_equal_brute_force(
    world_size: int, filtered: bool, splits: dict[str, list[Any]], exact: dict[int, list[Any]]
) -> None:
    expected = brute_force(splits, filtered=filtered)
    assert sum(equal > 0 for _, _, equal in expected.values()) > 20
    for found in exact[world_size]:
        for (_, found_filtered, rule), p in found.items():
            if found_filtered != filtered:
                continue
            triples = list(zip(p.source.tolist(), p.relation.tolist(), p.target.tolist(), strict=True))
            assert len(triples) == len(set(triples))
            assert set(triples) == set(expected)
            for triple, position, candidates in zip(triples, p.position, p.candidates, strict=True):
                expected_candidates, above, equal = expected[triple]
                assert candidates == expected_candidates
                low, high = 1 + above, 1 + above + equal
                want = {"mean": (low + high) / 2, "optimistic": low, "pessimistic": high}
                if rule == "random":
                    assert low <= position <= high
                    assert position == int(position)
                else:
                    assert position == want[rule]


def test_random_ties_depend_on_neither_processes_nor_chunks(exact: dict[int, list[Any]]) -> None:
    expected = exact[1][0][(3, 5), True, "random"].position
    assert not np.array_equal(expected, exact[1][0][(3, 5), True, "optimistic"].position)
    for found in (found for ranks in exact.values() for found in ranks):
        for shape in SHAPES:
            assert np.array_equal(found[shape, True, "random"].position, expected)


def count_floats(group: Group, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, raw, over scores of arbitrary bits in chunks of so many rows."""
    generator = torch.Generator().manual_seed(1)
    rows, query, bias = (torch.randn(*shape, generator=generator) for shape in ((1003, 37), (45, 37), (1003,)))
    counter = Counter(rows, bias, Shard(0, 1003), Sizes(num_queries=45, num_rows=num_rows), group)
    target = torch.randint(1003, (45, 4), generator=generator).numpy()
    nothing = np.empty(0, np.int64)
    pairs = Pairs(num_targets=np.full(45, 4), target=target.ravel(), struck_query=nothing, struck=nothing)
    exact = query.double() @ rows.double().T + bias
    below = (exact[:, None] < exact.gather(1, torch.from_numpy(target))[..., None]).sum(-1)
    at_most, found_below, is_number = counter.count(query, pairs)
    return at_most - is_number - found_below, found_below - below.flatten().numpy(), is_number


def count_floats_in_chunks(group: Group) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    return [count_floats(group, num_rows) for num_rows in (1003, 1000, 129, 64, 7, 1)]


def test_a_true_target_never_competes_with_itself() -> None:
    """Its score in the second pass over the chunks has the very bits of the first: no tie, none above."""
    for ties, misplaced, is_number in run_processes(1, count_floats_in_chunks)[0]:
        assert (ties == 0).all()
        assert is_number.all()
        assert np.count_nonzero(misplaced) <= 2  # in double precision, two of 180 may swap with a neighbour
        assert np.abs(misplaced).max() <= 1


@pytest.mark.parametrize("rows_per_shard", [1, 23, 14541, 500_000, 10_000_000])
@pytest.mark.parametrize("budget", [1, 5000, 64 << 20])
def test_the_buffers_fit_the_budget(budget: int, rows_per_shard: int) -> None:
    sizes = Sizes.within(budget, rows_per_shard, torch.device("cpu"))
    assert 1 <= sizes.num_rows <= rows_per_shard
    assert sizes.num_queries >= 1
    assert 8 * sizes.num_queries * sizes.num_rows <= max(budget, 8)


def test_random_ties_are_uniform_and_seeded() -> None:
    above, equal = np.full(60_000, 4), np.full(60_000, 2)
    positions = break_ties(above, equal, "random", seed=1)
    assert np.bincount(positions.astype(int), minlength=8)[5:8] == pytest.approx([20_000] * 3, rel=0.03)
    assert np.array_equal(positions, break_ties(above, equal, "random", seed=1))
    assert not np.array_equal(positions, break_ties(above, equal, "random", seed=2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_that_scores_everything_equal_gets_chance(world_size: int, models: dict[int, dict[str, Any]]) -> None:
    found = models[world_size]
    chance = np.mean([np.mean(1 / np.arange(1, c + 1)) for c in found["candidates"]])
    square = np.mean([np.mean(1 / np.arange(1, c + 1) ** 2) for c in found["candidates"]])
    error = np.sqrt((square - chance**2) / len(found["candidates"]))
    assert found["random"]["mrr"] == pytest.approx(chance, abs=4 * error)
    assert 4 * error < chance / 5
    assert found["random"]["amri"] == pytest.approx(0, abs=0.03)
    assert found["mean"]["mrr"] == pytest.approx(np.mean(2 / (found["candidates"] + 1)))
    assert found["mean"]["amri"] == pytest.approx(0, abs=1e-12)
    assert found["optimistic"]["mrr"] == 1.0  # which is why it is not the default


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_diverged_model_ranks_last(world_size: int, models: dict[int, dict[str, Any]]) -> None:
    """Not-a-number scores must not look like a perfect model."""
    assert models[world_size]["all last"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_trained_model_has_the_same_metrics_at_any_number_of_processes(
    world_size: int, models: dict[int, dict[str, Any]]
) -> None:
    expected, found = models[1]["trained"], models[world_size]["trained"]
    assert expected["metrics"]["amri"] > 0.02  # it has learnt something of these random triples
    for name in ("metrics", "by_direction", "by_cardinality", "by_seen", "by_relation"):
        assert flat(found[name]) == pytest.approx(flat(expected[name]), rel=1e-6, abs=1e-6)


def flat(value: Any, name: str = "") -> dict[str, float]:
    """Name all numbers within lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {} if isinstance(value, str) else {name: value}
    return {path: number for key, part in items for path, number in flat(part, f"{name}/{key}").items()}
