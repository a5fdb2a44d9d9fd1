"""Settled entities: train holds a fact of theirs of the very kind that a query asks for.

A query (source, relation) asks who has a fact (entity, inverse relation, source). Where an entity has one such fact, as
it has one parent, who has a parent already is no answer, and who has none may be the one that is missing; where it has
many, to have some says nothing. Which it is, is counted in train, for each relation: n1 facts are the only one their
entity has of it, n2 are not. A fact that train does not hold is then its entity's first with odds of n1 to n2 (as Good
and Turing estimate it). No model learns this from train, whose targets are all settled; but a teacher can be corrected:
`--settled-discount` times the logarithm of these odds, where they are above 1, is taken off its scores of the settled.

Shapes: G queries of the global batch, S rows of this shard, K pairs of a row and a relation that train has facts of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sattle_dist.graph import Int64s, QueryIndex
from sattle_dist.randomness import to_device
from sattle_dist.sharding import Shard

DISCOUNT_BYTES = 64 << 20  # of the discounts that are taken off scores at one time
QUERIES_AT_ONCE = 1 << 20


class Settled:
    """Who is settled in one shard, and for each relation the discount on the scores of who is."""

    def __init__(self, index: QueryIndex, shard: Shard, discount: float, device: torch.device) -> None:
        self.both, self.first_entity = index.num_relations_both, shard.start
        ends = np.searchsorted(index.queries, np.array([shard.start, shard.stop]) * self.both)
        self.keys = index.queries[slice(*ends)]  # mapped from disk
        entity, relation = index.split_keys(self.keys)
        self.row = to_device(torch.from_numpy((entity - shard.start).astype(np.int32)), device)  # [K] increasing
        self.relation = to_device(torch.from_numpy(relation.astype(np.int32)), device)  # [K]
        self.discount = to_device(torch.from_numpy(discount * log_odds_of_firsts(index)), device)  # [2R]

    def among(self, relation: Int64s | None) -> SettledCandidates:
        """Give who is settled for queries that ask for these relations [G]."""
        assert relation is not None, "the batches do not tell the relations of all queries"
        inverse = (relation + self.both // 2) % self.both
        distinct, place = np.unique(inverse, return_inverse=True)
        column = np.full(self.both, len(distinct))
        column[distinct] = np.arange(len(distinct))
        device = self.row.device
        return SettledCandidates(
            settled=self,
            num_columns=len(distinct) + 1,
            column=to_device(torch.from_numpy(column), device),
            place=to_device(torch.from_numpy(place), device),
        )

    def pairs(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Give (row, relation) of who is settled among the rows in [start, stop)."""
        ends = (self.first_entity + np.array([start, stop])) * self.both
        pairs = slice(*np.searchsorted(self.keys, ends))
        return self.row[pairs], self.relation[pairs]


@dataclass(frozen=True, kw_only=True)
class SettledCandidates:
    """The same for the queries of one batch."""

    settled: Settled
    num_columns: int  # one for each relation that is asked about, and one for all others
    column: Tensor  # [2R]
    place: Tensor  # [G] the column of a query

    def take_off(self, x: Tensor, rows: slice, scale: float) -> None:
        """Take the discounts, times scale, off the scores x [rows, G] of some rows."""
        at_once = max(1, DISCOUNT_BYTES // (x.element_size() * len(self.place)))
        for start in range(rows.start, rows.stop, at_once):
            stop = min(start + at_once, rows.stop)
            row, relation = self.settled.pairs(start, stop)
            discount = x.new_zeros(stop - start, self.num_columns)
            discount[row - start, self.column[relation]] = (self.settled.discount * scale).to(x.dtype)[relation]
            x[start - rows.start : stop - rows.start] -= discount.index_select(1, self.place)


def log_odds_of_firsts(index: QueryIndex) -> npt.NDArray[np.float64]:
    """Estimate for each relation [2R] the log odds that a new fact is its source's first; 0 where they are below 1."""
    both = index.num_relations_both
    facts, single = np.zeros(both), np.zeros(both)
    for first in range(0, len(index), QUERIES_AT_ONCE):
        _, relation = index.split_keys(index.queries[first : first + QUERIES_AT_ONCE])
        count = np.diff(index.offsets[first : first + QUERIES_AT_ONCE + 1])
        facts += np.bincount(relation, count, both)
        single += np.bincount(relation, count == 1, both)
    return np.log((single + 0.5) / (facts - single + 0.5)).clip(min=0)  # a half: odds are finite where there are few
