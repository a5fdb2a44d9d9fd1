"""Sources known by hearsay, in real processes: what is chosen, the step against a dense reference, and many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sattle_dist.collectives import Group
from sattle_dist.dense import dense_loss
from sattle_dist.graph import Graph
from sattle_dist.randomness import Permutation, draw_masks
from tests import reference
from tests.distributed.test_step import BATCH, CPU, close, initial_parameters, make_config, make_learner, near
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

N, R, SHARE = 131, 3, 0.7
CASES = [("filtered", "twomult"), ("kvsall", "tucker")]
Heard = dict[tuple[int, int], tuple[int, int]]  # (step, place in the global batch): (neighbour, relation)


@pytest.fixture(scope="module")
def graph_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few entities have many facts, so that most sources have several relations and some have one."""
    splits = random_splits(4, num_entities=N, num_relations=R, num_triples=250)
    return write_graph(tmp_path_factory.mktemp("g") / "g", splits, num_entities=N, num_relations=R)


def listen_often(group: Group, path: Path, cases: list[tuple[float, int]]) -> list[Heard]:
    """Give whom this rank's queries hear, by the ids of the whole graph, for each (share, epoch)."""
    return [listen(group, path, share, epoch) for share, epoch in cases]


def listen(group: Group, path: Path, share: float, epoch: int) -> Heard:
    learner, batches = make_learner(make_config("softmax", "twomult", hearsay=share), Graph.open(path), group)
    ids = torch.arange(learner.table.shard.start, learner.table.shard.stop, dtype=torch.float32)
    learner.table.rows.data = ids[:, None].clone()  # a row says whose it is
    heard = {}
    for step, batch in enumerate(batches.epoch(epoch)):
        assert batch.hearsay
        neighbour = learner.table.lookup(batch.hearsay.lookup)[:, 0]
        places = batch.own.start + batch.hearsay.place
        for place, who, how in zip(places, neighbour, batch.hearsay.relation, strict=True):
            heard[step, int(place)] = (int(who), int(how))
    return heard


def queries_of(path: Path, epoch: int) -> list[tuple[int, int]]:
    """List (source, relation) in the order of an epoch."""
    index = Graph.open(path).index("train")
    order = Permutation(len(index), 3, epoch)(np.arange(len(index)))
    source, relation = index.split_keys(index.queries[order])
    return list(zip(source.tolist(), relation.tolist(), strict=True))


def facts_of(path: Path) -> set[tuple[int, int, int]]:
    """List every fact in both directions."""
    index = Graph.open(path).index("train")
    source, relation = index.split_keys(np.repeat(index.queries, np.diff(index.offsets)))
    return set(zip(source.tolist(), relation.tolist(), index.targets.tolist(), strict=True))


def test_neighbours_are_true_and_of_another_relation(graph_path: Path) -> None:
    """Chosen alike at 1, 2 and 3 processes; never the fact that is asked for; about as many as there should be."""
    queries, facts = queries_of(graph_path, 1), facts_of(graph_path)
    relations: dict[int, set[int]] = {}
    for source, relation, _ in facts:
        relations.setdefault(source, set()).add(relation)
    possible = sum(1 - 1 / len(relations[source]) for source, _ in queries)  # how often another relation is drawn
    cases = [(1.0, 1), (0.3, 1), (0.3, 2)]
    (chosen,) = run_processes(1, listen_often, graph_path, cases)
    for heard, share in zip(chosen, (1.0, 0.3), strict=False):
        for (step, place), (neighbour, relation) in heard.items():
            source, asked = queries[step * BATCH + place]
            assert (neighbour, relation, source) in facts
            assert (relation + R) % (2 * R) != asked
        assert len(heard) == pytest.approx(share * possible, rel=0.2)
        assert len({whom for whom, _ in heard.values()}) > 20
    assert chosen[1] != chosen[2]  # another epoch
    for world_size in (2, 3):
        ranks = run_processes(world_size, listen_often, graph_path, cases)
        joined = [{key: value for part in parts for key, value in part.items()} for parts in zip(*ranks, strict=True)]
        assert joined == chosen


def first_steps(group: Group, path: Path) -> list[dict[str, Any]]:
    results = []
    for loss, decoder in CASES:
        learner, batches = make_learner(make_config(loss, decoder, hearsay=SHARE), Graph.open(path), group)
        value = learner.step(next(batches.epoch(0)), 0, 0, rate=0.0, report=True)
        results.append(
            {
                "loss": group.all_reduce(value, "loss").item(),
                "model": {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.requires_grad},
                "rows": learner.table.rows.grad.clone(),
            }
        )
    return results


def said_by(group: Group, path: Path, loss: str, decoder: str, whom: list[int], how: list[int]) -> torch.Tensor:
    """Encode queries of a learner that has not learnt anything yet, without dropout."""
    learner, _ = make_learner(make_config(loss, decoder), Graph.open(path), group)
    return learner.encode(learner.table.rows[whom].detach(), torch.tensor(how))


def dense_step(path: Path, loss: str, decoder: str, heard: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """The first batch in double precision: replaced sources are constants, all else is autograd's."""
    config = make_config(loss, decoder)
    start = run_processes(1, initial_parameters, config, path)[0]
    rows = start["rows"].double().requires_grad_()
    parameters = {name: p.double().requires_grad_() for name, p in start["model"].items()}
    index = Graph.open(path).index("train")
    chosen = Permutation(len(index), config.train.seed, 0)(np.arange(BATCH))
    targets = [index.targets[index.offsets[i] : index.offsets[i + 1]].tolist() for i in chosen]
    source, relation = (torch.from_numpy(x) for x in index.split_keys(index.queries[chosen]))
    whom, how = zip(*heard.values(), strict=True)
    said = run_processes(1, said_by, path, loss, decoder, list(whom), list(how))[0].double()
    tokens = list(rows[source])
    for place, vector in zip(heard, said, strict=True):
        tokens[place] = vector / vector.norm() * rows[source[place]].detach().norm()
    repeat = torch.arange(BATCH)
    if loss != "kvsall":
        repeat = repeat.repeat_interleave(torch.tensor([len(t) for t in targets]))
    masks = draw_masks(start["specs"], 0, BATCH, config.train.seed, 0, 0, device=CPU)
    masks = {name: mask.double()[repeat] for name, mask in masks.items()}
    query = reference.query_vectors(parameters, config.model, torch.stack(tokens)[repeat], relation[repeat], masks)
    first = torch.tensor([(repeat == i).nonzero()[0, 0] for i in range(BATCH)])
    bias = torch.zeros(N, dtype=torch.float64)
    value = dense_loss(loss, query[first], rows, bias, targets, config.train.label_smoothing, 1.0)
    grads = torch.autograd.grad(value, [rows, *parameters.values()], allow_unused=True)
    return {"loss": value.item(), "rows": grads[0], "model": dict(zip(parameters, grads[1:], strict=True))}


def test_a_step_hears_its_sources(graph_path: Path) -> None:
    """Loss and every gradient against the dense formula, with dropout, at 1 and 3 processes."""
    (chosen,) = run_processes(1, listen, graph_path, SHARE, 0)
    heard = {place: whom for (step, place), whom in chosen.items() if step == 0}
    wanted = [dense_step(graph_path, loss, decoder, heard) for loss, decoder in CASES]
    for world_size in (1, 3):
        by_rank = run_processes(world_size, first_steps, graph_path)
        for want, ours in zip(wanted, zip(*by_rank, strict=True), strict=True):
            for rank in ours:
                assert rank["loss"] == pytest.approx(want["loss"], rel=1e-5)
                for name, grad in rank["model"].items():
                    close(grad, want["model"][name], f"{world_size} processes, {name}")
            close(torch.cat([rank["rows"] for rank in ours]), want["rows"], f"{world_size} processes, rows")


def train(group: Group, path: Path) -> dict[str, Any]:
    config = make_config("filtered", "twomult", hearsay=0.5, batch_size=29)
    learner, batches = make_learner(config, Graph.open(path), group)
    losses = []
    for epoch in range(3):
        for step, batch in enumerate(batches.epoch(epoch)):
            value = learner.step(batch, epoch, step, rate=0.01, report=True)
            losses.append(group.all_reduce(value, "loss").item())
    return {"losses": losses, "rows": learner.table.rows.detach()}


def test_three_epochs_agree(graph_path: Path) -> None:
    """Batches of 29 and a last one that is smaller: 1 to 3 processes, with padding."""
    single = run_processes(1, train, graph_path)[0]
    assert len(single["losses"]) > 30
    for world_size in (2, 3):
        ranks = run_processes(world_size, train, graph_path)
        np.testing.assert_allclose(ranks[0]["losses"], single["losses"], rtol=1e-4)
        near(torch.cat([rank["rows"] for rank in ranks]), single["rows"], "rows")
