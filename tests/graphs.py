"""Graphs for tests, written by the format's description in plain Python, independently of `ingest`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Triple = tuple[int, int, int]


def write_graph(path: Path, splits: Mapping[str, Sequence[Triple]], *, num_entities: int, num_relations: int) -> Path:
    """Write a graph of integer triples with labels e0, e1 ... and r0, r1 ...; missing splits are empty."""
    manifest = {
        "format": "sattle-graph",
        "format_version": 1,
        "name": path.name,
        "num_entities": num_entities,
        "num_relations": num_relations,
        "splits": {},
        "checksum": f"test:{hash((num_entities, num_relations, *(tuple(v) for v in splits.values())))}",
    }
    for split in ("train", "valid", "test"):
        triples = sorted(set(splits.get(split, ())))
        grouped: dict[int, list[int]] = defaultdict(list)
        for s, r, t in triples:
            grouped[s * 2 * num_relations + r].append(t)
            grouped[t * 2 * num_relations + r + num_relations].append(s)
        keys = sorted(grouped)
        lists = [sorted(grouped[key]) for key in keys]
        folder = path / "index" / f"split={split}"
        folder.mkdir(parents=True)
        np.save(folder / "queries.npy", np.array(keys, np.int64))
        np.save(folder / "offsets.npy", np.cumsum([0, *map(len, lists)]).astype(np.int64))
        np.save(folder / "targets.npy", np.array([t for ts in lists for t in ts], np.int32))
        manifest["splits"][split] = {"triples": len(triples), "queries": len(keys)}
    for table, count in (("entities", num_entities), ("relations", num_relations)):
        labels = [f"{table[0]}{i}" for i in range(count)]
        pq.write_table(pa.table({"label": labels}), path / f"{table}.parquet")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def random_splits(seed: int, *, num_entities: int, num_relations: int, num_triples: int) -> dict[str, list[Triple]]:
    """Draw distinct random triples and cut them 8:1:1."""
    rng = np.random.default_rng(seed)
    columns = [rng.integers(n, size=num_triples) for n in (num_entities, num_relations, num_entities)]
    triples = sorted({tuple(int(x) for x in row) for row in zip(*columns, strict=True)})
    order = rng.permutation(len(triples))
    triples = [triples[i] for i in order]
    tenth = len(triples) // 10
    return {"train": triples[2 * tenth :], "valid": triples[:tenth], "test": triples[tenth : 2 * tenth]}
