"""Filtered ranking over all entities, exact and sharded, by counting instead of sorting.

The *position* of a true target is one more than the number of candidates that score above it. Candidates of equal score
are ties, and the tie rule says how many of them stand before it: `random` draws the number uniformly (seeded), `mean`
takes half of them, `optimistic` none, `pessimistic` all. Candidates are all entities but the known targets of the query
in any split (the true target apart). A score that is not a number counts as above: a diverged model ranks last.

A true target's score is read from the same matrix product as its competitors'; scored apart it could differ in the last
bit, and fake or hide a tie.

Shapes: G queries of a block, S rows of this shard, P (query, target) pairs of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sattle_dist.data import OwnQueries, part_size, route
from sattle_dist.graph import SPLITS, Graph, Int64s, QueryIndex
from sattle_dist.learner import Learner
from sattle_dist.randomness import TIES, philox

MAX_QUERIES_PER_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The position of every (query, target) pair of a split; equal on all ranks."""

    source: Int64s  # [pairs]
    relation: Int64s  # [pairs] inverse queries have relations from num_relations on
    target: Int64s  # [pairs]
    position: npt.NDArray[np.float64]  # [pairs] 1-based


def metrics(position: npt.NDArray[np.float64]) -> dict[str, float]:
    """Give MRR and Hits@k of positions."""
    if not len(position):
        return {}
    hits = {f"hits@{k}": float((position <= k).mean()) for k in (1, 3, 10)}
    return {"mrr": float((1 / position).mean()), **hits}


def evaluate(learner: Learner, graph: Graph, split: str, ties: str, seed: int) -> Positions:
    """Rank every true target of a split in both directions. Every rank must call it."""
    index = graph.index(split)
    filters = [graph.index(name) for name in SPLITS]
    above, equal, pairs = [], [], []
    for keys, queries in query_blocks(learner, index):
        scores = score_block(learner, queries)  # [G, S]
        num_targets, target = index.known_targets(keys)
        query = np.repeat(np.arange(len(keys)), num_targets)
        pairs.append((keys[query], target.astype(np.int64)))
        block_above, block_equal = count_block(learner, scores, keys, query, pairs[-1][1], filters)
        above.append(block_above)
        equal.append(block_equal)
    if not pairs:
        nothing = np.empty(0, np.int64)
        return Positions(source=nothing, relation=nothing, target=nothing, position=np.empty(0))
    keys = np.concatenate([key for key, _ in pairs])
    targets = np.concatenate([block_targets for _, block_targets in pairs])
    source, relation = index.split_keys(keys)
    position = break_ties(np.concatenate(above), np.concatenate(equal), ties, seed)
    return Positions(source=source, relation=relation, target=targets, position=position)


def break_ties(above: Int64s, equal: Int64s, rule: str, seed: int) -> npt.NDArray[np.float64]:
    """Turn counts of candidates above and equal into positions, by the tie rule."""
    uniform = np.random.Generator(philox(TIES, seed)).random(len(equal))
    before = {
        "random": np.floor(uniform * (equal + 1)),
        "mean": equal / 2,
        "optimistic": np.zeros(len(equal)),
        "pessimistic": equal.astype(np.float64),
    }
    position: npt.NDArray[np.float64] = 1 + above + before[rule]
    return position


def query_blocks(learner: Learner, index: QueryIndex) -> Iterator[tuple[Int64s, OwnQueries]]:
    """Cut a split's queries into blocks whose scores fit the budget; give the keys and this rank's part of each."""
    group, rows = learner.group, learner.sharding.rows_per_shard
    size = min(MAX_QUERIES_PER_BLOCK, max(1, learner.loss.budget // (4 * rows)))
    for start in range(0, len(index), size):
        keys = np.asarray(index.queries[start : start + size])
        yield keys, own_part(*index.split_keys(keys), group.rank, group.world_size)


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
def score_block(learner: Learner, queries: OwnQueries) -> Tensor:
    """Score all queries of a block against this rank's shard: [G, S], padding queries last. Every rank must call it."""
    (batch,) = route([queries], learner.sharding, learner.group, learner.device)
    query = learner.encode(learner.table.lookup(batch.lookup), batch.relation)
    query = learner.group.all_gather(query, "queries")
    return torch.addmm(learner.table.bias, query, learner.table.rows.T)


@torch.no_grad()
def count_block(
    learner: Learner,
    scores: Tensor,
    keys: Int64s,
    query: Int64s,
    target: Int64s,
    filters: Sequence[QueryIndex],
) -> tuple[Int64s, Int64s]:
    """Count the candidates above and equal to each true target [P]; overwrites scores. Every rank must call it."""
    group, shard = learner.group, learner.table.shard
    device = scores.device
    mine = torch.from_numpy((shard.start <= target) & (target < shard.stop)).to(device)
    row = torch.from_numpy(target - shard.start).to(device)
    place = torch.from_numpy(query).to(device)

    true_score = torch.full((len(target),), -torch.inf, device=device)
    true_score[mine] = scores[place[mine], row[mine]]
    true_score = group.all_reduce_max(true_score, "evaluation")
    for split in filters:
        counts, known = split.known_targets(keys)
        known_query = np.repeat(np.arange(len(keys)), counts)
        inside = (shard.start <= known) & (known < shard.stop)
        scores[
            torch.from_numpy(known_query[inside]), torch.from_numpy(known[inside].astype(np.int64) - shard.start)
        ] = -torch.inf
    at_most = torch.empty(len(target), dtype=torch.int64, device=device)
    below = torch.empty_like(at_most)
    pairs_at_once = max(1, learner.loss.budget // (4 * max(1, len(shard))))
    for start in range(0, len(target), pairs_at_once):
        part = slice(start, start + pairs_at_once)
        candidates, bar = scores[place[part]], true_score[part, None]
        at_most[part] = (candidates <= bar).sum(1)
        below[part] = (candidates < bar).sum(1)
    above = group.all_reduce(len(shard) - at_most, "evaluation")
    equal = group.all_reduce(at_most - below, "evaluation")
    return above.cpu().numpy(), equal.cpu().numpy()
