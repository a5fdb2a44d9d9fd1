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

A teacher (another run, frozen) with scores y and p = softmax_j(y) adds c sum_i w_i sum_j -p_ji log softmax_j(x)_ji / W
to softmax and filtered: its word on how candidates compare, over all of them (softmax) or all but T_i (filtered). Its
scores may be corrected first (settled.py).

Loss and gradients are formed together, block of rows by block of rows, in one reused buffer: sigmoid or exp2 overwrites
the scores, then two products give the gradients of E and q. Weights are multiplied into q, not into the block, unless a
teacher's shares of the same block, weighed otherwise, are to be taken off. The targets and the term with u are added
apart, sparse and in closed form. dense.py has the same in plain torch, for tests.

Shapes: G queries of the global batch, S rows of this shard, D dim, P targets in this shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sattle_dist.collectives import Group
from sattle_dist.gradients import Block, Gradients, product
from sattle_dist.settled import SettledCandidates
from sattle_dist.task import Scorer, ShardTask, Teacher

NO_RIVAL = 1e30  # a margin that no two scores have
NOTHING = torch.finfo(torch.float32).min / 2  # the largest score of no candidates
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
        gradients = Gradients(task, grad_rows, grad_bias, self.product_dtype)
        compute = {"softmax": self._softmax, "filtered": self._filtered}.get(self.name, self._bce)
        return compute(task, gradients, report), gradients.grad_query

    def _bce(self, task: ShardTask, gradients: Gradients, report: bool) -> Tensor | None:
        scale = 1 / (self.num_entities * task.total_weight)
        uniform = 1 / self.num_entities if self.smoothing else 0.0
        penalty = torch.zeros_like(task.query_weight, dtype=torch.float64)
        for block in self._cut(task, keep=False):
            x, bias = block.x, task.bias[block.rows, None]
            product(task.rows[block.rows], task.query.T, plus=bias, out=x, dtype=self.product_dtype)
            if report:
                for part in torch.split(x, max(1, CACHE_BYTES // task.row_bytes)):
                    penalty += F.softplus(part).sum(0)
            gradients.add(block, x.sigmoid_(), task.query_weight * scale)
        gradients.finish(uniform * scale, task.target_weights() * ((self.smoothing - 1) * scale))
        if not report:
            return None
        return (penalty @ task.query_weight.double() - self._rewards(task, uniform)) * scale

    def _softmax(self, task: ShardTask, gradients: Gradients, report: bool) -> Tensor | None:
        scale = 1 / task.total_weight
        uniform = self.smoothing / self.num_entities
        powers = self._sum_powers(task, struck_out=False)
        lesson = self._heed(task, powers, report)
        self._add_shares(task, gradients, powers, task.query_weight * scale, lesson)
        gradients.finish(uniform * scale, task.target_weights() * ((self.smoothing - 1) * scale))
        if not report:
            return None
        log_sum = powers.log_sum().double() @ task.query_weight.double()
        share = len(task.rows) / self.num_entities  # the logsumexp is global: each shard counts a share of it
        return (log_sum * share - self._rewards(task, uniform)) * scale + (lesson.loss if lesson else 0)

    def _filtered(self, task: ShardTask, gradients: Gradients, report: bool) -> Tensor | None:
        scale, query = 1 / task.total_weight, task.targets.query
        others = self._sum_powers(task, struck_out=True)
        margin = self._target_scores(task) - others.log_sum()[query]  # z [P]
        weight = task.target_weights() * (margin < NO_RIVAL)  # a query that has every entity as a target says nothing
        pull = weight * (1 - self.smoothing - margin.sigmoid()) * scale  # [P]
        own = torch.zeros_like(task.query_weight).index_add_(0, query, pull)
        push = self.group.all_gather(own[None], "softmax").sum(0)  # [G] the targets of a query lie in many shards
        lesson = self._heed(task, others, report)
        self._add_shares(task, gradients, others, push, lesson)
        gradients.finish(0.0, -pull)
        if not report:
            return None
        losses = (1 - self.smoothing) * F.softplus(-margin) + self.smoothing * F.softplus(margin.clamp_max(NO_RIVAL))
        return losses.double() @ weight.double() * scale + (lesson.loss if lesson else 0)

    def _sum_powers(self, task: ShardTask, *, struck_out: bool, scorer: Scorer | None = None) -> _Powers:
        """Sum 2^x over all candidates of all shards, but for a query's targets where they are struck out.

        The scores are the task's own, or its teacher's, which have a place of their own in the buffer.
        """
        keep = len(task.rows) * task.row_bytes * task.num_scorers <= self.budget
        scorer, place = (scorer, 1) if scorer else (task, 0)
        powers = _Powers(
            blocks=self._cut(task, keep=keep, place=place),
            query=scorer.query * LOG2_E,
            rows=scorer.rows,
            bias=scorer.bias,
            struck_out=struck_out,
            settled=scorer.settled if isinstance(scorer, Teacher) else None,
        )
        # Finite, as a shard may hold nothing but struck out candidates: their -inf less this is still -inf.
        top = torch.full_like(task.query_weight, NOTHING)
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

    def _add_shares(
        self, task: ShardTask, gradients: Gradients, powers: _Powers, factor: Tensor, lesson: _Lesson | None
    ) -> None:
        """Add each candidate's share of the sum of its query, times factor [G], to the gradients.

        Where there is a lesson: and its weight [G] times what the share exceeds the teacher's by.
        """
        if lesson:
            factor = factor + lesson.weight
        for i, block in enumerate(powers.blocks):
            y, scale = self._shares(task, powers, i)
            if lesson:  # into one matrix, so that the products with it are formed once
                theirs, their_scale = self._shares(task, lesson.powers, i)
                y.mul_(factor * scale).addcmul_(theirs, -lesson.weight * their_scale)
                gradients.add(block, y, torch.ones_like(factor))
            else:
                gradients.add(block, y, factor * scale)

    def _shares(self, task: ShardTask, powers: _Powers, i: int) -> tuple[Tensor, Tensor]:
        """Give the shares of block i as a matrix [rows, G] in the buffer, and a factor [G] to multiply it by."""
        if powers.kept_tops:  # the block still holds 2^(x - top), with the top of its time
            return powers.blocks[i].x, torch.exp2(powers.kept_tops[i] - powers.top) / powers.total
        x = self._score_powers(task, powers.blocks[i], powers).sub_(powers.top + powers.total.log2())
        return x.exp2_(), torch.ones_like(powers.total)

    def _heed(self, task: ShardTask, own: _Powers, report: bool) -> _Lesson | None:
        """Take the lesson of the task's teacher, if it has one, before our own shares are added and overwritten."""
        if task.teacher is None:
            return None
        theirs = self._sum_powers(task, struck_out=own.struck_out, scorer=task.teacher)
        lesson = _Lesson(powers=theirs, weight=task.query_weight * (task.teacher.weight / task.total_weight))
        if report:
            mean = torch.zeros_like(lesson.weight, dtype=torch.float64)  # of x by the teacher's shares, in this shard
            for i, block in enumerate(theirs.blocks):
                y, scale = self._shares(task, theirs, i)
                mean += (((y.T @ task.rows[block.rows]) * task.query).sum(1) + task.bias[block.rows] @ y) * scale
            log_sum = torch.where(own.has_candidates(), own.log_sum(), 0).double()
            share = len(task.rows) / self.num_entities
            lesson.loss = (log_sum * share - mean) @ lesson.weight.double()
        return lesson

    def _score_powers(self, task: ShardTask, block: Block, powers: _Powers) -> Tensor:
        """Fill a block with its scores, as powers of two, targets struck out if they are to be."""
        bias = powers.bias[block.rows, None] * LOG2_E
        product(powers.rows[block.rows], powers.query.T, plus=bias, out=block.x, dtype=self.product_dtype)
        x = block.x
        if powers.settled:
            powers.settled.take_off(x, block.rows, LOG2_E)
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

    def _cut(self, task: ShardTask, *, keep: bool, place: int = 0) -> list[Block]:
        """Cut the shard into blocks whose scores fit a cache; all in one place of the buffer, unless they are kept.

        The buffer has a part for each scorer; `place` says whose.
        """
        num_queries, num_rows = len(task.query), len(task.rows)
        most = self.budget if task.rows.is_cuda else min(self.budget, CACHE_BYTES)
        size = min(max(1, most // (task.row_bytes * task.num_scorers)), num_rows)
        part = (num_rows if keep else size) * num_queries
        if self._buffer.numel() < part * task.num_scorers:
            self._buffer = torch.empty(0)  # before there is another
            self._buffer = task.query.new_empty(part * task.num_scorers)
        blocks = []
        for start in range(0, num_rows, max(1, size)):
            stop = min(start + size, num_rows)
            first = place * part + (start * num_queries if keep else 0)
            x = self._buffer[first : first + (stop - start) * num_queries].view(stop - start, num_queries)
            blocks.append(Block(rows=slice(start, stop), x=x))
        return blocks


@dataclass(kw_only=True)
class _Powers:
    """2^x of the candidates, x in units of log2 e, and their sum total * 2^top per query [G]."""

    # Powers of two: e^x = 2^(x log2 e). On a CPU torch's exp2 is three times as fast as its exp, and does not get
    # thirty times slower where it underflows.
    blocks: list[Block]
    query: Tensor  # [G, D] times log2 e
    rows: Tensor  # [S, D]
    bias: Tensor  # [S]
    struck_out: bool  # a query's targets are no candidates
    settled: SettledCandidates | None  # some have a discount
    kept_tops: list[Tensor] = field(default_factory=list)  # [G] per block, where the blocks are kept
    top: Tensor = field(default_factory=lambda: torch.empty(0))
    total: Tensor = field(default_factory=lambda: torch.empty(0))

    def log_sum(self) -> Tensor:
        """Give the logsumexp [G] of the scores."""
        return (self.top + self.total.log2()) / LOG2_E

    def has_candidates(self) -> Tensor:
        """Tell of each query [G] whether anything was summed."""
        return self.top > NOTHING / 2


@dataclass(kw_only=True)
class _Lesson:
    """What the teacher says of the candidates, and what it weighs."""

    powers: _Powers
    weight: Tensor  # [G] that of the query, times the teacher's, over W
    loss: Tensor | int = 0  # this shard's part, where it is reported
