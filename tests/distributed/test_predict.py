"""The best candidates over several shards, against sorting all scores; and the answers of whole files of queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pytest
import torch

from sattle_dist import load_run, topk
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.graph import SPLITS, Graph
from sattle_dist.learner import Learner
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

N, R, DIM = 131, 3, 4
SMALL = {"dim": DIM, "num_heads": 1, "dim_key": 2, "dim_value": 2, "dim_hidden": 4}


def small_graph(folder: Path) -> Path:
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=700)
    return write_graph(folder / "g", splits, num_entities=N, num_relations=R)


def whole_numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, rows and biases of small whole numbers: scores are exact in any order, and ties abound."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()  # noqa: E731
    return draw(20, DIM), draw(N, DIM), draw(N)


def search(group: Group, graph: str, tops: list[int], budget: int) -> list[tuple[Any, ...]]:
    """Select the best candidates of whole-number queries, all candidates or new ones."""
    opened = Graph.open(Path(graph))
    learner = Learner(Config().override(SMALL, "test"), N, R, group, torch.device("cpu"))
    query, rows, bias = whole_numbers()
    shard = learner.table.shard
    with torch.no_grad():
        learner.table.rows.copy_(rows[shard.start : shard.stop])
        learner.table.bias.copy_(bias[shard.start : shard.stop])
    learner.loss.budget = budget
    source, relation = np.arange(20), np.arange(20) % (2 * R)
    found = []
    for top in tops:
        for strike in ([], [opened.index(split) for split in SPLITS]):
            with mock.patch.object(topk, "encode_block", return_value=query):
                best = topk.best_candidates(learner, source, relation, top, strike)
            found.append((best.entity_id, best.score, best.share))
    return found


@pytest.mark.parametrize(("world_size", "budget"), [(2, 4000), (3, 1)])
def test_best_candidates_are_those_of_a_full_sort(world_size: int, budget: int, tmp_path: Path) -> None:
    """Whatever the number of shards and the size of chunks, down to one row; also for more than a shard has."""
    graph = small_graph(tmp_path)
    query, rows, bias = (x.double().numpy() for x in whole_numbers())
    scores = query @ rows.T + bias  # [20, N]
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    known = {split: Graph.open(graph).index(split) for split in SPLITS}
    everyone = run_processes(world_size, search, str(graph), [1, 7, 100], budget)
    for found in everyone:
        results = iter(found)
        for top in (1, 7, 100):
            for new_only in (False, True):
                entity_id, score, share = next(results)
                for i in range(20):
                    key = np.array([i * 2 * R + i % (2 * R)])
                    struck = {int(t) for index in known.values() for t in index.known_targets(key)[1]}
                    left = [e for e in range(N) if not (new_only and e in struck)]
                    expected = sorted(left, key=lambda e: (-scores[i, e], e))[:top]
                    assert entity_id[i, : len(expected)].tolist() == expected
                    assert score[i, : len(expected)].tolist() == scores[i, expected].tolist()
                    np.testing.assert_allclose(share[i, : len(expected)], shares[i, expected], rtol=1e-5)
                    assert (score[i, len(expected) :] == -np.inf).all()


def answer_file(group: Group, run: str, queries: str, out: str) -> list[Any]:
    from sattle_dist.bulk import predict_file
    from sattle_dist.run import open_run

    learner, graph, _ = open_run(Path(run), group, torch.device("cpu"))
    predict_file(learner, graph, Path(queries), Path(out), top=5)
    return duckdb.sql(f"SELECT * FROM '{out}'").fetchall()


def test_a_file_is_answered_alike_by_any_number_of_processes(families_run: Path, tmp_path: Path) -> None:
    run = families_run / "run"
    queries = tmp_path / "queries.tsv"
    queries.write_text("iris_baker\tmother_of\t?\n?\tcousin_of\tmia_baker\n" * 40, encoding="utf-8")
    load_run(run).predict_file(queries, tmp_path / "1.parquet", top=5)
    alone = duckdb.sql(f"SELECT * FROM '{tmp_path / '1.parquet'}'").fetchall()
    for rows in run_processes(3, answer_file, str(run), str(queries), str(tmp_path / "3.parquet")):
        assert len(rows) == 400
        assert [row[:7] for row in rows] == [row[:7] for row in alone]  # all but score, share and split
        np.testing.assert_allclose([row[7] for row in rows], [row[7] for row in alone], rtol=1e-4)
        assert [row[9] for row in rows] == [row[9] for row in alone]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1.parquet", "3.parquet", "queries.tsv"]
