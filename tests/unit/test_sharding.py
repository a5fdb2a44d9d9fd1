"""The one arithmetic of entity_id <-> (shard, row)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sattle_dist.sharding import Sharding


@pytest.mark.parametrize(("num_entities", "num_shards"), [(131, 1), (131, 2), (131, 3), (131, 4), (5, 4), (4, 4)])
def test_every_entity_has_one_place(num_entities: int, num_shards: int) -> None:
    sharding = Sharding(num_entities, num_shards)
    ids = np.arange(num_entities)
    shards = [sharding.shard(s) for s in range(num_shards)]
    assert [e for shard in shards for e in range(shard.start, shard.stop)] == ids.tolist()
    for entity_id, owner, row in zip(ids, sharding.owner(ids), sharding.row(ids), strict=True):
        assert shards[owner].start + row == entity_id
    assert max(map(len, shards)) <= num_entities / num_shards + 1


def test_layout_is_the_one_of_dtensor() -> None:
    for n, w in ((131, 3), (10, 4), (7, 2)):
        chunks = [len(chunk) for chunk in torch.arange(n).chunk(w)]
        assert [len(Sharding(n, w).shard(s)) for s in range(len(chunks))] == chunks
