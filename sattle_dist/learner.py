"""The learner: model, sharded table, loss and optimizer, and the one training step that ties them together.

Shapes: B queries on this rank, G = B * world_size, D dim, S rows in this shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.data import Batch, Hearsay
from sattle_dist.loss import OneToAllLoss
from sattle_dist.model import QueryModel
from sattle_dist.randomness import draw_masks
from sattle_dist.settled import Settled
from sattle_dist.sharding import Sharding
from sattle_dist.table import ShardedTable, lookup
from sattle_dist.task import ShardTask, Teacher

MIB = 1 << 20


class Learner:
    """One rank's share of the model and the optimizer. Every rank makes one and takes every step."""

    def __init__(
        self, config: Config, num_entities: int, num_relations: int, group: Group, device: torch.device
    ) -> None:
        self.config, self.group, self.device = config, group, device
        seed = config.train.seed
        self.sharding = Sharding(num_entities, group.world_size)
        self.table = ShardedTable(self.sharding, config.model.dim, seed, group).to(device)
        self.model = QueryModel(config.model, num_relations, seed).to(device)
        for norm in self.model.norms():
            norm.sum_over_processes = group.differentiable_sum
        self.replicated = replicate(self.model, group)
        self.mask_specs = self.model.mask_specs()
        self.product_dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
        self.loss = OneToAllLoss(
            config.train.loss,
            num_entities=num_entities,
            smoothing=config.train.label_smoothing,
            budget=score_budget(config.run.score_memory, device),
            group=group,
            product_dtype=self.product_dtype,
        )
        self.teachers: Teachers | None = None  # set from outside, where there are any
        decayed = [self.table.rows]
        others = [p for _, p in self.named_parameters() if p is not self.table.rows]
        self.optimizer = torch.optim.AdamW(  # without weight decay: Adam
            [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": config.train.weight_decay}],
            lr=config.train.learning_rate,
            fused=True,
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """List what is trained on this rank: the replicated parameters, then this rank's shard of the table."""
        for name, parameter in self.model.named_parameters(prefix="model"):
            if parameter.requires_grad:
                yield name, parameter
        yield from self.table.named_parameters(prefix="table")

    def step(self, batch: Batch, epoch: int, step: int, rate: float, *, report: bool) -> Tensor | None:
        """Train one global batch; return this shard's part of the loss if asked to report."""
        self.model.zero_grad()
        own, key = batch.own, (self.config.train.seed, epoch, step)
        masks = draw_masks(self.mask_specs, own.start, own.stop, *key, device=self.device)

        source = self.table.lookup(batch.lookup)  # [B, D]
        if batch.hearsay:
            self.hear(source, batch.hearsay)
        source.requires_grad_()
        self.model.train()
        with self.autocast():
            query = self.replicated(source, batch.relation, batch.query_weight[own], masks)  # [B, D]
        task = ShardTask(
            query=self.group.all_gather(query.detach().float(), "queries"),  # [G, D]
            rows=self.table.rows.detach(),
            bias=self.table.bias.detach(),
            targets=batch.targets,
            query_weight=batch.query_weight,
            total_weight=batch.total_weight,
            target_weight=batch.target_weight,
            teacher=self.teachers.teach(batch, self.config.train.teacher_weight) if self.teachers else None,
        )
        loss, grad_query = self.loss(task, *self.table.allocate_gradients(), report=report)
        query.backward(self.group.reduce_scatter(grad_query, "query gradients").to(query.dtype))
        assert source.grad is not None
        if batch.hearsay:
            source.grad.index_fill_(0, batch.hearsay.place, 0)  # these were not the sources' rows
        self.table.return_gradients(batch.lookup, source.grad)

        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = rate
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def hear(self, source: Tensor, hearsay: Hearsay) -> None:
        """Put what neighbours say of sources in place of their rows in source [B, D]. Every rank must call it.

        A neighbour's query vector points to where its targets' rows should be; it gets the length of the row.
        """
        neighbour = self.table.lookup(hearsay.lookup)  # [H, D]
        if len(neighbour):
            with self.autocast():
                said = self.encode(neighbour, hearsay.relation).float()
            length = torch.linalg.vector_norm(source[hearsay.place], dim=1, keepdim=True)
            source[hearsay.place] = F.normalize(said) * length

    def autocast(self) -> torch.autocast:
        """Round the factors of the encoder's products where --precision asks for it."""
        enabled = self.product_dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def gradient_norm(self) -> Tensor:
        """Give the norm of this rank's gradients: finite if and only if each of them is (or it overflows)."""
        return get_total_norm([p.grad for _, p in self.named_parameters() if p.grad is not None])

    @torch.no_grad()
    def encode(self, source: Tensor, relation: Tensor) -> Tensor:
        """Turn source rows [B, D] and relations [B] into query vectors [B, D], without dropout."""
        self.model.eval()
        query: Tensor = self.model(source, relation, torch.ones_like(relation), {})
        return query


class Teachers:
    """Frozen models that are one scorer: the mean of their scores, as their vectors side by side.

    Their rows are joined to one table, of which each keeps its part, so that rows and queries of all travel together.
    """

    def __init__(self, learners: list[Learner], settled: Settled | None = None) -> None:
        self.learners, self.group, self.settled = learners, learners[0].group, settled
        tables = [learner.table for learner in learners]
        self.dims = [table.rows.shape[1] for table in tables]
        self.rows = tables[0].rows.detach() if len(tables) == 1 else torch.cat([t.rows.detach() for t in tables], 1)
        self.bias = torch.stack([table.bias.detach() for table in tables]).mean(0)
        for table, part in zip(tables, torch.split(self.rows, self.dims, 1), strict=True):
            table.rows.data = part

    @torch.no_grad()
    def teach(self, batch: Batch, weight: float) -> Teacher:
        """Give the queries of a batch and this rank's shard. Every rank must call it."""
        sources = torch.split(lookup(self.rows, batch.lookup, self.group), self.dims, 1)
        queries = []
        for learner, source in zip(self.learners, sources, strict=True):
            with learner.autocast():
                queries.append(learner.encode(source, batch.relation).float())
        query = torch.cat(queries, 1) / len(queries)
        return Teacher(
            query=self.group.all_gather(query, "queries"),
            rows=self.rows,
            bias=self.bias,
            weight=weight,
            settled=self.settled.among(batch.relations) if self.settled else None,
        )


def replicate(model: QueryModel, group: Group) -> DistributedDataParallel:
    """Keep the model equal on all ranks: gradients are summed in buckets, overlapped with backward."""
    # Buffers (running moments) are equal everywhere already, as every rank reduces the same moments.
    replicated = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    replicated.register_comm_hook(None, lambda _, bucket: group.sum_bucket(bucket.buffer()))
    return replicated


def score_budget(mebibytes: int, device: torch.device) -> int:
    """Give the bytes of the score buffer; by default what is fast on this kind of device."""
    return (mebibytes or (1024 if device.type == "cuda" else 64)) * MIB
