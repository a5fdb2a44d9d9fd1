"""Count how many candidates of a shard score at most as high as a true target, and below it, in bounded memory.

Scores x = q E^T + b are formed in chunks of rows, [G, rows], in one buffer. A true target's score is read from the very
product that scores its competitors: scored apart it could differ in the last bit, and fake or hide a tie. Where the
shard is one chunk, its scores are kept and counted; where it is many, the chunks that hold true targets are scored
first, then all of them again by the same calls, of the same shapes at the same places, which give the same bits.

Known targets are struck out of x with NaN, which is neither at most nor below anything; what is NaN by itself is
therefore above. Comparisons are written as 0 and 1 of float32, which is what a CPU compares and sums fastest; such sums
are exact up to 2^24.

Shapes: G queries, P (query, target) pairs, S rows of this shard, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sattle_dist.collectives import Group
from sattle_dist.data import cut
from sattle_dist.graph import Int64s
from sattle_dist.sharding import Shard

MIN_QUERIES = 16  # fewer to a product, and it waits for the rows to come from memory
MAX_QUERIES, MIN_ROWS = 256, 64  # of a chunk, where a shard has several
CACHE_BYTES = 4 << 20  # scores that a CPU's caches hold between the product and the comparisons that read them
MAX_ROWS = 1 << 24  # of a chunk: a float32 counts no further
FEW = 8  # queries; so many have another target, or their targets are compared query by query


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shape of the buffer: queries at once, and rows in a chunk. Equal on all ranks."""

    num_queries: int
    num_rows: int

    @classmethod
    def within(cls, budget: int, rows_per_shard: int, device: torch.device) -> Sizes:
        """Choose the shape for a budget in bytes, half of which is for scores and half for their comparisons.

        Where enough queries' scores of the whole shard fit a cache, they are formed once. Elsewhere two passes over
        chunks that fit are faster than one whose every score goes to memory and comes back for every comparison.
        """
        scores = max(1, budget // 8)  # float32 numbers
        if device.type != "cuda":
            scores = min(scores, CACHE_BYTES // 4)
        at_once = scores // rows_per_shard
        if at_once >= MIN_QUERIES and rows_per_shard <= MAX_ROWS:
            return cls(num_queries=at_once // MIN_QUERIES * MIN_QUERIES, num_rows=rows_per_shard)
        num_queries = max(1, min(MAX_QUERIES, scores // MIN_ROWS))
        return cls(num_queries=num_queries, num_rows=min(scores // num_queries, MAX_ROWS, rows_per_shard))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Some queries' true targets, and the targets that do not compete with them; the same on all ranks."""

    num_targets: Int64s  # [G] of each query; never increasing
    target: Int64s  # [P] entity ids, query by query
    struck_query: Int64s  # [struck out] places of queries
    struck: Int64s  # [struck out] entity ids

    @property
    def query(self) -> Int64s:
        """The place of each pair's query: [P]."""
        return np.repeat(np.arange(len(self.num_targets)), self.num_targets)


class Counter:
    """Counts over one shard; one buffer for all calls."""

    def __init__(self, rows: Tensor, bias: Tensor, shard: Shard, sizes: Sizes, group: Group) -> None:
        self.rows, self.bias, self.shard, self.sizes, self.group = rows, bias, shard, sizes, group
        num_scores = min(sizes.num_rows, max(1, len(shard))) * sizes.num_queries
        self._scores, self._flags = rows.new_empty(num_scores), rows.new_empty(num_scores)
        self._starts = range(0, len(shard), sizes.num_rows)

    @torch.no_grad()
    def count(self, query: Tensor, pairs: Pairs) -> tuple[Int64s, Int64s, Int64s]:
        """Count over all shards, for query vectors [G, D]; give [P] counts. Every rank must call it.

        They are: candidates that score at most as high as the true target, candidates that score below it, and 1 where
        the true target's score is a number. A true target that is not struck out counts as one that is at most as high.
        """
        place = pairs.query
        true_score = self._true_scores(query, place, pairs.target)
        counts = torch.zeros(2, len(place), dtype=torch.int64, device=query.device)
        struck = self._by_chunk(pairs.struck_query, pairs.struck)
        rounds = [(rows, pair.to(query.device)) for rows, pair in cut_into_rounds(pairs.num_targets)]
        for start, (struck_query, struck_row) in zip(self._starts, struck, strict=True):
            x = self._score(query, start, again=len(self._starts) > 1)
            x.view(-1).index_fill_(0, struck_query * x.shape[1] + struck_row, torch.nan)
            for queries, pair in rounds:
                self._compare(x[queries], true_score[pair], pair, counts)
        counts = self.group.all_reduce(counts, "evaluation")
        at_most, below = counts.cpu().numpy()
        is_number: Int64s = (~true_score.isnan()).long().cpu().numpy()
        return at_most, below, is_number

    def _true_scores(self, query: Tensor, place: Int64s, target: Int64s) -> Tensor:
        """Read the scores [P] of the true targets from the chunks that hold them, and learn the other shards'."""
        true_score = query.new_full((len(target),), -torch.inf)
        chunks = self._by_chunk(place, target, np.arange(len(target)))
        for start, (chunk_place, row, pair) in zip(self._starts, chunks, strict=True):
            if len(pair) or len(self._starts) == 1:
                true_score[pair] = self._score(query, start, again=True)[chunk_place, row]
        return self.group.all_reduce_max(true_score, "evaluation")

    def _score(self, query: Tensor, start: int, *, again: bool) -> Tensor:
        """Give the scores [G, rows] of the chunk that begins at this row; as they are in the buffer, unless again."""
        chunk = slice(start, min(start + self.sizes.num_rows, len(self.shard)))
        x = self._scores[: len(query) * (chunk.stop - start)].view(len(query), -1)
        if again:
            torch.addmm(self.bias[chunk], query, self.rows[chunk].T, out=x)
        return x

    def _compare(self, x: Tensor, bar: Tensor, pair: Tensor, counts: Tensor) -> None:
        """Add to the counts [2, P] of pairs [n] how many of x [n or 1, rows] are at most, and below, their bar [n]."""
        at_once = max(1, len(self._flags) // x.shape[1])
        for first in range(0, len(pair), at_once):
            part = slice(first, first + at_once)
            flags = self._flags[: len(pair[part]) * x.shape[1]].view(-1, x.shape[1])
            for compare, count in ((torch.le, counts[0]), (torch.lt, counts[1])):
                compare(x if len(x) == 1 else x[part], bar[part, None], out=flags)
                count.index_add_(0, pair[part], flags.sum(1).long())

    def _by_chunk(self, place: Int64s, entity: Int64s, *more: Int64s) -> Iterator[list[Tensor]]:
        """Cut the entities of this shard by chunk; give their places, their rows in the chunk, and what goes along."""
        if not self._starts:  # an empty shard
            return
        inside = (self.shard.start <= entity) & (entity < self.shard.stop)
        chunk, row = np.divmod(entity[inside] - self.shard.start, self.sizes.num_rows)
        columns = [cut(column, chunk, len(self._starts)) for column in (place[inside], row, *(m[inside] for m in more))]
        for pieces in zip(*columns, strict=True):
            yield [torch.from_numpy(piece).to(self.rows.device) for piece in pieces]


def cut_into_rounds(num_targets: Int64s) -> Iterator[tuple[slice, Tensor]]:
    """Cut pairs into comparisons with whole slices of x, none of which is copied.

    First all queries with their first target, then those that have a second one, and so on: as queries with more
    targets stand first, these are the first so many. Where few are left, each is compared with its remaining targets.
    """
    first = np.cumsum(num_targets) - num_targets
    done = 0
    while (left := int((num_targets > done).sum())) >= FEW or (left and done == 0):
        yield slice(0, left), torch.from_numpy(first[:left] + done)
        done += 1
    for query in range(left):
        yield slice(query, query + 1), torch.arange(first[query] + done, first[query] + num_targets[query])
