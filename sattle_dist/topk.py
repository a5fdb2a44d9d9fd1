"""The best candidates of queries: every shard's best, chunk by chunk in bounded memory, then merged over the shards.

Candidates of equal score stand in the order of their entity_id, so the answer does not depend on how many processes or
chunks gave it (scores themselves may differ in the last bit, as products of other shapes are summed in other orders).

Shapes: G queries of a block, D dim, S rows of this shard, C rows of a chunk, K candidates wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sattle_dist.data import route
from sattle_dist.evaluator import encode_block, own_part
from sattle_dist.graph import Int64s, QueryIndex
from sattle_dist.learner import Learner

Floats = npt.NDArray[np.float32]

MAX_QUERIES_PER_BLOCK = 1024
MAX_ANSWERS_PER_BLOCK = 1 << 20
NO_ENTITY = 1 << 62
BYTES_PER_SCORE = 12  # float32, its exponential, and what comparing and selecting takes


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best candidates of a block of queries, best first; equal on all ranks.

    Where fewer than K are left, the last places have the score -inf.
    """

    entity_id: Int64s  # [G, K]
    score: Floats  # [G, K]
    share: Floats  # [G, K] exp(score) / sum of exp(score) over all entities


def blocks(num_queries: int, top: int) -> Iterator[slice]:
    """Cut queries into blocks whose answers fit the memory set aside for them."""
    size = max(1, min(MAX_QUERIES_PER_BLOCK, MAX_ANSWERS_PER_BLOCK // top))
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


@torch.no_grad()
def fetch_rows(learner: Learner, entity_id: Int64s) -> Tensor:
    """Give every rank the rows [n, D] of these entities from their owners. Every rank must call it with the same."""
    group = learner.group
    queries = own_part(entity_id, np.zeros_like(entity_id), group.rank, group.world_size)
    (batch,) = route([queries], learner.sharding, group, learner.device)
    return group.all_gather(learner.table.lookup(batch.lookup), "rows")[: len(entity_id)]


@torch.no_grad()
def best_candidates(
    learner: Learner, source: Int64s, relation: Int64s, top: int, strike: Sequence[QueryIndex] = ()
) -> Best:
    """Give the `top` best of all entities for each query [G]. Every rank must call it with the same queries.

    Known targets in the splits of `strike` are left out; they still count in the sum of the shares.
    """
    top = min(top, learner.sharding.num_entities)
    query = encode_block(learner, source, relation)[: len(source)]  # without padding
    struck = struck_rows(learner, source, relation, strike)
    value, entity_id, log_total = best_in_shard(learner, query, top, struck)
    group = learner.group
    values = group.all_gather(value[None], "predictions")  # [ranks, G, K]
    ids = group.all_gather(entity_id[None], "predictions")
    log_total = group.all_gather(log_total[None], "predictions").logsumexp(0)  # [G]
    value, entity_id = merge(values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1), top)
    share = (value - log_total[:, None]).exp()
    return Best(entity_id=entity_id.cpu().numpy(), score=value.cpu().numpy(), share=share.cpu().numpy())


def struck_rows(
    learner: Learner, source: Int64s, relation: Int64s, strike: Sequence[QueryIndex]
) -> tuple[Int64s, Int64s]:
    """Give the (row of this shard, query) pairs [P], [P] that are no candidates, by row."""
    shard = learner.table.shard
    rows, queries = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for index in strike:
        counts, known = index.known_targets(source * index.num_relations_both + relation)
        inside = (shard.start <= known) & (known < shard.stop)
        rows.append(known[inside].astype(np.int64) - shard.start)
        queries.append(np.repeat(np.arange(len(source)), counts)[inside])
    row, query = np.concatenate(rows), np.concatenate(queries)
    by_row = np.argsort(row, kind="stable")
    return row[by_row], query[by_row]


def best_in_shard(
    learner: Learner, query: Tensor, top: int, struck: tuple[Int64s, Int64s]
) -> tuple[Tensor, Tensor, Tensor]:
    """Give scores [G, K] and entity ids [G, K] of this shard's best, and the log of its sum of exp(score) [G]."""
    table, num_queries, device = learner.table, len(query), query.device
    chunk = max(1, learner.loss.budget // (BYTES_PER_SCORE * num_queries))
    value = torch.full((num_queries, top), -torch.inf, device=device)
    entity_id = torch.full((num_queries, top), NO_ENTITY, device=device)
    log_total = torch.full((num_queries,), -torch.inf, device=device)
    for start in range(0, len(table.shard), chunk):
        scores = torch.addmm(table.bias[start : start + chunk], query, table.rows[start : start + chunk].T)  # [G, C]
        log_total = torch.logaddexp(log_total, scores.logsumexp(1))
        first, last = np.searchsorted(struck[0], (start, start + scores.shape[1]))
        row, struck_query = (torch.from_numpy(pairs[first:last]).to(device) for pairs in struck)
        scores[struck_query, row - start] = -torch.inf
        # Later chunks seldom hold anything better, and looking for that is far cheaper than selecting.
        hopeful = (scores.amax(1) > value[:, -1]).nonzero()[:, 0]
        new_value, column = top_of(scores[hopeful], top)
        value[hopeful], entity_id[hopeful] = merge(
            torch.cat([value[hopeful], new_value], 1),
            torch.cat([entity_id[hopeful], column + start + table.shard.start], 1),
            top,
        )
    return value, entity_id, log_total


def top_of(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Select the best K of scores [n, C]: values and columns [n, min(K, C)], of equal scores the first columns."""
    top = min(top, scores.shape[1])
    value, column = scores.topk(top)
    # topk takes any of the scores that equal its last one.
    unsure = (scores >= value[:, -1:]).sum(1) > top
    if unsure.any():
        ordered = scores[unsure].sort(dim=1, descending=True, stable=True)
        value[unsure], column[unsure] = ordered.values[:, :top], ordered.indices[:, :top]
    return value, column


def merge(value: Tensor, entity_id: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Order candidates [G, n] by score, then by entity_id, and keep the first K."""
    entity_id, order = entity_id.sort(dim=1, stable=True)
    value, order = value.gather(1, order).sort(dim=1, descending=True, stable=True)
    return value[:, :top], entity_id.gather(1, order)[:, :top]
