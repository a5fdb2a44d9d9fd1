"""The exchanges between processes, each counted in bytes. No other file of the training step calls torch.distributed.

Shapes: B queries on this rank, G = B * world_size, D dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

HEARTBEAT_SECONDS = 1.0
T = TypeVar("T")


class Group:
    """The processes of a run. Every rank must make the same calls in the same order.

    Everything but the encoder's gradients goes by one all-to-all and is summed by the receiver in the order of the
    ranks: one hop instead of a ring's many (small messages pay by the hop), and a sum that does not depend on timing.
    `bytes_sent` counts, by kind, what this rank sends to others. A lone process exchanges nothing and copies nothing.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.bytes_sent: Counter[str] = Counter()

    def all_gather(self, x: Tensor, kind: str) -> Tensor:
        """Gather [B, ...] of every rank into [G, ...], in the order of the ranks."""
        if self.world_size == 1:
            return x
        sizes = [len(x)] * self.world_size
        return self.all_to_all(x.repeat(self.world_size, *[1] * (x.dim() - 1)), sizes, sizes, kind)

    def reduce_scatter(self, x: Tensor, kind: str) -> Tensor:
        """Sum [G, ...] over the ranks and give each its own [B, ...]."""
        if self.world_size == 1:
            return x
        sizes = [len(x) // self.world_size] * self.world_size
        return self.all_to_all(x, sizes, sizes, kind).view(self.world_size, sizes[0], *x.shape[1:]).sum(0)

    def all_reduce(self, x: Tensor, kind: str) -> Tensor:
        """Sum small tensors over the ranks."""
        return x if self.world_size == 1 else self.all_gather(x[None], kind).sum(0)

    def all_reduce_max(self, x: Tensor, kind: str) -> Tensor:
        """Take the maximum of small tensors over the ranks."""
        return x if self.world_size == 1 else self.all_gather(x[None], kind).amax(0)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> Tensor:
        """Send the first send[0] items of x to rank 0, the next to rank 1 ...; receive likewise."""
        if self.world_size == 1:
            return x
        others = sum(send) - send[self.rank]
        self.bytes_sent[kind] += others * x[0].numel() * x.element_size() if others else 0
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send))
        return out

    def differentiable_sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks; in backward the gradients are summed over the ranks too."""
        return x if self.world_size == 1 else cast(Tensor, _SumOverRanks.apply(x, self))  # type: ignore[no-untyped-call]

    def share(self, value: Any) -> Any:
        """Give every rank the small plain value that rank 0 holds."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank the list of all ranks' small plain values."""
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        dist.barrier()

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Let rank 0 do what one process must do alone, however long it takes, and give it the result.

        The others hear from it all the while, so that none takes it for dead (--timeout). What it raises is raised on
        rank 0 alone.
        """
        if self.world_size == 1:
            return work()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if self.rank == 0:
            Thread(target=run, daemon=True).start()  # which, unlike a pool's, holds up no process that is to end
        while not self.share(bool(wait([future], HEARTBEAT_SECONDS).done) if self.rank == 0 else None):
            pass
        return future.result() if self.rank == 0 else None

    def sum_bucket(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Sum a bucket of DistributedDataParallel's gradients, whose default is the mean.

        The loss is normalised once, by the global count, so the global gradient is the sum of the ranks' gradients.
        """
        if self.world_size == 1:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        ring_share = 2 * (self.world_size - 1) / self.world_size
        self.bytes_sent["encoder gradients"] += int(ring_share * buffer.numel() * buffer.element_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return cast("torch.futures.Future[Tensor]", work.get_future().then(lambda future: future.value()[0]))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x, "batch-norm moments")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return ctx.group.all_reduce(grad, "batch-norm moments"), None
