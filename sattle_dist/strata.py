"""What metrics are shown apart by: the cardinality of relations, and whether training has seen an entity."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sattle_dist.graph import Graph, Int64s, QueryIndex

CARDINALITIES = ("1-1", "1-N", "N-1", "N-N")
MANY = 1.5  # answers of a query on average, above which a side counts as N; as `sattle-ingest` has it
QUERIES_AT_ONCE = 1 << 20


def cardinalities(graph: Graph) -> Int64s:
    """Give the class of each relation [R], as a place in CARDINALITIES: written at ingestion, or counted in train."""
    file = pq.ParquetFile(graph.path / "relations.parquet")
    if "cardinality" in file.schema_arrow.names:
        written = file.read(columns=["cardinality"])["cardinality"].to_pylist()
        if set(written) <= set(CARDINALITIES):
            return np.array([CARDINALITIES.index(name) for name in written], np.int64)
    return count_cardinalities(graph.index("train"))


def count_cardinalities(train: QueryIndex) -> Int64s:
    """Class each relation S-T: S is N where a (target, relation) query has many sources on average, T likewise."""
    both = train.num_relations_both
    queries, targets = np.zeros(both, np.int64), np.zeros(both, np.int64)
    for part in _parts(train):
        relation = train.queries[part] % both
        queries += np.bincount(relation, minlength=both)
        number = np.diff(train.offsets[part.start : part.stop + 1])
        targets += np.bincount(relation, number, minlength=both).astype(np.int64)
    many_targets, many_sources = np.split(targets > MANY * queries, 2)
    classes: Int64s = many_targets + 2 * many_sources.astype(np.int64)
    return classes


def seen_in_training(graph: Graph) -> npt.NDArray[np.bool_]:
    """Mark the entities [N] that a training triple holds: each is the source of a query or of an inverse one."""
    train = graph.index("train")
    seen = np.zeros(graph.num_entities, bool)
    for part in _parts(train):
        seen[train.queries[part] // train.num_relations_both] = True
    return seen


def _parts(index: QueryIndex) -> Iterator[slice]:
    for start in range(0, len(index), QUERIES_AT_ONCE):
        yield slice(start, min(start + QUERIES_AT_ONCE, len(index)))
