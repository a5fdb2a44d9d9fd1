"""`sattle`, but each triple is an example of its own, with its own dropout masks, as in the authors' code.

python -m benchmarks.triples train --recipe fb15k237-twomult-100 --batch-size 2048 --epochs 60 --out runs/triples
python -m benchmarks.file_order train --recipe fb15k237-twomult-100 --batch-size 2048 --epochs 60 --out runs/order

sattle-dist trains the triples of a query together: the same loss at 3.6 times less work on FB15k-237, but one dropout
mask for all of them. This measures what that changes. One process only: others would be started without it.
`benchmarks.file_order` has the authors' batches besides: the same in every epoch, as the file's order gives them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sattle_dist import trainer
from sattle_dist.cli import main
from sattle_dist.data import Batches
from sattle_dist.graph import QueryIndex


def ungroup(index: QueryIndex) -> QueryIndex:
    """Give an index in which every triple is a query of its own."""
    return QueryIndex(
        queries=np.repeat(index.queries, np.diff(index.offsets)),
        offsets=np.arange(len(index.targets) + 1),
        targets=index.targets,
        num_relations_both=index.num_relations_both,
    )


class TripleBatches(Batches):
    """Batches of triples, where a run has batches of queries."""

    def __init__(self, index: QueryIndex, **settings: Any) -> None:
        super().__init__(ungroup(index), **settings)


def run_with(batches: type[Batches]) -> None:
    """Be `sattle`, with other batches."""
    trainer.Batches = batches  # type: ignore[misc]
    main()


if __name__ == "__main__":
    run_with(TripleBatches)
