"""Settled entities: who is one, what that says of a relation, and what is taken off their scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sattle_dist import costs
from sattle_dist.dense import dense_loss
from sattle_dist.graph import QueryIndex
from sattle_dist.settled import Settled, log_odds_of_firsts
from sattle_dist.sharding import Shard
from tests.tracing import LiveBytes
from tests.unit.test_costs import make_work
from tests.unit.test_loss import CPU, G, N, make_task, run, taught

PARENT, CHILD, OTHER = 0, 2, 1  # CHILD is the inverse of PARENT; of OTHER there are no facts
Facts = dict[tuple[int, int], list[int]]

FAMILY: Facts = {(1, PARENT): [0], (2, PARENT): [0], (3, PARENT): [0, 4], (5, PARENT): [0]}
FAMILY |= {(0, CHILD): [1, 2, 3, 5], (4, CHILD): [3]}
"""Of five facts of PARENT, three are their entity's only one; of the same facts of CHILD, one is."""


def make_index(facts: Facts, num_relations: int = 2) -> QueryIndex:
    """Make the index of {(source, relation): targets}."""
    both = 2 * num_relations
    keys = sorted(facts)
    return QueryIndex(
        queries=np.array([s * both + r for s, r in keys]),
        offsets=np.cumsum([0, *(len(facts[key]) for key in keys)]),
        targets=np.array([t for key in keys for t in facts[key]], np.int32),
        num_relations_both=both,
    )


def test_the_odds_of_firsts_are_counted_by_relation(monkeypatch: pytest.MonkeyPatch) -> None:
    want = [math.log(3.5 / 2.5), 0, 0, 0]  # CHILD: 1.5 to 4.5 that it is none
    assert log_odds_of_firsts(make_index(FAMILY)).tolist() == pytest.approx(want)
    monkeypatch.setattr("sattle_dist.settled.QUERIES_AT_ONCE", 2)
    assert log_odds_of_firsts(make_index(FAMILY)).tolist() == pytest.approx(want)


def test_discounts_are_for_those_with_a_fact_of_the_inverse_relation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a parent is no likely child of another; who has children may have more. Shard 1 to 5 of 6 entities."""
    settled = Settled(make_index(FAMILY), Shard(1, 6), 8.0, CPU)
    asked = np.array([CHILD, PARENT, OTHER, CHILD])
    has_parent = torch.tensor([[1.0], [1], [1], [0], [1]])
    want = 8 * math.log(3.5 / 2.5) * has_parent * torch.tensor([1.0, 0, 0, 1])
    for at_once in (1 << 20, 2 * 4 * 4, 1):  # all rows, two, one
        monkeypatch.setattr("sattle_dist.settled.DISCOUNT_BYTES", at_once)
        x = torch.ones(5, 4)
        settled.among(asked).take_off(x, slice(0, 5), 0.5)
        torch.testing.assert_close(x, 1 - want / 2)
        x = torch.ones(2, 4)
        settled.among(asked).take_off(x, slice(2, 4), 1.0)
        torch.testing.assert_close(x, 1 - want[2:4])


@pytest.mark.parametrize("block", [7, N, 2 * N + 100])
def test_a_teacher_is_corrected(block: int) -> None:
    """The loss and every gradient against the dense formula, in blocks and where all scores are kept."""
    rng = np.random.default_rng(7)
    facts: Facts = {
        (s, r): sorted(rng.choice(N, 1 + (rng.random() < r / 10), replace=False).tolist())
        for s in range(N)
        for r in range(5)
        if rng.random() < 0.5
    }
    relations = np.array([0, 1, 2, 3, 4, 5, 2, 3, 4])  # of the inverse of 2 there are no facts
    plain, targets = make_task("filtered", torch.float64, power=0.5)
    task = taught(plain, 0.7)
    assert task.teacher
    settled = Settled(make_index(facts, 3), Shard(0, N), 2.0, CPU).among(relations)
    corrected = replace(task, teacher=replace(task.teacher, settled=settled))
    scores = task.teacher.query @ task.teacher.rows.T + task.teacher.bias
    for i, relation in enumerate(relations):
        counts = {s: len(ts) for (s, r), ts in facts.items() if r == (relation + 3) % 6}
        single, several = sum(n == 1 for n in counts.values()), sum(n for n in counts.values() if n > 1)
        scores[i, list(counts)] -= 2.0 * max(0.0, math.log((single + 0.5) / (several + 0.5)))
    leaves = [x.clone().requires_grad_() for x in (task.query, task.rows, task.bias)]
    value = dense_loss("filtered", *leaves, targets, 0.1, 0.5, (scores, 0.7))
    value.backward()
    ours = run("filtered", corrected, 0.1, budget=block * G * 8)
    assert not torch.allclose(ours[1], run("filtered", task, 0.1, budget=block * G * 8)[1], rtol=0.1)
    for mine, theirs in zip(ours, [value.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_memory_is_counted() -> None:
    """What settled entities take, and the discounts of one block, against what is really allocated."""
    plain = make_work(60_000, loss="filtered", settled_discount=1.0)
    work = replace(plain, teachers=(plain.config.model,))
    facts: Facts = {(s, 1): [0] for s in range(0, 60_000, 12)}
    assert len(facts) == work.num_queries
    settled = Settled(make_index(facts, work.num_relations), Shard(0, 60_000), 1.0, CPU)
    rows = costs.block_rows(work)
    x = torch.zeros(rows, work.num_scored)
    with LiveBytes() as live:
        settled.among(np.arange(work.num_scored) % 14).take_off(x, slice(0, rows), 1.0)
    parts = costs.memory_parts(work)
    assert parts["settled entities"] == settled.row.nbytes + settled.relation.nbytes > 0
    assert parts["discounts"] == pytest.approx(live.peak, rel=0.05)
    assert costs.memory_parts(plain)["settled entities"] == costs.memory_parts(plain)["discounts"] == 0
