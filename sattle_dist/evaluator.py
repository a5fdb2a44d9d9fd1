"""Filtered ranking over all entities, exact and sharded, by counting instead of sorting.

The *position* of a true target is one more than the number of candidates that score above it. Candidates of equal score
are ties, and the tie rule says how many of them stand before it: `random` draws the number uniformly (seeded), `mean`
takes half of them, `optimistic` none, `pessimistic` all. Candidates are all entities but the known targets of the query
in any split (the true target apart); in a raw ranking, all entities. A score that is not a number counts as above: a
diverged model ranks last.

Every distinct query is encoded and scored once, whatever the number of its targets. Known targets are read from the
graph's mapped index, for some queries at a time.

Shapes: G queries of a block, D dim, S rows of this shard, P (query, target) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sattle_dist.counting import Counter, Pairs, Sizes
from sattle_dist.data import OwnQueries, part_size, route
from sattle_dist.graph import SPLITS, Graph, Int64s, QueryIndex, concatenated_ranges
from sattle_dist.learner import Learner
from sattle_dist.randomness import TIES, philox

MAX_QUERIES_PER_BLOCK = 1024  # encoded together
TARGETS_AT_ONCE = 1 << 20  # true and known targets of the queries that are counted together, or those of one query


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The position of every (query, target) pair of a split, in the order of its index; equal on all ranks."""

    source: Int64s  # [pairs]
    relation: Int64s  # [pairs] inverse queries have relations from num_relations on
    target: Int64s  # [pairs]
    position: npt.NDArray[np.float64]  # [pairs] 1-based
    candidates: Int64s  # [pairs] how many entities the target is ranked among, itself included

    def __len__(self) -> int:
        return len(self.position)


def evaluate(
    learner: Learner,
    graph: Graph,
    split: str,
    ties: str,
    seed: int,
    *,
    filtered: bool = True,
    on_queries: Callable[[int], None] = lambda number: None,
) -> Positions:
    """Rank every true target of a split in both directions. Every rank must call it.

    `on_queries` is told the number of distinct queries as they are done.
    """
    index = graph.index(split)
    filters = [graph.index(name) for name in SPLITS] if filtered else []
    table = learner.table
    sizes = Sizes.within(learner.loss.budget, learner.sharding.rows_per_shard, learner.device)
    counter = Counter(table.rows.detach(), table.bias.detach(), table.shard, sizes, learner.group)
    above, equal, candidates = (np.empty(len(index.targets), np.int64) for _ in range(3))
    for places in query_blocks(index):
        keys = index.queries[places]
        vectors = encode_block(learner, *index.split_keys(keys))  # [G, D], padding last
        for part in parts_of_block(index, places, filters, sizes.num_queries):
            pairs, num_known = read_pairs(index, places[part], filters)
            at_most, below, is_number = counter.count(vectors[part], pairs)
            rivals = np.repeat(graph.num_entities - num_known, pairs.num_targets)
            if not filtered:  # the true target was counted as at most as high as itself
                rivals, at_most = rivals - 1, at_most - is_number
            pair = concatenated_ranges(index.offsets[places[part]], pairs.num_targets)
            above[pair], equal[pair], candidates[pair] = rivals - at_most, at_most - below, rivals + 1
        on_queries(len(places))
    source, relation = index.split_keys(np.repeat(index.queries, np.diff(index.offsets)))
    return Positions(
        source=source,
        relation=relation,
        target=index.targets.astype(np.int64),
        position=break_ties(above, equal, ties, seed),
        candidates=candidates,
    )


def break_ties(above: Int64s, equal: Int64s, rule: str, seed: int) -> npt.NDArray[np.float64]:
    """Turn counts of candidates above and equal into positions, by the tie rule.

    A random draw belongs to the pair's place in the split, so it depends on no process and no block.
    """
    if rule == "random":
        uniform = np.random.Generator(philox(TIES, seed)).random(len(equal))
        before: npt.NDArray[np.float64] = np.floor(uniform * (equal + 1))
        return 1.0 + above + before
    share = {"mean": 0.5, "optimistic": 0.0, "pessimistic": 1.0}[rule]
    return 1.0 + above + share * equal


def query_blocks(index: QueryIndex) -> Iterator[Int64s]:
    """Cut a split's queries into blocks that are encoded together; give their places, those of many targets first."""
    for start in range(0, len(index), MAX_QUERIES_PER_BLOCK):
        stop = min(start + MAX_QUERIES_PER_BLOCK, len(index))
        num_targets = np.diff(index.offsets[start : stop + 1])
        yield start + np.argsort(-num_targets, kind="stable")


def parts_of_block(index: QueryIndex, places: Int64s, filters: Sequence[QueryIndex], most: int) -> Iterator[slice]:
    """Cut a block into parts of at most so many queries, and of bounded numbers of true and known targets."""
    keys = index.queries[places]
    load = index.offsets[places + 1] - index.offsets[places] + sum(split.count_known(keys) for split in filters)
    ends = np.cumsum(load)
    start = 0
    while start < len(places):
        before = ends[start] - load[start]
        fitting = int(np.searchsorted(ends, before + TARGETS_AT_ONCE, side="right"))
        stop = min(max(fitting, start + 1), start + most)
        yield slice(start, min(stop, len(places)))
        start = stop


def read_pairs(index: QueryIndex, places: Int64s, filters: Sequence[QueryIndex]) -> tuple[Pairs, Int64s]:
    """Read the targets of the queries at these places, and what is struck out; give also the number of the latter."""
    num_targets, target = index.targets_of(places)
    keys = index.queries[places]
    cells = []  # query and target as one number: a triple may stand in several splits, and is struck out once
    width = 1 << 32
    for split in filters:
        counts, known = split.known_targets(keys)
        cells.append(np.repeat(np.arange(len(keys)) * width, counts) + known)
    struck = np.unique(np.concatenate(cells)) if cells else np.empty(0, np.int64)
    struck_query, struck_target = np.divmod(struck, width)
    pairs = Pairs(
        num_targets=num_targets, target=target.astype(np.int64), struck_query=struck_query, struck=struck_target
    )
    return pairs, np.bincount(struck_query, minlength=len(keys))


def own_part(source: Int64s, relation: Int64s, rank: int, world_size: int) -> OwnQueries:
    """Take a rank's part of a block of queries, padded so that all parts are equal; they bring no targets."""
    size = part_size(len(source), world_size)
    own = slice(rank * size, (rank + 1) * size)
    padding = (0, size - len(source[own]))
    nothing = np.zeros(size, np.int64)
    return OwnQueries(
        source=np.pad(source[own], padding),
        relation=np.pad(relation[own], padding),
        weight=nothing,
        num_targets=nothing,
        target=np.empty(0, np.int64),
        num_queries=len(source),
    )


@torch.no_grad()
def encode_block(learner: Learner, source: Int64s, relation: Int64s) -> Tensor:
    """Encode a block of queries, each rank its part: [G, D] on all, padding last. Every rank must call it."""
    group = learner.group
    queries = own_part(source, relation, group.rank, group.world_size)
    (batch,) = route([queries], learner.sharding, group, learner.device)
    query = learner.encode(learner.table.lookup(batch.lookup), batch.relation)
    return group.all_gather(query, "queries")
