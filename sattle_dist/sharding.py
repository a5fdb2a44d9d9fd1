"""Where an entity lives: the one file that knows entity_id <-> (shard, row).

Shards are contiguous and ceil(N / num_shards) rows each, the last ones shorter or empty: the layout torch's DTensor
gives to `Shard(0)`, so that a table can be saved and loaded as a DTensor at any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sattle_dist.config import ConfigError


@dataclass(frozen=True)
class Shard:
    """A contiguous slice [start, stop) of the entity table."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Sharding:
    """The cut of N entities into shards, one per process."""

    num_entities: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards > self.num_entities:
            raise ConfigError(
                f"{self.num_shards} processes cannot share {self.num_entities} entities; "
                f"use --nproc {max(1, self.num_entities)} or fewer"
            )

    @property
    def rows_per_shard(self) -> int:
        return -(-self.num_entities // self.num_shards)

    def shard(self, shard: int) -> Shard:
        """Give the slice of entity ids that this shard owns; it may be empty in very small graphs."""
        start = min(shard * self.rows_per_shard, self.num_entities)
        return Shard(start, min(start + self.rows_per_shard, self.num_entities))

    def owner(self, entity_id: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Give the shard that holds each entity."""
        return entity_id // self.rows_per_shard

    def row(self, entity_id: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Give each entity's row inside the shard that holds it."""
        return entity_id % self.rows_per_shard
