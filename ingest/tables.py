"""Write entities.parquet and relations.parquet: labels at the place of their id, with counts from train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.database import Scratch
from ingest.index import SplitCounts

_MANY = 1.5
_ENTITIES = pa.schema(
    [
        ("entity_id", pa.int32()),
        ("label", pa.string()),
        ("num_train_as_source", pa.int32()),
        ("num_train_as_target", pa.int32()),
    ]
)
_RELATIONS = pa.schema(
    [("relation_id", pa.int32()), ("label", pa.string()), ("num_train", pa.int64()), ("cardinality", pa.string())]
)


def write_entities(scratch: Scratch, graph: Path, train: SplitCounts) -> None:
    """Write the entities with their degrees."""
    # Labels are all different: a dictionary of them would only cost time.
    with pq.ParquetWriter(graph / "entities.parquet", _ENTITIES, compression="zstd", use_dictionary=False) as writer:
        for batch in scratch.stream("SELECT id, label FROM entities ORDER BY id"):
            ids = batch.column(0).to_numpy()
            columns = [*batch.columns, train.as_source[ids], train.as_target[ids]]
            writer.write_batch(pa.record_batch(columns, schema=_ENTITIES))


def write_relations(scratch: Scratch, graph: Path, train: SplitCounts) -> None:
    """Write the relations with the number of their triples and their class.

    The class of a relation is S-T with S = N where a (target, relation) query has more than 1.5 sources on average, and
    T = N where a (source, relation) query has more than 1.5 targets on average; otherwise 1.
    """
    num_relations = len(train.by_relation)
    forward, inverse = train.queries_by_relation[:num_relations], train.queries_by_relation[num_relations:]
    many_targets = train.by_relation > _MANY * forward
    many_sources = train.by_relation > _MANY * inverse
    names = np.array(["1-1", "1-N", "N-1", "N-N"])
    classes = names[many_targets + 2 * many_sources]
    with pq.ParquetWriter(graph / "relations.parquet", _RELATIONS, compression="zstd") as writer:
        for batch in scratch.stream("SELECT id, label FROM relations ORDER BY id"):
            ids = batch.column(0).to_numpy()
            columns = [*batch.columns, train.by_relation[ids], pa.array(classes[ids].tolist(), pa.string())]
            writer.write_batch(pa.record_batch(columns, schema=_RELATIONS))
