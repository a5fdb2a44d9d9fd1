"""The 1-N losses over one shard of the entity table, without labels, and with scores in a buffer of bounded size.

Scores are x_ji = E_j . q_i + b_j for rows E [S, D], bias b [S] and queries q [G, D]; N entities in all; query i has
targets T_i and weight w_i (bce, softmax: the number of its targets; kvsall: 1), each of its targets the weight v_i = 1;
W = sum_i w_i; e is the smoothing. Where queries weigh less than their targets number, w_i = k_i^p, v_i = k_i^(p - 1).

    bce, kvsall   sum_i [w_i sum_j softplus(x_ji) - u w_i sum_j x_ji - (1 - e) v_i sum_{t in T_i} x_ti] / (N W)
                  with u = 1 / N where there is smoothing, else 0: labels (1 - e) y + 1 / N, as the authors have it
    softmax       sum_i [w_i logsumexp_j x_ji     - u w_i sum_j x_ji - (1 - e) v_i sum_{t in T_i} x_ti] / W
                  with u = e / N, as torch's cross_entropy has it
    filtered      sum_i v_i sum_{t in T_i} [(1 - e) softplus(-z_ti) + e softplus(z_ti)] / W
                  with z_ti = x_ti - logsumexp_{j not in T_i} x_ji: without smoothing, the softmax of each target among
                  the candidates that the filtered evaluation leaves it; targets of one query do not compete

Loss and gradients are formed together, block of rows by block of rows, in one reused buffer: sigmoid or exp2 overwrites
the scores, then two products give the gradients of E and q. Weights are multiplied into q, never into the block; the
targets and the term with u are added apart, sparse and in closed form. `dense_loss` is the same in plain torch, for
tests.

Shapes: G queries of the global batch, S rows of this shard, D dim, P targets in this shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sattle_dist.collectives import Group
from sattle_dist.task import ShardTask

NO_RIVAL = 1e30  # a margin that no two scores have
CACHE_BYTES = 4 << 20  # scores that a CPU's caches hold between the products that write and read them
LOG2_E = math.log2(math.e)
SOFTMAXES = ("softmax", "filtered")  # losses that normalise over all scores; a query's are free up to a constant


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
        bce and kvsall its softplus is the costliest function of the step. Every rank must call it.
        """
        gradients = _Gradients(task, grad_rows, grad_bias, self.product_dtype)
        compute = {"softmax": self._softmax, "filtered": self._filtered}.get(self.name, self._bce)
        return compute(task, gradients, report), gradients.grad_query

    def _bce(self, task: ShardTask, gradients: _Gradients, report: bool) -> Tensor | None:
        scale = 1 / (self.num_entities * task.total_weight)
        uniform = 1 / self.num_entities if self.smoothing else 0.0
        penalty = torch.zeros_like(task.query_weight, dtype=torch.float64)
        for block in self._cut(task, keep=False):
            x = self._score(task, block, task.query)
            if report:
                for part in torch.split(x, max(1, CACHE_BYTES // task.row_bytes)):
                    penalty += F.softplus(part).sum(0)
            gradients.add(block, x.sigmoid_(), task.query_weight * scale)
        gradients.finish(uniform * scale, task.target_weights() * ((self.smoothing - 1) * scale))
        if not report:
            return None
        return (penalty @ task.query_weight.double() - self._rewards(task, uniform)) * scale

    def _softmax(self, task: ShardTask, gradients: _Gradients, report: bool) -> Tensor | None:
        scale = 1 / task.total_weight
        uniform = self.smoothing / self.num_entities
        powers = self._sum_powers(task, struck_out=False)
        self._add_shares(task, gradients, powers, task.query_weight * scale)
        gradients.finish(uniform * scale, task.target_weights() * ((self.smoothing - 1) * scale))
        if not report:
            return None
        log_sum = powers.log_sum().double() @ task.query_weight.double()
        share = len(task.rows) / self.num_entities  # the logsumexp is global: each shard counts a share of it
        return (log_sum * share - self._rewards(task, uniform)) * scale

    def _filtered(self, task: ShardTask, gradients: _Gradients, report: bool) -> Tensor | None:
        scale, query = 1 / task.total_weight, task.targets.query
        others = self._sum_powers(task, struck_out=True)
        margin = self._target_scores(task) - others.log_sum()[query]  # z [P]
        weight = task.target_weights() * (margin < NO_RIVAL)  # a query that has every entity as a target says nothing
        pull = weight * (1 - self.smoothing - margin.sigmoid()) * scale  # [P]
        own = torch.zeros_like(task.query_weight).index_add_(0, query, pull)
        push = self.group.all_gather(own[None], "softmax").sum(0)  # [G] the targets of a query lie in many shards
        self._add_shares(task, gradients, others, push)
        gradients.finish(0.0, -pull)
        if not report:
            return None
        losses = (1 - self.smoothing) * F.softplus(-margin) + self.smoothing * F.softplus(margin.clamp_max(NO_RIVAL))
        return losses.double() @ weight.double() * scale

    def _sum_powers(self, task: ShardTask, *, struck_out: bool) -> _Powers:
        """Sum 2^x over all candidates of all shards, but for a query's targets where they are struck out."""
        keep = len(task.rows) * task.row_bytes <= self.budget
        powers = _Powers(blocks=self._cut(task, keep=keep), query=task.query * LOG2_E, struck_out=struck_out)
        # Finite, as a shard may hold nothing but struck out candidates: their -inf less this is still -inf.
        top = torch.full_like(task.query_weight, torch.finfo(task.query_weight.dtype).min / 2)
        total = torch.zeros_like(top)  # sum_j 2^(x_ji - top_i) over the blocks so far
        for block in powers.blocks:
            x = self._score_powers(task, block, powers)
            new_top = torch.maximum(top, x.amax(0))
            total *= torch.exp2(top - new_top)
            total += x.sub_(new_top).exp2_().sum(0)
            top = new_top
            if keep:
                powers.kept_tops.append(top)
        # Across shards only a maximum and a sum per query travel.
        shard_tops, totals = self.group.all_gather(torch.stack([top, total])[None], "softmax").unbind(1)
        powers.top = shard_tops.amax(0)
        powers.total = (totals * torch.exp2(shard_tops - powers.top)).sum(0)
        if struck_out:  # no candidate may be left
            powers.total.clamp_min_(torch.finfo(top.dtype).tiny)
        return powers

    def _add_shares(self, task: ShardTask, gradients: _Gradients, powers: _Powers, factor: Tensor) -> None:
        """Add each candidate's share of the sum of its query, times factor [G], to the gradients."""
        for i, block in enumerate(powers.blocks):
            if powers.kept_tops:  # the block still holds 2^(x - top), with the top of its time
                held = torch.exp2(powers.kept_tops[i] - powers.top) / powers.total
                gradients.add(block, block.x, factor * held)
            else:
                x = self._score_powers(task, block, powers).sub_(powers.top + powers.total.log2())
                gradients.add(block, x.exp2_(), factor)

    def _score_powers(self, task: ShardTask, block: _Block, powers: _Powers) -> Tensor:
        """Fill a block with its scores, as powers of two, targets struck out if they are to be."""
        x = self._score(task, block, powers.query, LOG2_E)
        if powers.struck_out:
            query, row = task.targets.between(block.rows.start, block.rows.stop)
            x[row - block.rows.start, query] = -torch.inf
        return x

    def _rewards(self, task: ShardTask, uniform: float) -> Tensor:
        """Sum what lowers the loss: u w_i sum_j x_ji + (1 - e) v_i sum_{t in T_i} x_ti, over this shard."""
        hits = self._target_scores(task).double() @ task.target_weights().double()
        hits *= 1 - self.smoothing
        if uniform:
            weight = task.query_weight
            hits += uniform * ((weight @ task.query) @ task.rows.sum(0) + weight.sum() * task.bias.sum())
        return hits

    def _target_scores(self, task: ShardTask) -> Tensor:
        """Give the scores [P] of this shard's targets."""
        pieces = [(task.query[q] * task.rows[r]).sum(1) + task.bias[r] for q, r in task.targets.pieces()]
        return torch.cat(pieces)

    def _cut(self, task: ShardTask, *, keep: bool) -> list[_Block]:
        """Cut the shard into blocks whose scores fit a cache; all in one place of the buffer, unless they are kept."""
        num_queries, num_rows = len(task.query), len(task.rows)
        most = self.budget if task.rows.is_cuda else min(self.budget, CACHE_BYTES)
        size = min(max(1, most // task.row_bytes), num_rows)
        needed = (num_rows if keep else size) * num_queries
        if self._buffer.numel() < needed:
            self._buffer = task.query.new_empty(needed)
        blocks = []
        for start in range(0, num_rows, max(1, size)):
            stop = min(start + size, num_rows)
            first = start * num_queries if keep else 0
            x = self._buffer[first : first + (stop - start) * num_queries].view(stop - start, num_queries)
            blocks.append(_Block(rows=slice(start, stop), x=x))
        return blocks

    def _score(self, task: ShardTask, block: _Block, query: Tensor, unit: float = 1.0) -> Tensor:
        """Fill a block with its scores, times `unit` where the queries have been multiplied by it."""
        rows, bias = task.rows[block.rows], task.bias[block.rows, None] * unit
        product(rows, query.T, plus=bias, out=block.x, dtype=self.product_dtype)
        return block.x


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Some rows of the shard, and the place of their scores x [rows, G] in the buffer."""

    rows: slice
    x: Tensor


@dataclass(kw_only=True)
class _Powers:
    """2^x of the candidates, x in units of log2 e, and their sum total * 2^top per query [G]."""

    # Powers of two: e^x = 2^(x log2 e). On a CPU torch's exp2 is three times as fast as its exp, and does not get
    # thirty times slower where it underflows.
    blocks: list[_Block]
    query: Tensor  # [G, D] times log2 e
    struck_out: bool  # a query's targets are no candidates
    kept_tops: list[Tensor] = field(default_factory=list)  # [G] per block, where the blocks are kept
    top: Tensor = field(default_factory=lambda: torch.empty(0))
    total: Tensor = field(default_factory=lambda: torch.empty(0))

    def log_sum(self) -> Tensor:
        """Give the logsumexp [G] of the scores."""
        return (self.top + self.total.log2()) / LOG2_E


class _Gradients:
    """The gradients of E, b and q: the derivative of the loss by the scores is y * factor [G], given by blocks."""

    def __init__(self, task: ShardTask, grad_rows: Tensor, grad_bias: Tensor, product_dtype: torch.dtype) -> None:
        self.task, self.product_dtype = task, product_dtype
        self.grad_rows, self.grad_bias = grad_rows, grad_bias
        self.grad_query = torch.zeros_like(task.query)
        self.part = torch.empty_like(task.query)

    def add(self, block: _Block, y: Tensor, factor: Tensor) -> None:
        """Overwrite the gradients of the block's rows and add their part to the gradient of q."""
        dtype, rows = self.product_dtype, self.task.rows[block.rows]
        weighted = self.task.query * factor[:, None]  # [G, D]
        torch.mv(y, factor, out=self.grad_bias[block.rows])
        y = y.to(dtype)  # once for both products
        product(y, weighted, plus=None, out=self.grad_rows[block.rows], dtype=dtype)
        product(y.T, rows, plus=None, out=self.part, dtype=dtype)
        self.grad_query.addcmul_(self.part, factor[:, None])

    def finish(self, uniform: float, hits: Tensor) -> None:
        """Add the closed form of the term with u, and hits [P], the derivatives by the targets' scores."""
        task, grad_query = self.task, self.grad_query
        if uniform:
            weight = task.query_weight * uniform
            grad_query -= weight[:, None] * task.rows.sum(0)
            self.grad_rows -= weight @ task.query
            self.grad_bias -= weight.sum()
        for query, row, hit in task.targets.pieces(hits):
            grad_query.index_add_(0, query, task.rows[row] * hit[:, None])
            self.grad_rows.index_add_(0, row, task.query[query] * hit[:, None])
            self.grad_bias.index_add_(0, row, hit)


def product(a: Tensor, b: Tensor, *, plus: Tensor | None, out: Tensor, dtype: torch.dtype) -> None:
    """Set out = a @ b + plus; the factors are rounded to `dtype`, the sums are in out's own."""
    if dtype != out.dtype:
        a, b = a.to(dtype), b.to(dtype)
        if a.is_cuda:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
            if plus is not None:
                out += plus
        else:  # a CPU sums in float32 too, but its result is rounded once more
            rounded = torch.mm(a, b)
            out.copy_(rounded) if plus is None else torch.add(rounded, plus, out=out)
    elif plus is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(plus, a, b, out=out)


def dense_loss(
    name: str,
    query: Tensor,
    rows: Tensor,
    bias: Tensor,
    targets: list[list[int]],
    smoothing: float,
    weight_power: float = 1.0,
) -> Tensor:
    """State the losses plainly: full scores [G, N], dense labels, one example per triple (kvsall: per query).

    A triple whose query has k targets weighs k ** (weight_power - 1) in the mean over the examples.
    """
    scores = query @ rows.T + bias
    num_entities = len(rows)
    if name == "kvsall":
        labels = torch.zeros_like(scores)
        for i, ids in enumerate(targets):
            labels[i, ids] = 1
        examples, weight = scores, scores.new_ones(len(targets))
    else:
        place = torch.tensor([i for i, ids in enumerate(targets) for _ in ids])
        target = torch.tensor([t for ids in targets for t in ids])
        examples = scores[place]
        weight = scores.new_tensor([len(targets[i]) ** (weight_power - 1) for i in place])
        if name == "softmax":
            losses = F.cross_entropy(examples, target, label_smoothing=smoothing, reduction="none")
            return (losses * weight).sum() / weight.sum()
        if name == "filtered":
            known = torch.zeros_like(examples, dtype=torch.bool)
            for example, i in enumerate(place):
                known[example, targets[i]] = True
            others = examples.masked_fill(known, -torch.inf).logsumexp(1)
            margin = examples.gather(1, target[:, None])[:, 0] - others
            label = torch.full_like(margin, 1 - smoothing)
            return F.binary_cross_entropy_with_logits(margin, label, weight, reduction="sum") / weight.sum()
        labels = F.one_hot(target, num_entities).to(scores.dtype)
    if smoothing:
        labels = (1 - smoothing) * labels + 1 / num_entities
    losses = F.binary_cross_entropy_with_logits(examples, labels, reduction="none").mean(1)
    return (losses * weight).sum() / weight.sum()
