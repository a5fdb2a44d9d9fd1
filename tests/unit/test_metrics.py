"""Metrics by hand, by group, and their confidence intervals; the strata they are shown by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sattle_dist import metrics as module
from sattle_dist.evaluator import Positions
from sattle_dist.files import require_writable
from sattle_dist.graph import Graph
from sattle_dist.metrics import bootstrap, metrics
from sattle_dist.results import labels_of, make_protocol, make_result, pairs_of_triples, write_positions
from sattle_dist.strata import CARDINALITIES, cardinalities, count_cardinalities, seen_in_training
from tests.graphs import write_graph

# Relation 0: one source has three targets (1-N). Relation 1: one to one. Entities 6 and 7 are unseen in training.
TRAIN = [(0, 0, 1), (0, 0, 2), (0, 0, 3), (4, 1, 5), (1, 1, 2)]
TEST = [(0, 0, 4), (5, 1, 6), (2, 1, 3)]


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    return Graph.open(write_graph(tmp_path / "g", {"train": TRAIN, "test": TEST}, num_entities=8, num_relations=2))


def positions_of(graph: Graph) -> Positions:
    """Rank the test triples: targets at 1, 2 and 5, sources at 4, 8 and 3."""
    by_triple = {(0, 0, 4): (1, 4), (2, 1, 3): (2, 8), (5, 1, 6): (5, 3)}
    index, pairs = graph.index("test"), []
    for i, key in enumerate(index.queries.tolist()):
        for target in index.targets[index.offsets[i] : index.offsets[i + 1]].tolist():
            source, relation = divmod(key, 4)
            triple = (source, relation, target) if relation < 2 else (target, relation - 2, source)
            pairs.append((source, relation, target, by_triple[triple][relation >= 2]))
    source, relation, target, position = np.array(pairs).T
    return Positions(
        source=source,
        relation=relation,
        target=target,
        position=position.astype(np.float64),
        candidates=np.where(relation == 0, 5, 8),
    )


def test_metrics_by_hand() -> None:
    expected = {
        "count": 4,
        "mrr": (1 + 1 / 2 + 1 / 4 + 1 / 20) / 4,
        "mean_position": 27 / 4,
        "hits@1": 0.25,
        "hits@3": 0.5,
        "hits@5": 0.75,
        "hits@10": 0.75,
    }
    position = np.array([1.0, 2.0, 4.0, 20.0])
    assert metrics(position) == pytest.approx(expected)
    # By chance the positions are 3, 6, 6 and 11 on average, 6.5 in all.
    assert metrics(position, np.array([5, 11, 11, 21])) == pytest.approx({**expected, "amri": 1 - 5.75 / 5.5})
    assert metrics(np.empty(0)) == {}
    assert metrics(np.ones(2), np.ones(2, np.int64))["amri"] == 0


def test_groups_by_hand(graph: Graph) -> None:
    protocol = make_protocol(graph, split="test", ties="mean", seed=0, filtered=True, checkpoint="c", epoch=1)
    result = make_result(positions_of(graph), graph, protocol)
    assert result["metrics"]["count"] == 6
    assert result["metrics"]["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 5 + 1 / 4 + 1 / 8 + 1 / 3) / 6)
    assert result["by_direction"]["target"]["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 5) / 3)
    assert result["by_direction"]["source"]["mean_position"] == pytest.approx((4 + 8 + 3) / 3)
    assert result["by_cardinality"]["1-N"]["target"]["mrr"] == 1
    assert result["by_cardinality"]["1-N"]["source"]["mrr"] == 1 / 4
    assert result["by_cardinality"]["1-1"]["both"]["mean_position"] == (2 + 8 + 5 + 3) / 4
    assert result["by_cardinality"]["N-N"] == {name: {"count": 0} for name in ("both", "target", "source")}
    assert result["by_seen"]["unseen"]["mean_position"] == (5 + 3) / 2  # (5, 1, 6)
    assert result["by_seen"]["seen"]["count"] == 4
    first, second = result["by_relation"]
    assert (first["relation_id"], first["relation"], first["cardinality"], first["both"]["count"]) == (
        1,
        "r1",
        "1-1",
        4,
    )
    assert (second["relation"], second["cardinality"], second["target"]["amri"]) == ("r0", "1-N", 1)
    assert result["protocol"]["candidates"] == 8
    assert result["protocol"]["filter"] == ["train", "valid", "test"]


def test_strata(graph: Graph) -> None:
    assert seen_in_training(graph).tolist() == [True] * 6 + [False] * 2
    counted = [CARDINALITIES[i] for i in count_cardinalities(graph.index("train"))]
    assert counted == ["1-N", "1-1"]
    assert cardinalities(graph).tolist() == count_cardinalities(graph.index("train")).tolist()
    written = pa.table({"label": ["r0", "r1"], "cardinality": ["N-N", "N-1"]})
    pq.write_table(written, graph.path / "relations.parquet")
    assert [CARDINALITIES[i] for i in cardinalities(graph)] == ["N-N", "N-1"]


def test_positions_file_has_triples_in_their_own_direction(graph: Graph, tmp_path: Path) -> None:
    write_positions(tmp_path / "p.parquet", positions_of(graph), graph)
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    found = {(r["source"], r["relation"], r["target"], r["direction"]): r["position"] for r in rows}
    assert found == {
        ("e0", "r0", "e4", "target"): 1.0,
        ("e0", "r0", "e4", "source"): 4.0,
        ("e2", "r1", "e3", "target"): 2.0,
        ("e2", "r1", "e3", "source"): 8.0,
        ("e5", "r1", "e6", "target"): 5.0,
        ("e5", "r1", "e6", "source"): 3.0,
    }
    assert all((f"e{r['source_id']}", f"r{r['relation_id']}") == (r["source"], r["relation"]) for r in rows)
    assert [path.name for path in tmp_path.iterdir() if "p.parquet" in path.name] == ["p.parquet"]  # no draft is left


def test_labels_are_read_by_id_over_groups_of_rows(graph: Graph) -> None:
    labels = [f"label {i}" for i in range(10)]
    pq.write_table(pa.table({"label": labels}), graph.path / "entities.parquet", row_group_size=3)
    for ids in ([0, 2, 3, 9], [5], [], list(range(10))):
        found = labels_of(graph, "entities", np.array(ids, np.int64))
        assert found.type == pa.large_string()  # the labels of a huge graph are more than a string array holds
        assert found.to_pylist() == [labels[i] for i in ids]


@pytest.mark.parametrize("at_once", [1 << 20, 700])
def test_bootstrap_has_the_spread_of_the_mean(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triples are drawn with both of their pairs: with pairs that agree, the spread is that of the triples."""
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    of_triple = rng.integers(1, 50, size=2000).astype(np.float64)
    position, candidates = np.repeat(of_triple, 2), np.full(4000, 99)
    triples = np.arange(4000).reshape(-1, 2)
    low, high = bootstrap(position, candidates, triples, 400, seed=1)["mean_position"]
    spread = 1.96 * of_triple.std() / np.sqrt(len(of_triple))
    assert (low + high) / 2 == pytest.approx(of_triple.mean(), abs=spread / 4)
    assert (high - low) / 2 == pytest.approx(spread, rel=0.15)
    assert bootstrap(position, candidates, triples, 50, 1) == bootstrap(position, candidates, triples, 50, 1)
    assert bootstrap(position, candidates, triples, 50, 1) != bootstrap(position, candidates, triples, 50, 2)


def test_the_two_pairs_of_a_triple_are_found(graph: Graph) -> None:
    positions = positions_of(graph)
    pairs = pairs_of_triples(positions, 2)
    assert sorted(map(tuple, positions.position[pairs].tolist())) == [(1, 4), (2, 8), (5, 3)]


def test_unwritable_files_are_refused(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json", "--json")
    assert list(tmp_path.iterdir()) == []
    for path, reason in ((tmp_path, "it is a directory"), (tmp_path / "no" / "f", "No such file or directory")):
        with pytest.raises(ValueError, match=f"--json {path} cannot be written .{reason}"):
            require_writable(path, "--json")
