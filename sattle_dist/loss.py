"""The 1-N losses over one shard of the entity table, without a queries-by-entities matrix of labels or probabilities.

Scores are x_ji = E_j . q_i + b_j for rows E [S, D], bias b [S] and queries q [G, D]; N entities in all; query i has
targets T_i and weight w_i (bce, softmax: the number of its targets; kvsall: 1); W = sum_i w_i; e is the smoothing.

    bce, kvsall   sum_i [w_i sum_j softplus(x_ji) - u w_i sum_j x_ji - (1 - e) sum_{t in T_i} x_ti] / (N W)
                  with u = 1 / N where there is smoothing, else 0: labels (1 - e) y + 1 / N, as the authors have it
    softmax       sum_i [w_i logsumexp_j x_ji     - u w_i sum_j x_ji - (1 - e) sum_{t in T_i} x_ti] / W
                  with u = e / N, as torch's cross_entropy has it

Loss and gradients are formed together, block of rows by block of rows, in one reused buffer: sigmoid or exp overwrites
the scores, then two products give the gradients of E and q. Weights are multiplied into q, never into the block; the
targets and the term with u are added apart, sparse and in closed form. `dense_loss` is the same in plain torch, for
tests.

Shapes: G queries of the global batch, S rows of this shard, D dim, P targets in this shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sattle_dist.collectives import Group
from sattle_dist.graph import Int64s

TARGETS_AT_ONCE = 1 << 16  # bounds the memory of a query with millions of targets


@dataclass(frozen=True, kw_only=True)
class ShardTargets:
    """The true targets of the global batch that this shard owns, as (query, row) pairs."""

    query: Tensor  # [P]
    row: Tensor  # [P]

    @classmethod
    def of(cls, query: Int64s, row: Int64s, *, num_queries: int, device: torch.device) -> ShardTargets:
        """Take distinct (query, row) pairs; a repeated pair is refused, for it would count twice."""
        cell = np.sort(row * num_queries + query)
        if (cell[1:] == cell[:-1]).any():
            raise ValueError("a query names the same target twice; targets must be distinct")
        query, row = cell % num_queries, cell // num_queries
        return cls(query=torch.from_numpy(query).to(device), row=torch.from_numpy(row).to(device))

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(torch.split(self.query, TARGETS_AT_ONCE), torch.split(self.row, TARGETS_AT_ONCE), strict=True)


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """What the loss is computed from: one shard's rows, and all queries of the global batch."""

    query: Tensor  # [G, D]
    rows: Tensor  # [S, D]
    bias: Tensor  # [S]
    targets: ShardTargets
    query_weight: Tensor  # [G]
    total_weight: float  # W


class OneToAllLoss:
    """One of the losses above, with its score buffer of at most `budget` bytes (at least one row of scores).

    softmax forms the scores twice where they do not fit into the budget: to normalise, then for the gradients. bce and
    kvsall need one pass at any budget. There is no gradient of the gradient; none is needed.
    """

    def __init__(
        self,
        name: str,
        *,
        num_entities: int,
        smoothing: float,
        budget: int,
        group: Group,
        product_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.num_entities, self.smoothing = name, num_entities, smoothing
        self.group, self.budget, self.product_dtype = group, budget, product_dtype
        self._buffer = torch.empty(0)

    def __call__(
        self, task: ShardTask, grad_rows: Tensor, grad_bias: Tensor, *, report: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Overwrite grad_rows [S, D] and grad_bias [S]; return (loss, grad_query [G, D]).

        Both results are this shard's parts, to be summed over the ranks. The loss is None unless `report` is set: for
        bce and kvsall it costs a third of the step. Every rank must call it.
        """
        compute = self._softmax if self.name == "softmax" else self._bce
        return compute(task, grad_rows, grad_bias, report)

    def _bce(self, task: ShardTask, grad_rows: Tensor, grad_bias: Tensor, report: bool) -> tuple[Tensor | None, Tensor]:
        scale = 1 / (self.num_entities * task.total_weight)
        uniform = 1 / self.num_entities if self.smoothing else 0.0
        gradients = _Gradients(task, task.query_weight * scale, grad_rows, grad_bias, self.product_dtype)
        penalty = torch.zeros_like(task.query_weight, dtype=torch.float64)
        for start, stop, x in self._blocks(task):
            if report:
                penalty += F.softplus(x).sum(0)
            gradients.add(start, stop, x.sigmoid_())
        grad_query = gradients.finish(uniform * scale, (1 - self.smoothing) * scale)
        if not report:
            return None, grad_query
        return (penalty @ task.query_weight.double() - self._rewards(task, uniform)) * scale, grad_query

    def _softmax(
        self, task: ShardTask, grad_rows: Tensor, grad_bias: Tensor, report: bool
    ) -> tuple[Tensor | None, Tensor]:
        scale = 1 / task.total_weight
        uniform = self.smoothing / self.num_entities
        top = torch.full_like(task.query_weight, -torch.inf)
        total = torch.zeros_like(top)  # sum_j exp(x_ji - top_i)
        for _, _, x in self._blocks(task):
            new_top = torch.maximum(top, x.amax(0))
            total *= torch.exp(top - new_top)
            total += x.sub_(new_top).exp_().sum(0)
            top = new_top
        # Across shards only a maximum and a sum per query travel.
        tops, totals = self.group.all_gather(torch.stack([top, total])[None], "softmax").unbind(1)  # [ranks, G]
        global_top = tops.amax(0)
        global_total = (totals * torch.exp(tops - global_top)).sum(0)
        shift = torch.exp(top - global_top)

        weight = task.query_weight * scale
        if self._block_rows(task) >= len(task.rows) > 0:  # the only block still holds exp(x - top)
            gradients = _Gradients(task, weight * shift / global_total, grad_rows, grad_bias, self.product_dtype)
            gradients.add(0, len(task.rows), x)
        else:
            gradients = _Gradients(task, weight, grad_rows, grad_bias, self.product_dtype)
            log_total = global_top + global_total.log()
            for start, stop, x in self._blocks(task):
                gradients.add(start, stop, x.sub_(log_total).exp_())
        grad_query = gradients.finish(uniform * scale, (1 - self.smoothing) * scale)
        if not report:
            return None, grad_query
        log_sum = (global_top.double() + global_total.double().log()) @ task.query_weight.double()
        share = len(task.rows) / self.num_entities  # the logsumexp is global: each shard counts a share of it
        return (log_sum * share - self._rewards(task, uniform)) * scale, grad_query

    def _rewards(self, task: ShardTask, uniform: float) -> Tensor:
        """Sum what lowers the loss: u w_i sum_j x_ji + (1 - e) sum_{t in T_i} x_ti, over this shard."""
        hits = torch.zeros((), dtype=torch.float64, device=task.rows.device)
        for query, row in task.targets.pieces():
            hits += ((task.query[query] * task.rows[row]).sum(1) + task.bias[row]).sum(dtype=torch.float64)
        hits *= 1 - self.smoothing
        if uniform:
            weight = task.query_weight
            hits += uniform * ((weight @ task.query) @ task.rows.sum(0) + weight.sum() * task.bias.sum())
        return hits

    def _block_rows(self, task: ShardTask) -> int:
        """Say how many rows of scores [., G] the budget holds."""
        return max(1, self.budget // (len(task.query) * task.query.element_size()))

    def _blocks(self, task: ShardTask) -> Iterator[tuple[int, int, Tensor]]:
        """Give (start, stop, scores [stop - start, G]) for each block of rows; every block is in the same buffer."""
        num_queries = len(task.query)
        size = min(self._block_rows(task), len(task.rows))
        if self._buffer.numel() < size * num_queries:
            self._buffer = task.query.new_empty(size * num_queries)
        for start in range(0, len(task.rows), size or 1):
            stop = min(start + size, len(task.rows))
            x = self._buffer[: (stop - start) * num_queries].view(stop - start, num_queries)
            bias = task.bias[start:stop, None]
            product(task.rows[start:stop], task.query.T, plus=bias, out=x, dtype=self.product_dtype)
            yield start, stop, x


class _Gradients:
    """The gradients of E, b and q: the derivative of the loss by the scores is y * factor [G], y given in blocks."""

    def __init__(
        self,
        task: ShardTask,
        factor: Tensor,
        grad_rows: Tensor,
        grad_bias: Tensor,
        product_dtype: torch.dtype,
    ) -> None:
        self.task, self.factor, self.product_dtype = task, factor, product_dtype
        self.grad_rows, self.grad_bias = grad_rows, grad_bias
        self.weighted_query = task.query * factor[:, None]  # [G, D]
        self.grad_query = torch.zeros_like(task.query)

    def add(self, start: int, stop: int, y: Tensor) -> None:
        """Overwrite the gradients of rows [start, stop) and add their part to the gradient of q."""
        dtype, rows, grad_query = self.product_dtype, self.task.rows[start:stop], self.grad_query
        product(y, self.weighted_query, plus=None, out=self.grad_rows[start:stop], dtype=dtype)
        torch.mv(y, self.factor, out=self.grad_bias[start:stop])
        if dtype == grad_query.dtype:
            grad_query.addmm_(y.T, rows)
        else:
            grad_query += y.T.to(dtype) @ rows.to(dtype)

    def finish(self, uniform: float, hit: float) -> Tensor:
        """Add the closed form of the term with u and the sparse one of the targets; return grad_query [G, D]."""
        task = self.task
        grad_query = self.grad_query.mul_(self.factor[:, None])
        if uniform:
            weight = task.query_weight * uniform
            grad_query -= weight[:, None] * task.rows.sum(0)
            self.grad_rows -= weight @ task.query
            self.grad_bias -= weight.sum()
        for query, row in task.targets.pieces():
            grad_query.index_add_(0, query, task.rows[row], alpha=-hit)
            self.grad_rows.index_add_(0, row, task.query[query], alpha=-hit)
            self.grad_bias.index_add_(0, row, torch.full_like(row, -hit, dtype=self.grad_bias.dtype))
        return grad_query


def product(a: Tensor, b: Tensor, *, plus: Tensor | None, out: Tensor, dtype: torch.dtype) -> None:
    """Set out = a @ b + plus; the factors are rounded to `dtype`, the sum is in out's own."""
    if dtype != out.dtype:
        out.copy_(a.to(dtype) @ b.to(dtype)).add_(0 if plus is None else plus)
    elif plus is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(plus, a, b, out=out)


def dense_loss(
    name: str, query: Tensor, rows: Tensor, bias: Tensor, targets: list[list[int]], smoothing: float
) -> Tensor:
    """State the losses plainly: full scores [G, N], dense labels, one example per triple (kvsall: per query)."""
    scores = query @ rows.T + bias
    num_entities = len(rows)
    if name == "kvsall":
        labels = torch.zeros_like(scores)
        for i, ids in enumerate(targets):
            labels[i, ids] = 1
        examples = scores
    else:
        place = torch.tensor([i for i, ids in enumerate(targets) for _ in ids])
        target = torch.tensor([t for ids in targets for t in ids])
        examples = scores[place]
        if name == "softmax":
            return F.cross_entropy(examples, target, label_smoothing=smoothing)
        labels = F.one_hot(target, num_entities).to(scores.dtype)
    if smoothing:
        labels = (1 - smoothing) * labels + 1 / num_entities
    return F.binary_cross_entropy_with_logits(examples, labels)
