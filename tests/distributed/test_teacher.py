"""Learning from another run, in real processes: the step against the dense formula, stops, and refusals."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.dense import dense_loss
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.run import prepare_run_dir
from sattle_dist.storage import read_facts
from sattle_dist.trainer import Trainer
from tests.distributed.test_checkpoint import make_trainer
from tests.distributed.test_step import make_config
from tests.graphs import random_splits, write_graph
from tests.launching import SATTLE, SMALL, running, small_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R = 131, 3
STUDENT: dict[str, Any] = {"loss": "filtered", "decoder": "twomult", "teacher_weight": 0.7, "weight_power": 0.5}
TEACHER: dict[str, Any] = {"loss": "softmax", "decoder": "tucker", "dim": 5, "seed": 8}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = random_splits(2, num_entities=N, num_relations=R, num_triples=200)
    return write_graph(tmp_path_factory.mktemp("graphs") / "g", splits, num_entities=N, num_relations=R)


def config_for(epochs: int, **settings: Any) -> Config:
    return make_config(**{"epochs": epochs, "schedule": "constant", "eval_every": 0, "save_every": 2, **settings})


def train_teacher(group: Group, graph: Path, run_dir: Path, epochs: int) -> None:
    config = config_for(epochs, **TEACHER)
    lock = prepare_run_dir(run_dir, config, Graph.open(graph)) if group.rank == 0 else None
    make_trainer(group, graph, run_dir, config).run()
    del lock


@pytest.fixture(scope="module")
def teacher(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another model, trained by 2 processes."""
    run_dir = tmp_path_factory.mktemp("runs") / "teacher"
    run_processes(2, train_teacher, graph, run_dir, 2)
    return run_dir


def student_config(run_dir: Path, **more: Any) -> Config:
    return config_for(2, **{**STUDENT, "teacher": str(run_dir), **more})


def scores_of(learner: Learner, source: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
    """Score all entities for queries, on a lone process."""
    rows = learner.table.rows.detach()
    return learner.encode(rows[source], relation) @ rows.T + learner.table.bias.detach()


def first_step(group: Group, graph: Path, run_dir: Path, config: Config) -> dict[str, Any]:
    """Take the first step of a run at rate 0; give its loss and the gradients of the rows."""
    trainer = make_trainer(group, graph, run_dir, config)
    learner = trainer.learner
    batch = next(iter(trainer.batches.epoch(0)))
    loss = learner.step(batch, 0, 0, rate=0.0, report=True)
    return {
        "loss": group.all_reduce(loss, "loss").item(),
        "bias": learner.table.bias.grad.clone(),
        "relations": learner.model.relations.grad.clone(),
    }


def first_step_densely(group: Group, graph: Path, run_dir: Path, config: Config) -> dict[str, Any]:
    """The same with full scores and autograd over the table's biases, which begin at zero."""
    trainer = make_trainer(group, graph, run_dir, config)
    learner, batch = trainer.learner, next(iter(trainer.batches.epoch(0)))
    targets: list[list[int]] = [[] for _ in range(batch.num_queries)]
    for query, row in zip(batch.targets.query.tolist(), batch.targets.row.tolist(), strict=True):
        targets[query].append(row)
    source = batch.lookup.asked_rows[batch.lookup.place][: batch.num_queries]
    relation = batch.relation[: batch.num_queries]
    assert learner.teacher is not None
    teacher_scores = scores_of(learner.teacher, source, relation).double()
    learner.model.train()
    rows = learner.table.rows.detach()
    query = learner.model(rows[source], relation, batch.query_weight[: batch.num_queries], {})
    bias = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    weight = config.train.teacher_weight
    loss = dense_loss("filtered", query.double(), rows.double(), bias, targets, 0.1, 0.5, (teacher_scores, weight))
    (grad_bias, grad_relations) = torch.autograd.grad(loss, [bias, learner.model.relations])
    return {"loss": loss.item(), "bias": grad_bias, "relations": grad_relations}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_heeds_the_teacher(world_size: int, graph: Path, teacher: Path, tmp_path: Path) -> None:
    """Loss and gradients against the dense formula, dropout off, with a teacher of another decoder and dim."""
    still = dict.fromkeys(("dropout_input", "dropout_attention", "dropout_output", "dropout_hidden"), 0.0)
    config = student_config(teacher, label_smoothing=0.1, **still)
    (want,) = run_processes(1, first_step_densely, graph, tmp_path / "dense", config)
    ranks = run_processes(world_size, first_step, graph, tmp_path / "run", config)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(want["loss"], rel=1e-5)
        torch.testing.assert_close(rank["relations"], want["relations"], rtol=1e-3, atol=1e-6)
    bias = torch.cat([rank["bias"] for rank in ranks]).double()
    torch.testing.assert_close(bias, want["bias"], rtol=1e-4, atol=1e-7)
    (alone,) = run_processes(1, first_step, graph, tmp_path / "alone", config.override({"teacher": ""}, "test"))
    assert abs(alone["loss"] - want["loss"]) > 0.5


def train_and_stop(group: Group, graph: Path, run_dir: Path, config: Config, steps: int) -> dict[str, torch.Tensor]:
    """Train to the end, or until some steps are taken; give the rows."""
    trainer = make_trainer(group, graph, run_dir, config)
    taken = [0]

    def count(epoch: int, step: int) -> None:
        taken[0] += 1

    trainer.on_step = count
    if steps:
        trainer.asked_to_stop = lambda: 15 if taken[0] >= steps else 0
        with pytest.raises(RuntimeError, match="stopped by SIGTERM"):
            trainer.train()
    else:
        trainer.train()
    return {"rows": trainer.learner.table.rows.detach().clone(), "epoch": torch.tensor(trainer.epoch)}


def test_a_stopped_run_goes_on_with_its_teacher_bit_for_bit(graph: Path, teacher: Path, tmp_path: Path) -> None:
    """With the teacher's run at another place, too: what counts is its weights."""
    config = student_config(teacher)
    whole = run_processes(2, train_and_stop, graph, tmp_path / "whole", config, 0)
    stopped = run_processes(2, train_and_stop, graph, tmp_path / "stopped", config, 12)
    assert stopped[0]["epoch"] < 2
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved, symlinks=True)
    resumed = run_processes(2, train_and_stop, graph, tmp_path / "stopped", student_config(moved), 0)
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a["rows"], b["rows"])
    other = run_processes(3, train_and_stop, graph, tmp_path / "three", config, 0)
    rows, others = (torch.cat([rank["rows"] for rank in ranks]) for ranks in (whole, other))
    torch.testing.assert_close(others, rows, rtol=1e-3, atol=1e-4 * rows.abs().max().item())


def begin(group: Group, graph: Path, run_dir: Path, config: Config) -> None:
    lock = prepare_run_dir(run_dir, config, Graph.open(graph))
    Trainer(config, Graph.open(graph), run_dir, group, CPU)
    del lock


def refusal(group: Group, graph: Path, run_dir: Path, config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        begin(group, graph, run_dir, config)
    return str(caught.value)


def test_another_teacher_is_refused(graph: Path, teacher: Path, tmp_path: Path) -> None:
    run_processes(1, train_and_stop, graph, tmp_path / "taught", student_config(teacher), 0)
    shutil.copytree(tmp_path / "taught", tmp_path / "copy", symlinks=True)  # a refusal may hold the lock for a while
    run_processes(1, train_and_stop, graph, tmp_path / "alone", student_config(teacher, teacher=""), 0)
    run_processes(1, train_teacher, graph, tmp_path / "longer", 3)
    splits = random_splits(7, num_entities=N, num_relations=R, num_triples=200)
    elsewhere = write_graph(tmp_path / "elsewhere", splits, num_entities=N, num_relations=R)
    wanted = [
        (graph, "taught", {"teacher": ""}, f"this run learns from a teacher; name it: --teacher {teacher}"),
        (graph, "copy", {"teacher": str(tmp_path / "longer")}, "is not what this run began with, epoch-00002 of"),
        (graph, "alone", {}, "this run began without a teacher; leave --teacher"),
        (elsewhere, "new", {}, "was trained on another graph than"),
        (graph, "newer", {"loss": "bce"}, "--teacher goes with --loss softmax or filtered, got 'bce'"),
    ]
    for where, run, more, message in wanted:
        (said,) = run_processes(1, refusal, where, tmp_path / run, student_config(teacher, **more))
        assert message in said
        assert "\n" not in said


def weights_of(run: Path) -> dict[str, Any]:
    """Give the checksums of what a run's newest checkpoint holds."""
    files: dict[str, Any] = read_facts(sorted((run / "checkpoints").glob("epoch-*"))[-1])["files"]
    return files


def test_a_recipe_as_teacher_is_trained_first(tmp_path: Path) -> None:
    """One command, stopped while its teacher learns and started again, against two: the same weights of both runs."""
    common = ["--graph", str(small_graph(tmp_path)), "--nproc", "2", "--seed", "3", "--threads", "1", "--device", "cpu"]
    student = [*SMALL, "--loss", "filtered", "--epochs", "2"]
    one = [*SATTLE, *common, *student, "--teacher", "families", "--out", str(tmp_path / "one")]

    def train(arguments: list[str]) -> str:
        with running(arguments, tmp_path) as command:
            code, errors = command.end()
            assert code == 0, errors
            return command.out.read_text()

    with running(one, tmp_path) as command:
        command.wait_for("epoch 3/40")
        command.process.send_signal(signal.SIGTERM)
        code, errors = command.end()
    assert code == 128 + signal.SIGTERM
    assert f"saved as {tmp_path / 'one' / 'teacher' / 'checkpoints'}" in errors
    assert not list((tmp_path / "one" / "checkpoints").glob("*"))
    assert "resuming after epoch" in train(one)

    first, second = tmp_path / "first", tmp_path / "second"
    train([*SATTLE, *common, "--recipe", "families", "--out", str(first)])
    train([*SATTLE, *common, *student, "--teacher", str(first), "--out", str(second)])
    assert weights_of(tmp_path / "one" / "teacher") == weights_of(first)
    assert weights_of(tmp_path / "one") == weights_of(second)

    shutil.rmtree(tmp_path / "one" / "teacher")  # without it the run cannot go on, and says so
    with running(one, tmp_path) as command:
        code, errors = command.end()
    assert code == 2
    assert f"{tmp_path / 'one' / 'teacher'}" in errors
    assert "Traceback" not in errors
