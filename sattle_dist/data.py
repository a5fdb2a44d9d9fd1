"""Batches: which queries a step trains, read from the mapped index and routed to the ranks that need them.

Each rank reads its own queries alone. What others must know of them (the sources they have to send, the targets in
their shard, each query's weight) travels in one exchange of integers, on the host.

Shapes: B queries on this rank, G = B * world_size with padding, P targets that this shard owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sattle_dist.collectives import Group
from sattle_dist.graph import Int64s, QueryIndex
from sattle_dist.loss import ShardTargets
from sattle_dist.randomness import Permutation
from sattle_dist.sharding import Sharding
from sattle_dist.table import Lookup


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's work on this rank, on its device."""

    first_place: int  # place in the global batch of this rank's first query
    lookup: Lookup
    relation: Tensor  # [B]
    query_weight: Tensor  # [G] 0 for padding
    total_weight: float  # sum of query_weight
    num_queries: int  # in the global batch, without padding
    targets: ShardTargets  # of all G queries, in this shard

    @property
    def own(self) -> slice:
        """The places of this rank's queries in the global batch."""
        return slice(self.first_place, self.first_place + len(self.relation))


@dataclass(frozen=True, kw_only=True)
class OwnQueries:
    """This rank's part of a global batch, as read from the index; padded to B with queries of weight 0."""

    source: Int64s  # [B]
    relation: Int64s  # [B]
    weight: Int64s  # [B]
    num_targets: Int64s  # [B]
    target: Int64s  # [sum of num_targets]


class Batches:
    """The batches of a split, in an order that is a function of (seed, epoch).

    A global batch is cut into equal parts; where it does not divide (the last batch of an epoch), the last ranks get
    padding of weight 0, which changes neither the loss nor the batch-norm moments. Every query is trained once an
    epoch.
    """

    def __init__(
        self,
        index: QueryIndex,
        *,
        batch_size: int,
        weigh_by_targets: bool,
        seed: int,
        sharding: Sharding,
        group: Group,
        device: torch.device,
    ) -> None:
        self.index, self.batch_size, self.seed = index, batch_size, seed
        self.weigh_by_targets = weigh_by_targets
        self.sharding, self.group, self.device = sharding, group, device
        self.num_steps = -(-len(index) // batch_size)

    def batch(self, epoch: int, step: int) -> Batch:
        """Make batch `step` of an epoch. Every rank must call it."""
        start = step * self.batch_size
        num_queries = min(self.batch_size, len(self.index) - start)
        size = -(-num_queries // self.group.world_size)
        first_place = self.group.rank * size
        own = np.arange(min(first_place, num_queries), min(first_place + size, num_queries))
        order = Permutation(len(self.index), self.seed, epoch)
        queries = self.read(order(start + own), size)
        return route(queries, first_place, num_queries, self.sharding, self.group, self.device)

    def read(self, places: Int64s, size: int) -> OwnQueries:
        """Read the queries at these places of the index, and pad them to `size`."""
        padding = (0, size - len(places))
        source, relation = self.index.split_keys(self.index.queries[places])
        num_targets, target = self.index.targets_of(places)
        weight = num_targets if self.weigh_by_targets else np.ones_like(num_targets)
        return OwnQueries(
            source=np.pad(source, padding),
            relation=np.pad(relation, padding),
            weight=np.pad(weight, padding),
            num_targets=np.pad(num_targets, padding),
            target=target.astype(np.int64),
        )


def route(
    queries: OwnQueries,
    first_place: int,
    num_queries: int,
    sharding: Sharding,
    group: Group,
    device: torch.device,
) -> Batch:
    """Tell every rank what it must know of this rank's queries, and learn the same. Every rank must call it."""
    world_size = group.world_size
    sources, place = np.unique(queries.source, return_inverse=True)
    ask = np.bincount(sharding.owner(sources), minlength=world_size)
    query = np.repeat(first_place + np.arange(len(queries.source)), queries.num_targets)
    by_owner = np.argsort(owner := sharding.owner(queries.target), kind="stable")
    num_pairs = np.bincount(owner, minlength=world_size)

    # To each rank: the rows asked of it, the (query, row) pairs of its shard, and the weights of my queries.
    parts = [sharding.row(sources), query[by_owner], sharding.row(queries.target)[by_owner]]
    counts = [ask, num_pairs, num_pairs]
    received = exchange([*parts, np.tile(queries.weight, world_size)], [*counts, None], group)
    asked_rows, query, row, weight = (np.concatenate(part) for part in received)
    return Batch(
        first_place=first_place,
        lookup=Lookup(
            place=_to(place, device),
            asked_rows=_to(asked_rows, device),
            ask=ask.tolist(),
            asked=[len(rows) for rows in received[0]],
        ),
        relation=_to(queries.relation, device),
        query_weight=_to(weight, device).float(),
        total_weight=float(weight.sum()),
        num_queries=num_queries,
        targets=ShardTargets.of(query, row, num_queries=len(weight), device=device),
    )


def exchange(parts: list[Int64s], counts: list[Int64s | None], group: Group) -> list[list[Int64s]]:
    """Send piece r of every part to rank r; give, part by part, the pieces received from each rank in order.

    counts[p][r] is the length of piece r of part p; None means that all ranks' pieces are of one known length.
    """
    world_size = group.world_size
    lengths = np.stack(
        [
            np.full(world_size, len(part) // world_size) if n is None else n
            for part, n in zip(parts, counts, strict=True)
        ]
    )  # [parts, ranks]
    pieces = [np.split(part, np.cumsum(n)[:-1]) for part, n in zip(parts, lengths, strict=True)]
    if world_size == 1:
        return pieces
    ones = [1] * world_size
    sent_lengths = torch.from_numpy(np.ascontiguousarray(lengths.T))
    received_lengths = group.all_to_all(sent_lengths, ones, ones, "batch plan").numpy()  # [ranks, parts]
    payload = torch.from_numpy(np.concatenate([piece[r] for r in range(world_size) for piece in pieces]))
    received = group.all_to_all(
        payload, lengths.sum(0).tolist(), received_lengths.sum(1).tolist(), "batch plan"
    ).numpy()
    flat = np.split(received, np.cumsum(received_lengths)[:-1])
    return [flat[part :: len(parts)] for part in range(len(parts))]


def _to(array: Int64s, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
