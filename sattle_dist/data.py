"""Batches: which queries a step trains, read from the mapped index and routed to the ranks that need them.

Each rank reads its own queries alone. What others must know of them (the sources they have to send, the targets in
their shard, each query's weight and, if asked to, its relation) travels as integers, on the host, for several steps in
one exchange.

Shapes: B queries on this rank, G = B * world_size with padding, P targets that this shard owns, H queries of this rank
whose source is known by hearsay.
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
from sattle_dist.randomness import HEARSAY, Permutation, philox, to_device
from sattle_dist.sharding import Sharding
from sattle_dist.table import Lookup
from sattle_dist.task import ShardTargets

Floats = npt.NDArray[np.float64]

STEPS_PER_PLAN = 16
ALIGNED = 16  # float32 numbers in a cache line


@dataclass(frozen=True, kw_only=True)
class Hearsay:
    """Queries of this rank whose source is what a neighbour says of it: the query (neighbour, relation) targets it."""

    place: Tensor  # [H] among this rank's queries
    relation: Tensor  # [H]
    lookup: Lookup  # of the neighbours


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
    hearsay: Hearsay | None = None
    relations: Int64s | None = None  # [G] of all queries, on the host, where every rank is to know them

    @property
    def own(self) -> slice:
        """The places of this rank's queries in the global batch."""
        return slice(self.first_place, self.first_place + len(self.relation))


@dataclass(frozen=True, kw_only=True)
class OwnHearsay:
    """The same on the host, before it is known what other ranks ask for."""

    place: Int64s  # [H]
    neighbour: Int64s  # [H]
    relation: Int64s  # [H]

    def on(self, device: torch.device, lookup: Lookup) -> Hearsay:
        """Put it on a device, with the lookup of the neighbours."""
        return Hearsay(place=_to(self.place, device), relation=_to(self.relation, device), lookup=lookup)


@dataclass(frozen=True, kw_only=True)
class OwnQueries:
    """This rank's part of a global batch, as read from the index; padded to B with queries of weight 0."""

    source: Int64s  # [B]
    relation: Int64s  # [B]
    weight: Int64s  # [B]
    num_targets: Int64s  # [B]
    target: Int64s  # [sum of num_targets]
    num_queries: int  # of all ranks together, without padding
    hearsay: OwnHearsay | None = None


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
        hearsay: float = 0.0,
        tell_relations: bool = False,
        seed: int,
        sharding: Sharding,
        group: Group,
        device: torch.device,
    ) -> None:
        self.index, self.batch_size, self.seed, self.hearsay = index, batch_size, seed, hearsay
        self.weigh_by_targets, self.weight_power = weigh_by_targets, weight_power
        self.tell_relations = tell_relations
        self.sharding, self.group, self.device = sharding, group, device
        self.num_steps = -(-len(index) // batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch from a step on, one after the other. Every rank must go through them."""
        order = Permutation(len(self.index), self.seed, epoch)
        for first in range(first_step, self.num_steps, STEPS_PER_PLAN):
            steps = range(first, min(first + STEPS_PER_PLAN, self.num_steps))
            own = [self.read(order, epoch, step) for step in steps]
            yield from route(
                own, self.sharding, self.group, self.device, self.weight_power, tell_relations=self.tell_relations
            )

    def read(self, order: Permutation, epoch: int, step: int) -> OwnQueries:
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
            hearsay=self.hear(source, relation, own, epoch, step) if self.hearsay else None,
        )

    def hear(self, source: Int64s, relation: Int64s, own: Int64s, epoch: int, step: int) -> OwnHearsay:
        """Choose which of these queries, at places `own` of the global batch, hear of their source from a neighbour.

        One of the source's facts is drawn, by its relation, then by its target. If it is of the query's own relation,
        it is what is asked for, and the query keeps the source's row. (The same two entities may have another fact:
        where a relation is symmetric, its inverse tells of the answer, in valid and test as here.)
        """
        index, both = self.index, self.index.num_relations_both
        generator = np.random.Generator(philox(HEARSAY, self.seed, epoch, step))
        chance, which, whom = generator.random((3, min(self.batch_size, len(index))))[:, own]
        first = np.searchsorted(index.queries, source * both)  # a source's queries stand together
        last = np.searchsorted(index.queries, (source + 1) * both)
        fact = first + (which * (last - first)).astype(np.int64)
        _, its_relation = index.split_keys(index.queries[fact])
        start, stop = index.offsets[fact], index.offsets[fact + 1]
        neighbour = index.targets[start + (whom * (stop - start)).astype(np.int64)].astype(np.int64)
        place = np.flatnonzero((chance < self.hearsay) & (its_relation != relation))
        back = (its_relation + both // 2) % both  # the inverse relation leads back
        return OwnHearsay(place=place, neighbour=neighbour[place], relation=back[place])


def part_size(num_queries: int, world_size: int) -> int:
    """Say how many queries, with padding, each rank takes of a global batch.

    Large batches are rounded up to whole cache lines of scores: unaligned matrix products take half as long again.
    """
    size = -(-num_queries // world_size)
    whole = ALIGNED // math.gcd(ALIGNED, world_size)
    return size if size < 4 * ALIGNED else -(-size // whole) * whole


def route(
    steps: list[OwnQueries],
    sharding: Sharding,
    group: Group,
    device: torch.device,
    weight_power: float = 1.0,
    *,
    tell_relations: bool = False,
) -> list[Batch]:
    """Tell every rank what it must know of this rank's queries, and learn the same. Every rank must call it.

    To each rank go the rows asked of it, the (query, row) pairs of the targets in its shard, and the queries' weights,
    which are whole numbers on the way and raised to their power by the receiver; the queries' relations where asked to.
    """
    asking: list[list[Asking]] = []
    parts: list[list[Int64s]] = []  # for each step, the parts below; each cut by rank
    for queries in steps:
        first_place = group.rank * len(queries.source)
        query = np.repeat(first_place + np.arange(len(queries.source)), queries.num_targets)
        owner = sharding.owner(queries.target)
        parts += [
            cut(query, owner, group.world_size),
            cut(sharding.row(queries.target), owner, group.world_size),
            [queries.weight] * group.world_size,
        ]
        if tell_relations:
            parts.append([queries.relation] * group.world_size)
        asked_for = [queries.source, *([queries.hearsay.neighbour] if queries.hearsay else [])]
        asking.append([Asking.of(entities, sharding, group) for entities in asked_for])
        parts += [each.rows for each in asking[-1]]
    received = iter(exchange(parts, group))
    batches = []
    for queries, asks in zip(steps, asking, strict=True):
        query, row, count = (np.concatenate(next(received)) for _ in range(3))
        relations = np.concatenate(next(received)) if tell_relations else None
        lookup, *others = [each.lookup(next(received), device) for each in asks]
        told = queries.hearsay
        hearsay = told.on(device, *others) if told else None
        weight, target_weight = weigh(count, weight_power)
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
                hearsay=hearsay,
                relations=relations,
            )
        )
    return batches


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The rows that this rank asks of each rank, and where each of the entities it needs is among them."""

    rows: list[Int64s]  # by rank
    place: Int64s  # of each entity among the distinct ones, U in all

    @classmethod
    def of(cls, entities: Int64s, sharding: Sharding, group: Group) -> Asking:
        """Ask for the rows of these entities, each once."""
        distinct, place = np.unique(entities, return_inverse=True)
        return cls(rows=cut(sharding.row(distinct), sharding.owner(distinct), group.world_size), place=place)

    def lookup(self, asked: list[Int64s], device: torch.device) -> Lookup:
        """Plan the lookup, once it is known what each rank has asked of this one."""
        return Lookup(
            place=_to(self.place, device),
            asked_rows=_to(np.concatenate(asked), device),
            ask=[len(rows) for rows in self.rows],
            asked=[len(rows) for rows in asked],
        )


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
