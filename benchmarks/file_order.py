"""`sattle`, but with the authors' batches: triples in the order of the file and their inverses, the same every epoch.

python -m benchmarks.file_order train --recipe fb15k237-twomult-100 --batch-size 2048 --epochs 60 --out runs/order

A batch of 2,048 has 1,024 triples as they follow one another in train.txt, and the inverses of the same. The graph must
be FB15k-237, whose files are looked for as `sattle-ingest --dataset` looks for them. See `benchmarks.triples`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.triples import TripleBatches, run_with
from ingest.datasets import dataset_folder
from sattle_dist.data import Batch, OwnQueries, route
from sattle_dist.graph import Int64s, QueryIndex


class FileOrderBatches(TripleBatches):
    """Batches of triples in the order of a file; epochs do not differ."""

    def __init__(self, index: QueryIndex, **settings: Any) -> None:
        super().__init__(index, **settings)
        assert self.batch_size % 2 == 0, "half of a batch are inverses: --batch-size must be even"
        self.order = in_batches(*places(self.index, dataset_folder("FB15k-237")), self.batch_size // 2)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch from a step on, one after the other."""
        for step in range(first_step, self.num_steps):
            own: OwnQueries = self.read(lambda at: self.order[at], epoch, step)  # type: ignore[arg-type]
            yield from route([own], self.sharding, self.group, self.device, self.weight_power)


def in_batches(forward: Int64s, inverse: Int64s, half: int) -> Int64s:
    """Put every `half` items of one before as many of the other."""
    pieces = range(0, len(forward), half)
    return np.concatenate([part[first : first + half] for first in pieces for part in (forward, inverse)])


def read_triples(folder: Path) -> tuple[dict[str, Int64s], int, int]:
    """Read the ids [n, 3] of each split, in the order of the labels; count entities and relations."""
    lines = {name: (folder / f"{name}.txt").read_text().splitlines() for name in ("train", "valid", "test")}
    labels = {name: [line.split("\t") for line in split] for name, split in lines.items()}
    triples = [triple for split in labels.values() for triple in split]
    entities = {label: i for i, label in enumerate(sorted({x for s, _, t in triples for x in (s, t)}))}
    relations = {label: i for i, label in enumerate(sorted({r for _, r, _ in triples}))}
    ids = {
        name: np.array([(entities[s], relations[r], entities[t]) for s, r, t in split])
        for name, split in labels.items()
    }
    return ids, len(entities), len(relations)


def places(index: QueryIndex, folder: Path) -> tuple[Int64s, Int64s]:
    """Find the triples of train.txt, and their inverses, among the ungrouped triples of its graph."""
    splits, num_entities, num_relations = read_triples(folder)
    assert 2 * num_relations == index.num_relations_both
    source, relation, target = splits["train"].T
    known = index.queries * num_entities + index.targets
    by_cell = np.argsort(known)

    def find(source: Int64s, relation: Int64s, target: Int64s) -> Int64s:
        cell = (source * index.num_relations_both + relation) * num_entities + target
        found = by_cell[np.searchsorted(known, cell, sorter=by_cell)]
        assert (known[found] == cell).all(), "the graph is not that of the files"
        return found

    return find(source, relation, target), find(target, relation + num_relations, source)


if __name__ == "__main__":
    run_with(FileOrderBatches)
