"""Batches: which queries a step trains, read from the mapped index and routed to the ranks that need them.

Each rank reads its own queries alone. What others must know of them (the sources they have to send, the targets in
their shard, each query's weight) travels as integers, on the host, for several steps in one exchange.

Shapes: B queries on this rank, G = B * world_size with padding, P targets that this shard owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sattle_dist.collectives import Group
from sattle_dist.graph import Int64s, QueryIndex
from sattle_dist.randomness import Permutation, to_device
from sattle_dist.sharding import Sharding
from sattle_dist.table import Lookup
from sattle_dist.task import ShardTargets

Floats = npt.NDArray[np.float64]

STEPS_PER_PLAN = 16
ALIGNED = 16  # float32 numbers in a cache line


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's work on this rank, on its device."""

    first_place: int  # place in the global batch of this rank's first query
    lookup: Lookup
    relation: Tensor  # [B]
    query_weight: Tensor  # [G] 0 for padding
    target_weight: Tensor | None  # [G] weight of each of a query's targets; None: 1
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
    num_queries: int  # of all ranks together, without padding


class Batches:
    """The batches of a split, in an order that is a function of (seed, epoch).

    A global batch is cut into equal parts; where it does not divide, the last ranks get padding of weight 0, which
    changes neither the loss nor the batch-norm moments. Every query is trained once an epoch.
    """

    def __init__(
        self,
        index: QueryIndex,
        *,
        batch_size: int,
        weigh_by_targets: bool,
        weight_power: float = 1.0,
        seed: int,
        sharding: Sharding,
        group: Group,
        device: torch.device,
    ) -> None:
        self.index, self.batch_size, self.seed = index, batch_size, seed
        self.weigh_by_targets, self.weight_power = weigh_by_targets, weight_power
        self.sharding, self.group, self.device = sharding, group, device
        self.num_steps = -(-len(index) // batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch from a step on, one after the other. Every rank must go through them."""
        order = Permutation(len(self.index), self.seed, epoch)
        for first in range(first_step, self.num_steps, STEPS_PER_PLAN):
            steps = range(first, min(first + STEPS_PER_PLAN, self.num_steps))
            own = [self.read(order, step) for step in steps]
            yield from route(own, self.sharding, self.group, self.device, self.weight_power)

    def read(self, order: Permutation, step: int) -> OwnQueries:
        """Read this rank's part of batch `step`, and pad it."""
        start = step * self.batch_size
        num_queries = min(self.batch_size, len(self.index) - start)
        size = part_size(num_queries, self.group.world_size)
        own = np.arange(num_queries)[self.group.rank * size : (self.group.rank + 1) * size]
        places = order(start + own)
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
            num_queries=num_queries,
        )


def part_size(num_queries: int, world_size: int) -> int:
    """Say how many queries, with padding, each rank takes of a global batch.

    Large batches are rounded up to whole cache lines of scores: unaligned matrix products take half as long again.
    """
    size = -(-num_queries // world_size)
    whole = ALIGNED // math.gcd(ALIGNED, world_size)
    return size if size < 4 * ALIGNED else -(-size // whole) * whole


def route(
    steps: list[OwnQueries], sharding: Sharding, group: Group, device: torch.device, weight_power: float = 1.0
) -> list[Batch]:
    """Tell every rank what it must know of this rank's queries, and learn the same. Every rank must call it.

    To each rank go the rows asked of it, the (query, row) pairs of the targets in its shard, and the queries' weights,
    which are whole numbers on the way and raised to their power by the receiver.
    """
    lookups = []
    parts: list[list[Int64s]] = []  # for each step, rows, queries, rows of targets, weights; each cut by rank
    for queries in steps:
        sources, place = np.unique(queries.source, return_inverse=True)
        asked = cut(sharding.row(sources), sharding.owner(sources), group.world_size)
        lookups.append((place, [len(rows) for rows in asked]))
        first_place = group.rank * len(queries.source)
        query = np.repeat(first_place + np.arange(len(queries.source)), queries.num_targets)
        owner = sharding.owner(queries.target)
        parts += [
            asked,
            cut(query, owner, group.world_size),
            cut(sharding.row(queries.target), owner, group.world_size),
            [queries.weight] * group.world_size,
        ]
    received = exchange(parts, group)
    batches = []
    for step, (queries, (place, ask)) in enumerate(zip(steps, lookups, strict=True)):
        asked, *others = received[4 * step : 4 * step + 4]
        query, row, count = (np.concatenate(pieces) for pieces in others)
        weight, target_weight = weigh(count, weight_power)
        lookup = Lookup(
            place=_to(place, device),
            asked_rows=_to(np.concatenate(asked), device),
            ask=ask,
            asked=[len(rows) for rows in asked],
        )
        batches.append(
            Batch(
                first_place=group.rank * len(queries.source),
                lookup=lookup,
                relation=_to(queries.relation, device),
                query_weight=_to(weight, device).float(),
                target_weight=None if target_weight is None else _to(target_weight, device).float(),
                total_weight=float(weight.sum()),
                num_queries=queries.num_queries,
                targets=ShardTargets.of(query, row, num_queries=len(weight), device=device),
            )
        )
    return batches


def weigh(count: Int64s, power: float) -> tuple[Floats, Floats | None]:
    """Give the weights of queries, count ** power, and of each of their targets, count ** (power - 1).

    A count of 0 is padding and weighs nothing. None stands for targets that all weigh 1.
    """
    if power == 1:
        return count.astype(np.float64), None
    real, base = count > 0, np.maximum(count, 1).astype(np.float64)
    return real * base**power, real * base ** (power - 1)


def cut(items: Int64s, owner: Int64s, num_ranks: int) -> list[Int64s]:
    """Cut items by the rank that owns each, keeping their order."""
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_ranks))
    return np.split(items[by_owner], ends[:-1])


def exchange(parts: list[list[Int64s]], group: Group) -> list[list[Int64s]]:
    """Send parts[p][r] to rank r; give for each part what the ranks sent, in their order. Every rank must call it."""
    if group.world_size == 1:
        return parts
    ones = [1] * group.world_size
    lengths = np.array([[len(piece) for piece in part] for part in parts]).T.copy()  # [ranks, parts]
    their_lengths = group.all_to_all(torch.from_numpy(lengths), ones, ones, "batch plan").numpy()
    payload = np.concatenate([part[rank] for rank in range(group.world_size) for part in parts])
    received = group.all_to_all(
        torch.from_numpy(payload), lengths.sum(1).tolist(), their_lengths.sum(1).tolist(), "batch plan"
    ).numpy()
    pieces = np.split(received, np.cumsum(their_lengths)[:-1])
    return [pieces[part :: len(parts)] for part in range(len(parts))]


def _to(array: Int64s | Floats, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
