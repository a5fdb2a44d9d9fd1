"""The planner's traffic against the bytes that real processes send, by kind, and against the messages they wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sattle_dist import costs
from sattle_dist.calibrate import measure_speed
from sattle_dist.collectives import Group
from sattle_dist.costs import Workload
from sattle_dist.graph import Graph
from sattle_dist.learner import Teachers
from sattle_dist.settled import Settled
from tests.distributed.test_step import CPU, make_config, make_learner
from tests.graphs import write_graph
from tests.processes import run_processes

N, R, BATCH = 131, 3, 16
CASES: list[tuple[str, str, tuple[int, ...], dict[str, float]]] = [
    ("bce", "twomult", (), {}),
    ("softmax", "tucker", (), {}),
    ("filtered", "twomult", (), {}),
    ("filtered", "twomult", (7,), {"settled_discount": 3.0}),
    ("softmax", "twomult", (7, 4), {"hearsay": 1.0}),
]
"""Loss, decoder, the dims of the teachers, if there are any, and other settings."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring: 262 queries with one target each, every entity the source of two."""
    triples = [(i, i % R, (i + 1) % N) for i in range(N)]
    return write_graph(tmp_path_factory.mktemp("g") / "ring", {"train": triples}, num_entities=N, num_relations=R)


def make_work(loss: str, decoder: str, world_size: int, teacher_dims: tuple[int, ...] = (), **more: float) -> Workload:
    return Workload(
        teachers=tuple(make_config(loss, decoder, dim=dim).model for dim in teacher_dims),
        config=make_config(loss, decoder, batch_size=BATCH, **more),
        num_entities=N,
        num_relations=R,
        num_triples=N,
        num_queries=2 * N,
        world_size=world_size,
    )


def count(group: Group, path: Path) -> list[dict[str, Any]]:
    """Take the 16 whole batches of an epoch that are planned at once; give what each case sent, and its exchanges."""
    results = []
    for loss, decoder, teacher_dims, more in CASES:
        config = make_config(loss, decoder, batch_size=BATCH, **more)
        learner, batches = make_learner(config, Graph.open(path), group)
        if teacher_dims:
            configs = [make_config(loss, decoder, dim=dim) for dim in teacher_dims]
            teachers = [make_learner(config, Graph.open(path), group)[0] for config in configs]
            discount = more.get("settled_discount", 0.0)
            settled = Settled(batches.index, learner.table.shard, discount, CPU) if discount else None
            learner.teachers = Teachers(teachers, settled)
        group.bytes_sent.clear()
        epoch = batches.epoch(0)
        taken = [next(epoch) for _ in range(16)]
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            for step, batch in enumerate(taken):
                learner.step(batch, 0, step, rate=0.0, report=False)
        results.append({"sent": dict(group.bytes_sent), "messages": exchange.call_count / 16})
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_by_kind_are_those_of_real_steps(world_size: int, path: Path) -> None:
    measured = run_processes(world_size, count, path)
    for case, (loss, decoder, teacher_dims, more) in enumerate(CASES):
        work = make_work(loss, decoder, world_size, teacher_dims, **more)
        counted = costs.bytes_sent(work)
        ring = 2 * (world_size - 1)  # DistributedDataParallel's, which is no all-to-all
        for rank in measured:
            assert rank[case]["messages"] == costs.num_messages(work) - ring
        sent = {kind: sum(rank[case]["sent"].get(kind, 0) for rank in measured) / 16 for kind in counted}
        assert set(measured[0][case]["sent"]) == set(counted)
        for kind, total in sent.items():
            if kind in ("source rows", "source gradients", "batch plan"):  # as the graph has it, on average
                assert total == pytest.approx(world_size * counted[kind], rel=0.1), kind
            else:
                assert total == pytest.approx(world_size * counted[kind], abs=world_size), kind


def test_a_lone_process_sends_nothing() -> None:
    work = make_work("softmax", "tucker", 1)
    assert not any(costs.bytes_sent(work).values())
    assert costs.num_messages(work) == 0


def calibrated(group: Group) -> dict[str, float]:
    speed = measure_speed(group, torch.device("cpu"), make_work("softmax", "twomult", group.world_size))
    return vars(speed)


def test_calibration_gives_finite_speeds_on_every_rank() -> None:
    for speed in run_processes(2, calibrated):
        for name in ("encoder", "score", "memory", "link", "latency"):
            assert 0 < speed[name] < 1e15, name
