"""What an ingest must give, computed with plain Python from a set of labelled triples; and reading a graph back."""

import json
from collections import defaultdict

import numpy as np
import pyarrow.parquet as pq

SPLITS = ("train", "valid", "test")


def labels(graph, table):
    """Read the labels of a graph, after checking that every row stands at the place of its id."""
    read = pq.read_table(graph / f"{table}.parquet")
    assert read.column(0).to_pylist() == list(range(len(read)))
    return read["label"].to_pylist()


def triples(graph, split):
    """Read the triples of a split as a list of ids."""
    read = pq.ParquetDataset(graph / "triples" / f"split={split}", partitioning=None).read()
    return list(zip(*(read[name].to_pylist() for name in ("source", "relation", "target")), strict=True))


def labelled(graph):
    """Read all triples as sets of labels by split."""
    entities, relations = labels(graph, "entities"), labels(graph, "relations")
    return {split: {(entities[s], relations[r], entities[t]) for s, r, t in triples(graph, split)} for split in SPLITS}


def manifest(graph):
    return json.loads((graph / "manifest.json").read_text(encoding="utf-8"))


def check_index(graph):
    """Compare the index of every split with one grouped by dictionaries, and the counts with the manifest."""
    said = manifest(graph)
    num_relations = said["num_relations"]
    assert said["num_entities"] == len(labels(graph, "entities"))
    for split in SPLITS:
        rows = triples(graph, split)
        assert rows == sorted(set(rows)), "triples are sorted and different"
        groups = defaultdict(set)
        for s, r, t in rows:
            groups[s * 2 * num_relations + r].add(t)
            groups[t * 2 * num_relations + r + num_relations].add(s)
        arrays = {
            name: np.load(graph / "index" / f"split={split}" / f"{name}.npy", mmap_mode="r")
            for name in ("queries", "offsets", "targets")
        }
        assert [str(array.dtype) for array in arrays.values()] == ["int64", "int64", "int32"]
        assert arrays["queries"].tolist() == sorted(groups)
        expected = [sorted(groups[key]) for key in sorted(groups)]
        bounds = arrays["offsets"].tolist()
        assert bounds == np.cumsum([0] + [len(group) for group in expected]).tolist()
        assert arrays["targets"].tolist() == [target for group in expected for target in group]
        assert said["splits"][split] == {"triples": len(rows), "queries": len(groups)}
    lines = said["lines"]
    assert lines["read"] == lines["kept"] + lines["duplicates"] + lines["rejected"]
    assert lines["kept"] == sum(said["splits"][split]["triples"] for split in SPLITS)


def check_degrees(graph):
    """Compare the counts in entities.parquet and relations.parquet with counting."""
    rows = triples(graph, "train")
    entities = pq.read_table(graph / "entities.parquet").to_pylist()
    relations = pq.read_table(graph / "relations.parquet").to_pylist()
    for entity in entities:
        assert entity["num_train_as_source"] == sum(s == entity["entity_id"] for s, _, _ in rows)
        assert entity["num_train_as_target"] == sum(t == entity["entity_id"] for _, _, t in rows)
    for relation in relations:
        mine = [(s, t) for s, r, t in rows if r == relation["relation_id"]]
        assert relation["num_train"] == len(mine)
        sources, targets = len({s for s, _ in mine}), len({t for _, t in mine})
        left = "N" if len(mine) > 1.5 * targets else "1"
        right = "N" if len(mine) > 1.5 * sources else "1"
        assert relation["cardinality"] == f"{left}-{right}"
