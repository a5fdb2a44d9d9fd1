"""What the loss of one shard is computed from: its rows, all queries of the global batch, and the targets it owns.

Shapes: G queries of the global batch, S rows of this shard, D dim, P targets in this shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sattle_dist.graph import GraphError, Int64s
from sattle_dist.randomness import to_device
from sattle_dist.settled import SettledCandidates

TARGETS_AT_ONCE = 1 << 16  # bounds the memory of a query with millions of targets


@dataclass(frozen=True, kw_only=True)
class ShardTargets:
    """The true targets of the global batch that this shard owns, as (query, row) pairs."""

    query: Tensor  # [P]
    row: Tensor  # [P] increasing
    row_on_host: Int64s  # [P] the same, to find a block's targets without waiting for the device

    @classmethod
    def of(cls, query: Int64s, row: Int64s, *, num_queries: int, device: torch.device) -> ShardTargets:
        """Take distinct (query, row) pairs; a repeated pair is refused, for it would count twice."""
        cell = np.sort(row * num_queries + query)
        if (cell[1:] == cell[:-1]).any():
            raise GraphError("a query names the same target twice; the graph is damaged, ingest it again")
        query, row = cell % num_queries, cell // num_queries
        return cls(
            query=to_device(torch.from_numpy(query), device),
            row=to_device(torch.from_numpy(row), device),
            row_on_host=row,
        )

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Give the (query, row) pairs whose rows are in [start, stop)."""
        first, last = np.searchsorted(self.row_on_host, [start, stop])
        return self.query[first:last], self.row[first:last]

    def pieces(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut query and row, and values [P] that go with them, into pieces of bounded size."""
        return zip(*(torch.split(x, TARGETS_AT_ONCE) for x in (self.query, self.row, *values)), strict=True)


class Scorer(Protocol):
    """Whatever scores entities: x_ji = rows_j . query_i + bias_j."""

    @property
    def query(self) -> Tensor: ...  # [G, D]
    @property
    def rows(self) -> Tensor: ...  # [S, D]
    @property
    def bias(self) -> Tensor: ...  # [S]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Another model's scores of the same candidates, and how much they count; its dim may be another."""

    query: Tensor  # [G, D']
    rows: Tensor  # [S, D']
    bias: Tensor  # [S]
    weight: float
    settled: SettledCandidates | None = None  # who has a discount on its scores


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """What the loss is computed from: one shard's rows, and all queries of the global batch."""

    query: Tensor  # [G, D]
    rows: Tensor  # [S, D]
    bias: Tensor  # [S]
    targets: ShardTargets
    query_weight: Tensor  # [G]
    total_weight: float  # W
    target_weight: Tensor | None = None  # [G] v; None: 1
    teacher: Teacher | None = None

    def target_weights(self) -> Tensor:
        """Give the weight v [P] of each target in this shard."""
        if self.target_weight is None:
            return self.query_weight.new_ones(len(self.targets.query))
        return self.target_weight[self.targets.query]

    @property
    def num_scorers(self) -> int:
        """How many models score the candidates: this one, and its teacher if it has one."""
        return 1 if self.teacher is None else 2

    @property
    def row_bytes(self) -> int:
        """The size of one row's scores [G]."""
        return len(self.query) * self.query.element_size()
