"""The sharded step in real processes against a dense, single-process, per-triple reference: loss and every gradient."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.data import Batches
from sattle_dist.dense import dense_loss
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.randomness import Permutation, draw_masks
from sattle_dist.sharding import Sharding
from sattle_dist.trainer import Trainer
from tests import reference
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R, BATCH = 131, 3, 16
CASES = [
    *itertools.product(("bce", "kvsall", "softmax"), ("twomult", "tucker"), (1.0,)),
    ("softmax", "twomult", 0.0),  # weight_power: every query weighs 1, a k-th of it each of its k targets
    ("filtered", "twomult", 1.0),
    ("filtered", "tucker", 0.0),
]


def make_config(loss: str, decoder: str, **more: Any) -> Config:
    small = {"dim": 9, "num_heads": 4, "dim_key": 5, "dim_value": 3, "dim_hidden": 8, "batch_size": BATCH, "seed": 3}
    settings = {**small, "loss": loss, "decoder": decoder, "label_smoothing": 0.1, **more}
    return Config().override(settings, "test")


def make_learner(config: Config, graph: Graph, group: Group) -> tuple[Learner, Batches]:
    learner = Learner(config, graph.num_entities, graph.num_relations, group, CPU)
    batches = Batches(
        graph.index("train"),
        batch_size=config.train.batch_size,
        weigh_by_targets=config.train.loss != "kvsall",
        weight_power=config.train.weight_power,
        hearsay=config.train.hearsay,
        tell_relations=config.train.settled_discount > 0,
        seed=config.train.seed,
        sharding=learner.sharding,
        group=group,
        device=CPU,
    )
    return learner, batches


@pytest.fixture(scope="module")
def graph_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts on the first and last row of every shard of 2, 3 and 4; many targets, repeated sources.

    33 queries, so that the last batch of 16 holds a single one: at 4 processes three of them have nothing but padding.
    """
    borders = sorted({x for w in (2, 3, 4) for s in range(w) for x in edges(Sharding(N, w).shard(s))})
    triples = [(7, 0, t) for t in borders] + [(t, 1, 7) for t in borders[:3]] + [(7, 2, 8), (7, 1, 9), (8, 1, 9)]
    triples += [(20, 2, 50), (21, 2, 50), *((30 + i, 2, 40 + i) for i in range(4))]
    path = write_graph(tmp_path_factory.mktemp("g") / "borders", {"train": triples}, num_entities=N, num_relations=R)
    assert len(Graph.open(path).index("train")) == 2 * BATCH + 1
    return path


def edges(shard: Any) -> tuple[int, int]:
    return shard.start, shard.stop - 1


def step_everywhere(group: Group, path: Path) -> list[dict[str, Any]]:
    """Take every batch of an epoch at learning rate 0, for every case; give losses and gradients."""
    results = []
    for loss, decoder, power in CASES:
        learner, batches = make_learner(make_config(loss, decoder, weight_power=power), Graph.open(path), group)
        if decoder == "tucker":
            learner.loss.budget = 1000  # a few rows at a time; softmax then needs a second pass
        for step, batch in enumerate(batches.epoch(0)):
            value = learner.step(batch, 0, step, rate=0.0, report=True)
            results.append(
                {
                    "loss": group.all_reduce(value, "loss").item(),
                    "model": {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.requires_grad},
                    "rows": learner.table.rows.grad.clone(),
                    "bias": learner.table.bias.grad.clone(),
                    "running": [b.clone() for b in learner.model.buffers()],
                }
            )
    return results


def dense_steps(path: Path) -> list[dict[str, Any]]:
    """The same in double precision with plain loops: one row per triple, full scores, dense labels, autograd."""
    results = []
    graph = Graph.open(path)
    index = graph.index("train")
    for loss, decoder, power in CASES:
        config = make_config(loss, decoder, weight_power=power)
        learner = run_processes(1, initial_parameters, config, path)[0]
        rows = learner["rows"].double().requires_grad_()
        bias = torch.zeros(N, dtype=torch.float64, requires_grad=True)
        parameters = {name: p.double().requires_grad_() for name, p in learner["model"].items()}
        order = Permutation(len(index), config.train.seed, 0)(np.arange(len(index)))
        for step, start in enumerate(range(0, len(index), BATCH)):
            chosen = order[start : start + BATCH]
            targets = [index.targets[index.offsets[i] : index.offsets[i + 1]].tolist() for i in chosen]
            source, relation = (torch.from_numpy(x) for x in index.split_keys(index.queries[chosen]))
            masks = draw_masks(learner["specs"], 0, len(chosen), config.train.seed, 0, step, device=CPU)
            repeat = torch.arange(len(chosen))
            if loss != "kvsall" and power == 1:
                repeat = repeat.repeat_interleave(torch.tensor([len(t) for t in targets]))
            repeated_masks = {name: m.double()[repeat] for name, m in masks.items()}
            if len(repeat) == 1:  # torch's batch norm refuses a single row; the moments of two equal rows are the same
                repeat = repeat.repeat(2)
                repeated_masks = {name: m.repeat(2, *[1] * (m.dim() - 1)) for name, m in repeated_masks.items()}
            query = reference.query_vectors(
                parameters, config.model, rows[source[repeat]], relation[repeat], repeated_masks
            )
            first = torch.tensor([(repeat == i).nonzero()[0, 0] for i in range(len(chosen))])
            value = dense_loss(loss, query[first], rows, bias, targets, config.train.label_smoothing, power)
            leaves = [rows, bias, *parameters.values()]
            grads = torch.autograd.grad(value, leaves, allow_unused=True)
            results.append(
                {
                    "loss": value.item(),
                    "rows": grads[0],
                    "bias": grads[1],
                    "model": dict(zip(parameters, grads[2:], strict=True)),
                }
            )
    return results


def initial_parameters(group: Group, config: Config, path: Path) -> dict[str, Any]:
    learner, _ = make_learner(config, Graph.open(path), group)
    return {
        "rows": learner.table.rows.detach(),
        "model": {name: p.detach() for name, p in learner.model.named_parameters()},
        "specs": learner.mask_specs,
    }


@pytest.fixture(scope="module")
def expected(graph_path: Path) -> list[dict[str, Any]]:
    return dense_steps(graph_path)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradients(world_size: int, graph_path: Path, expected: list[dict[str, Any]]) -> None:
    """All losses and decoders; targets on shard borders, one source in many queries, dropout, a batch of one query."""
    by_rank = run_processes(world_size, step_everywhere, graph_path)
    for place, want in enumerate(expected):
        ours = [results[place] for results in by_rank]
        for rank in range(world_size):
            assert ours[rank]["loss"] == pytest.approx(want["loss"], rel=1e-5)
            for a, b in zip(ours[rank]["running"], ours[0]["running"], strict=True):
                assert torch.equal(a, b)
            for name, grad in ours[rank]["model"].items():
                close(grad, want["model"][name], f"case {place}, rank {rank}, {name}")
        close(torch.cat([o["rows"] for o in ours]), want["rows"], f"case {place}, rows")
        close(torch.cat([o["bias"] for o in ours]), want["bias"], f"case {place}, bias")


def close(ours: torch.Tensor, want: torch.Tensor, where: str) -> None:
    scale = want.abs().max().item()
    torch.testing.assert_close(ours.double(), want, rtol=1e-3, atol=1e-5 * scale + 1e-9, msg=lambda m: f"{where}: {m}")


def train_steps(group: Group, path: Path, loss: str, decoder: str, batch_size: int) -> dict[str, Any]:
    config = make_config(loss, decoder, batch_size=batch_size)
    learner, batches = make_learner(config, Graph.open(path), group)
    losses: list[float] = []
    for epoch in itertools.count():
        for step, batch in enumerate(batches.epoch(epoch)):
            value = learner.step(batch, epoch, step, rate=0.01, report=True)
            losses.append(group.all_reduce(value, "loss").item())
        if len(losses) >= 50:
            break
    return {
        "losses": losses,
        "model": {n: p.detach() for n, p in learner.model.named_parameters()},
        "buffers": {n: b.detach() for n, b in learner.model.named_buffers()},
        "rows": learner.table.rows.detach(),
        "bias": learner.table.bias.detach(),
    }


@pytest.mark.parametrize(
    ("loss", "decoder", "batch_size"),
    [("softmax", "twomult", 29), ("bce", "tucker", 150)],  # 150 queries are 160 with padding, or 2 x 80, 3 x 50, 4 x 38
)
def test_fifty_steps_agree(loss: str, decoder: str, batch_size: int, tmp_path: Path) -> None:
    """Losses and parameters after 50 steps with dropout: 1 to 4 processes agree to 1e-4 of each tensor's size."""
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=300)
    path = write_graph(tmp_path / "g", splits, num_entities=N, num_relations=R)
    runs = {w: run_processes(w, train_steps, path, loss, decoder, batch_size) for w in (1, 2, 3, 4)}
    single = runs[1][0]
    assert np.mean(single["losses"][-15:]) < np.mean(single["losses"][:15])  # it learns something
    for ranks in runs.values():
        np.testing.assert_allclose(ranks[0]["losses"], single["losses"], rtol=1e-4)
        for name in ("rows", "bias"):
            near(torch.cat([r[name] for r in ranks]), single[name], name)
        for kind in ("model", "buffers"):
            for name, value in single[kind].items():
                for r in ranks:
                    near(r[kind][name], value, name)


def near(ours: torch.Tensor, want: torch.Tensor, name: str) -> None:
    error = (ours - want).norm() / want.norm().clamp_min(1e-6)
    assert error < 1e-4, f"{name}: {error:.2e}"


def untouched_shard(group: Group, path: Path) -> tuple[list[float], float]:
    learner, batches = make_learner(make_config("softmax", "twomult"), Graph.open(path), group)
    value = learner.step(next(batches.epoch(0)), 0, 0, rate=0.001, report=True)
    return [group.all_reduce(value, "loss").item()], learner.table.rows.grad.abs().max().item()


def test_shards_without_sources_or_targets(tmp_path: Path) -> None:
    """Facts among the first ten entities only: the other shards take part as candidates."""
    splits = {"train": [(i, 0, i + 1) for i in range(9)]}
    path = write_graph(tmp_path / "g", splits, num_entities=N, num_relations=1)
    results = run_processes(4, untouched_shard, path)
    single = run_processes(1, untouched_shard, path)[0]
    for losses, largest_gradient in results:
        assert losses == pytest.approx(single[0], rel=1e-6)
        assert largest_gradient > 0


def test_an_empty_shard(tmp_path: Path) -> None:
    """5 entities over 4 processes are 2, 2, 1 and 0 rows."""
    splits = {"train": [(0, 0, 1), (1, 0, 2), (3, 0, 4), (4, 0, 0)]}
    path = write_graph(tmp_path / "g", splits, num_entities=5, num_relations=1)
    single = run_processes(1, last_losses, path)[0]
    assert run_processes(4, last_losses, path)[3] == pytest.approx(single, rel=1e-5)


def last_losses(group: Group, path: Path) -> list[float]:
    losses = []
    for loss in ("bce", "kvsall", "softmax", "filtered"):
        learner, batches = make_learner(make_config(loss, "twomult"), Graph.open(path), group)
        for epoch in range(3):
            value = learner.step(next(batches.epoch(epoch)), epoch, 0, rate=0.01, report=True)
        losses.append(group.all_reduce(value, "loss").item())
    return losses


def trained_weights(group: Group, path: Path) -> tuple[list[int], list[float]]:
    config = make_config("softmax", "twomult", weight_power=0.5)
    trainer = Trainer(config, Graph.open(path), path.parent / "run", group, CPU)
    batch = next(trainer.batches.epoch(0))
    return batch.targets.query.bincount(minlength=len(batch.query_weight)).tolist(), batch.query_weight.tolist()


def test_a_run_weighs_its_queries_as_it_is_told(graph_path: Path) -> None:
    ((number, weight),) = run_processes(1, trained_weights, graph_path)
    assert max(number) > 1
    assert weight == pytest.approx([n**0.5 for n in number])


def stepped_parameters(group: Group, path: Path, decay: float) -> tuple[dict[str, Any], dict[str, Any]]:
    learner, batches = make_learner(make_config("softmax", "twomult", weight_decay=decay), Graph.open(path), group)
    before = {name: parameter.detach().clone() for name, parameter in learner.named_parameters()}
    learner.step(next(batches.epoch(0)), 0, 0, rate=0.01, report=False)
    return before, {name: parameter.detach().clone() for name, parameter in learner.named_parameters()}


def test_weight_decay_shrinks_the_entity_vectors_alone(graph_path: Path) -> None:
    for (before, plain), (_, decayed) in zip(
        run_processes(2, stepped_parameters, graph_path, 0.0),
        run_processes(2, stepped_parameters, graph_path, 2.0),
        strict=True,
    ):
        rows = "table.rows"
        assert before.keys() - {rows} == {name for name in plain if torch.equal(plain[name], decayed[name])}
        torch.testing.assert_close(decayed[rows], plain[rows] - 0.01 * 2.0 * before[rows])


def test_more_processes_than_entities() -> None:
    with pytest.raises(ValueError, match="5 processes cannot share 4 entities; use --nproc 4"):
        Sharding(4, 5)
