"""The result of an evaluation: metrics by group with the protocol they were made by, as JSON, Parquet and a table.

docs/evaluation.md describes the files. A query asks for the target of (source, relation, ?), direction "target", or for
the source of (?, relation, target), direction "source": the inverse query of the index.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sattle_dist import __version__
from sattle_dist.config import Config
from sattle_dist.evaluator import Positions, evaluate
from sattle_dist.files import replacing
from sattle_dist.graph import SPLITS, Graph, Int64s
from sattle_dist.learner import Learner
from sattle_dist.metrics import Floats, Metrics, bootstrap, metrics_of, pieces, sum_by_group
from sattle_dist.strata import CARDINALITIES, cardinalities, seen_in_training

Result = dict[str, Any]

DIRECTIONS = ("target", "source")
_POSITIONS = pa.schema(
    [
        *((f"{name}_id", pa.int64()) for name in ("source", "relation", "target")),
        *((name, pa.string()) for name in ("source", "relation", "target", "direction")),
        ("position", pa.float64()),
        ("candidates", pa.int64()),
    ]
)


def make_protocol(
    graph: Graph, *, split: str, ties: str, seed: int, filtered: bool, checkpoint: str, epoch: int, **more: Any
) -> Result:
    """Say what was ranked, against what, by which rules, with which model and software."""
    return {
        "graph": graph.name,
        "graph_checksum": graph.checksum,
        "split": split,
        "triples": graph.num_triples[split],
        "filter": list(SPLITS) if filtered else [],
        "ties": ties,
        "seed": seed,
        "candidates": graph.num_entities,
        "directions": list(DIRECTIONS),
        "checkpoint": checkpoint,
        "epoch": epoch,
        **more,
        "versions": {
            "sattle_dist": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
    }


def make_result(positions: Positions, graph: Graph, protocol: Result, *, num_resamples: int = 0) -> Result:
    """Compute the metrics of all pairs, and by direction, relation, cardinality and entities seen in training."""
    num_relations = graph.num_relations
    by_query = sum_by_group(positions.position, positions.candidates, positions.relation, 2 * num_relations)
    sums = np.stack(np.split(by_query, 2))  # [directions, R, sums]
    classes = cardinalities(graph)
    by_class = np.zeros((len(CARDINALITIES), *sums.shape[::2]))  # [classes, directions, sums]
    np.add.at(by_class, classes, sums.transpose(1, 0, 2))
    seen = seen_in_training(graph)
    both_seen = (seen[positions.source] & seen[positions.target]).astype(np.int64)
    unseen_sums, seen_sums = sum_by_group(positions.position, positions.candidates, both_seen, 2)
    result: Result = {
        "protocol": protocol,
        "metrics": metrics_of(sums.sum((0, 1))),
        "by_direction": {name: metrics_of(sums[i].sum(0)) for i, name in enumerate(DIRECTIONS)},
        "by_cardinality": {name: _by_direction(by_class[i]) for i, name in enumerate(CARDINALITIES)},
        "by_seen": {"seen": metrics_of(seen_sums), "unseen": metrics_of(unseen_sums)},
        "by_relation": _by_relation(sums, classes, graph),
    }
    if num_resamples:
        triples = pairs_of_triples(positions, num_relations)
        interval = bootstrap(positions.position, positions.candidates, triples, num_resamples, protocol["seed"])
        result["bootstrap"] = {"resamples": num_resamples, "of": "triples", "level": 0.95, "intervals": interval}
    return result


def _by_direction(sums: Floats) -> dict[str, Metrics]:
    """Give the metrics of both directions together and of each, from sums [directions, NUM_SUMS]."""
    apart = {name: metrics_of(sums[i]) for i, name in enumerate(DIRECTIONS)}
    return {"both": metrics_of(sums.sum(0)), **apart}


def _by_relation(sums: Floats, classes: Int64s, graph: Graph) -> list[Result]:
    """List the relations that the split holds, those of most triples first."""
    count = sums[..., 0].sum(0)
    order = np.argsort(-count, kind="stable")[: np.count_nonzero(count)]
    labels = graph.relation_labels()
    return [
        {
            "relation_id": i,
            "relation": labels[i],
            "cardinality": CARDINALITIES[classes[i]],
            **_by_direction(sums[:, i]),
        }
        for i in order.tolist()
    ]


def original_triples(positions: Positions, num_relations: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Give the triples [pairs] that the queries ask about, in their own direction, and the place in DIRECTIONS."""
    inverse = positions.relation >= num_relations
    source = np.where(inverse, positions.target, positions.source)
    target = np.where(inverse, positions.source, positions.target)
    return source, positions.relation % num_relations, target, inverse.astype(np.int64)


def pairs_of_triples(positions: Positions, num_relations: int) -> Int64s:
    """Give for every triple [n] the places of its two pairs, one a direction: [n, 2]."""
    source, relation, target, direction = original_triples(positions, num_relations)
    forward, inverse = np.flatnonzero(direction == 0), np.flatnonzero(direction)
    # The index is in the order of sources, relations and targets, so forward queries are as they should be.
    order = np.lexsort((target[inverse], relation[inverse], source[inverse]))
    return np.stack([forward, inverse[order]], axis=1)


def write_json(path: Path, result: Result) -> None:
    """Write a result, all at once."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_positions(path: Path, positions: Positions, graph: Graph) -> None:
    """Write every pair's triple, direction, position and number of candidates as Parquet, some at a time."""
    ids = np.union1d(positions.source, positions.target)
    entities = labels_of(graph, "entities", ids)
    relations = labels_of(graph, "relations", np.arange(graph.num_relations))
    with replacing(path) as draft, pq.ParquetWriter(draft, _POSITIONS, compression="zstd") as writer:
        for part in pieces(len(positions)):
            some = Positions(**{name: column[part] for name, column in vars(positions).items()})
            source, relation, target, direction = original_triples(some, graph.num_relations)
            columns = [
                *(source, relation, target),
                entities.take(np.searchsorted(ids, source)).cast(pa.string()),
                relations.take(relation).cast(pa.string()),
                entities.take(np.searchsorted(ids, target)).cast(pa.string()),
                pa.array(DIRECTIONS).take(direction),
                *(some.position, some.candidates),
            ]
            writer.write_table(pa.table(columns, schema=_POSITIONS))


def labels_of(graph: Graph, table: str, ids: Int64s) -> pa.Array:
    """Read the labels of these ids, which are sorted; of the others, only some are in memory at a time."""
    found, first = [pa.array([], pa.large_string())], 0  # large: all together may be more than 2 GiB
    for labels in graph.labels(table):
        start, stop = np.searchsorted(ids, (first, first + len(labels)))
        found.append(labels.cast(pa.large_string()).take(ids[start:stop] - first))
        first += len(labels)
    return pa.concat_arrays(found)


def report_test(
    learner: Learner, graph: Graph, config: Config, run_dir: Path, *, checkpoint: str, epoch: int
) -> Result:
    """Evaluate the test split and write its result into the run directory. Every rank must call it."""
    ties, seed = config.eval.ties, config.train.seed
    positions = evaluate(learner, graph, "test", ties, seed)
    protocol = make_protocol(
        graph, split="test", ties=ties, seed=seed, filtered=True, checkpoint=checkpoint, epoch=epoch
    )
    result = make_result(positions, graph, protocol)
    if learner.group.rank == 0:
        write_json(run_dir / "test.json", result)
        write_positions(run_dir / "test_positions.parquet", positions, graph)
    return result
