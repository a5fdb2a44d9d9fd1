"""The gradients of a shard's loss, formed block by block of its rows from the derivatives by the scores.

Shapes: G queries of the global batch, S rows of this shard, D dim, P targets in this shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sattle_dist.task import ShardTask


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of the shard, and the place of their scores x [rows, G] in the buffer."""

    rows: slice
    x: Tensor


class Gradients:
    """The gradients of E, b and q: the derivative of the loss by the scores is y * factor [G], given by blocks."""

    def __init__(self, task: ShardTask, grad_rows: Tensor, grad_bias: Tensor, product_dtype: torch.dtype) -> None:
        self.task, self.product_dtype = task, product_dtype
        self.grad_rows, self.grad_bias = grad_rows, grad_bias
        self.grad_query = torch.zeros_like(task.query)
        self.part = torch.empty_like(task.query)

    def add(self, block: Block, y: Tensor, factor: Tensor) -> None:
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
