"""The row-sharded entity table: this rank's rows and biases, and the exchange of rows that other ranks ask for.

Shapes: B queries on this rank, D dim, S rows in this shard, U distinct sources of this rank's queries, A rows that
other ranks (and this one) asked of this shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sattle_dist.collectives import Group
from sattle_dist.randomness import ROWS, normal_rows
from sattle_dist.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Which rows travel where in one step; made on the host, so the device is never waited for."""

    place: Tensor  # [B] each query's place among this rank's distinct sources
    asked_rows: Tensor  # [A] rows of this shard, in the order of the ranks that asked for them
    ask: list[int]  # distinct sources this rank asks of each rank, U in all
    asked: list[int]  # rows each rank asks of this shard, A in all


class ShardedTable(nn.Module):
    """Rows [S, D] and bias [S] of the entities this rank owns.

    An entity's first row is a function of (seed, entity_id), so the table is the same at any number of processes.
    Gradients are written by hand into `rows.grad` and `bias.grad`, which are allocated once: the loss fills them, then
    the gradients of looked-up rows are added.
    """

    def __init__(self, sharding: Sharding, dim: int, seed: int, group: Group) -> None:
        super().__init__()
        self.sharding, self.group = sharding, group
        self.shard = sharding.shard(group.rank)
        std = math.sqrt(2 / (sharding.num_entities + dim))  # Xavier normal
        self.rows = nn.Parameter(normal_rows(self.shard.start, self.shard.stop, dim, std, ROWS, seed))
        self.bias = nn.Parameter(torch.zeros(len(self.shard)))

    def allocate_gradients(self) -> tuple[Tensor, Tensor]:
        """Make sure the gradient buffers exist, and give them."""
        if self.rows.grad is None or self.bias.grad is None:
            self.rows.grad = torch.zeros_like(self.rows)
            self.bias.grad = torch.zeros_like(self.bias)
        return self.rows.grad, self.bias.grad

    def lookup(self, plan: Lookup) -> Tensor:
        """Fetch the source rows [B, D] of this rank's queries from their owners. Every rank must call it."""
        return lookup(self.rows.detach(), plan, self.group)

    def return_gradients(self, plan: Lookup, grad: Tensor) -> None:
        """Add the gradients [B, D] of looked-up rows to the owners' `rows.grad`. Every rank must call it."""
        distinct = grad.new_zeros(sum(plan.ask), grad.shape[1]).index_add_(0, plan.place, grad)
        returned = self.group.all_to_all(distinct, plan.ask, plan.asked, "source gradients")  # [A, D]
        assert self.rows.grad is not None
        self.rows.grad.index_add_(0, plan.asked_rows, returned)


def lookup(rows: Tensor, plan: Lookup, group: Group) -> Tensor:
    """Fetch rows [B, D] of sharded rows [S, D] from their owners. Every rank must call it."""
    answers = rows[plan.asked_rows]  # [A, D]
    distinct = group.all_to_all(answers, plan.asked, plan.ask, "source rows")  # [U, D]
    return distinct[plan.place]
