"""Learning from another run, in real processes: the step against the dense formula, stops, and refusals."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sattle_dist import memory
from sattle_dist import teacher as teacher_module
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.dense import dense_loss
from sattle_dist.graph import Graph
from sattle_dist.jobs import Steps
from sattle_dist.learner import Learner
from sattle_dist.run import open_teachers, prepare_run_dir
from sattle_dist.stopping import Interrupted
from sattle_dist.storage import read_facts
from sattle_dist.trainer import Trainer
from sattle_dist.training import train_run
from tests.distributed.test_checkpoint import make_trainer
from tests.distributed.test_step import make_config
from tests.graphs import random_splits, write_graph
from tests.launching import SATTLE, SMALL, running, small_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R = 131, 3
STUDENT: dict[str, Any] = {"loss": "filtered", "decoder": "twomult", "teacher_weight": 0.7, "weight_power": 0.5}
TEACHER: dict[str, Any] = {"loss": "softmax", "decoder": "tucker", "dim": 5, "seed": 8}
TAUGHT_TEACHER: dict[str, Any] = {**TEACHER, "loss": "filtered", "dim": 7}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = random_splits(2, num_entities=N, num_relations=R, num_triples=200)
    return write_graph(tmp_path_factory.mktemp("graphs") / "g", splits, num_entities=N, num_relations=R)


def config_for(epochs: int, **settings: Any) -> Config:
    return make_config(**{"epochs": epochs, "schedule": "constant", "eval_every": 0, "save_every": 2, **settings})


def train_teacher(group: Group, graph: Path, run_dir: Path, epochs: int, **more: Any) -> None:
    config = config_for(epochs, **{**TEACHER, **more})
    lock = prepare_run_dir(run_dir, config, Graph.open(graph)) if group.rank == 0 else None
    make_trainer(group, graph, run_dir, config).run()
    del lock


@pytest.fixture(scope="module")
def teacher(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another model, trained by 2 processes."""
    run_dir = tmp_path_factory.mktemp("runs") / "teacher"
    run_processes(2, train_teacher, graph, run_dir, 2)
    return run_dir


@pytest.fixture(scope="module")
def second(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another, of another dim, trained for longer."""
    run_dir = tmp_path_factory.mktemp("runs") / "second"
    run_processes(1, functools.partial(train_teacher, dim=4), graph, run_dir, 3)
    return run_dir


def student_config(*run_dirs: Path, **more: Any) -> Config:
    return config_for(2, **{**STUDENT, "teacher": ",".join(map(str, run_dirs)), **more})


def scores_of(learner: Learner, source: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
    """Score all entities for queries, on a lone process."""
    rows = learner.table.rows.detach()
    return learner.encode(rows[source], relation) @ rows.T + learner.table.bias.detach()


def first_step(group: Group, graph: Path, run_dir: Path, config: Config) -> dict[str, Any]:
    """Take the first step of a run at rate 0; give its loss, and the gradients of its shard and the relations."""
    trainer = make_trainer(group, graph, run_dir, config)
    learner = trainer.learner
    batch = next(iter(trainer.batches.epoch(0)))
    loss = learner.step(batch, 0, 0, rate=0.0, report=True)
    return {
        "loss": group.all_reduce(loss, "loss").item(),
        "bias": learner.table.bias.grad.clone(),
        "rows": learner.table.rows.grad.clone(),
        "relations": learner.model.relations.grad.clone(),
    }


def odds_of_settled(graph: Graph, relations: list[int]) -> torch.Tensor:
    """Look for settled entities fact by fact; give the log odds [queries, N] that a fact is its entity's only one."""
    index = graph.index("train")
    source, relation = index.split_keys(np.repeat(index.queries, np.diff(index.offsets)))
    facts = list(zip(source.tolist(), relation.tolist(), strict=True))  # one for each target
    found = torch.zeros(len(relations), graph.num_entities, dtype=torch.float64)
    for i, asked in enumerate(relations):
        inverse = asked - graph.num_relations if asked >= graph.num_relations else asked + graph.num_relations
        have = [s for s, r in facts if r == inverse]
        single = sum(have.count(s) == 1 for s in have)
        found[i, have] = max(0.0, math.log((single + 0.5) / (len(have) - single + 0.5)))
    assert (found > 0.1).any()
    return found


def first_step_densely(group: Group, graph: Path, run_dir: Path, config: Config) -> dict[str, Any]:
    """The same with full scores and autograd over the table; its biases begin at zero."""
    trainer = make_trainer(group, graph, run_dir, config)
    learner, batch = trainer.learner, next(iter(trainer.batches.epoch(0)))
    targets: list[list[int]] = [[] for _ in range(batch.num_queries)]
    for query, row in zip(batch.targets.query.tolist(), batch.targets.row.tolist(), strict=True):
        targets[query].append(row)
    source = batch.lookup.asked_rows[batch.lookup.place][: batch.num_queries]
    relation = batch.relation[: batch.num_queries]
    each = [config.override({"teacher": name}, "test") for name in config.run.teacher.split(",")]
    opened = [open_teachers(one, run_dir, trainer.graph, group, CPU)[0].learners[0] for one in each]
    teacher_scores = torch.stack([scores_of(run, source, relation).double() for run in opened]).mean(0)
    if config.train.settled_discount:
        teacher_scores -= config.train.settled_discount * odds_of_settled(trainer.graph, relation.tolist())
    learner.model.train()
    rows = learner.table.rows.detach().clone().requires_grad_()
    query = learner.model(rows[source], relation, batch.query_weight[: batch.num_queries], {})
    bias = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    weight = config.train.teacher_weight
    loss = dense_loss("filtered", query.double(), rows.double(), bias, targets, 0.1, 0.5, (teacher_scores, weight))
    grads = torch.autograd.grad(loss, [bias, rows, learner.model.relations])
    return {"loss": loss.item(), **dict(zip(("bias", "rows", "relations"), grads, strict=True))}


@pytest.mark.parametrize(
    ("world_size", "num_teachers", "discount"), [(1, 1, 0), (2, 1, 0), (3, 1, 2.0), (1, 2, 5.0), (3, 2, 0)]
)
def test_a_step_heeds_its_teachers(
    world_size: int, num_teachers: int, discount: float, graph: Path, teacher: Path, second: Path, tmp_path: Path
) -> None:
    """Loss and gradients against the dense formula, dropout off, with teachers of another decoder and dim.

    And with a discount on settled entities, which changes the gradients.
    """
    still = dict.fromkeys(("dropout_input", "dropout_attention", "dropout_output", "dropout_hidden"), 0.0)
    runs = [teacher, second][:num_teachers]
    config = student_config(*runs, label_smoothing=0.1, settled_discount=discount, **still)
    (want,) = run_processes(1, first_step_densely, graph, tmp_path / "dense", config)
    ranks = run_processes(world_size, first_step, graph, tmp_path / "run", config)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(want["loss"], rel=1e-5)
        torch.testing.assert_close(rank["relations"], want["relations"], rtol=1e-3, atol=1e-6)
    bias = torch.cat([rank["bias"] for rank in ranks]).double()
    torch.testing.assert_close(bias, want["bias"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.cat([rank["rows"] for rank in ranks]), want["rows"], rtol=1e-3, atol=1e-6)
    (alone,) = run_processes(1, first_step, graph, tmp_path / "alone", config.override({"teacher": ""}, "test"))
    assert abs(alone["loss"] - want["loss"]) > 0.5
    if discount:
        plain = config.override({"settled_discount": 0.0}, "test")
        (uncorrected,) = run_processes(1, first_step, graph, tmp_path / "plain", plain)
        assert not torch.allclose(uncorrected["bias"], want["bias"].float(), rtol=0.1)


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


def test_another_teacher_is_refused(graph: Path, teacher: Path, second: Path, tmp_path: Path) -> None:
    run_processes(1, train_and_stop, graph, tmp_path / "taught", student_config(teacher), 0)
    for copy in ("copy", "another"):  # a refusal may hold the lock for a while
        shutil.copytree(tmp_path / "taught", tmp_path / copy, symlinks=True)
    run_processes(1, train_and_stop, graph, tmp_path / "alone", student_config(teacher, teacher=""), 0)
    splits = random_splits(7, num_entities=N, num_relations=R, num_triples=200)
    elsewhere = write_graph(tmp_path / "elsewhere", splits, num_entities=N, num_relations=R)
    wanted = [
        (graph, "taught", {"teacher": ""}, f"this run learns from a teacher; name it: --teacher {teacher}"),
        (graph, "copy", {"teacher": str(second)}, "is not what this run began with, epoch-00002 of"),
        (graph, "another", {"teacher": f"{teacher},{second}"}, "(epoch-00002, epoch-00003) is not what this run began"),
        (graph, "newest", {"teacher": f"{teacher},"}, "has a comma without a run or recipe on both sides of it"),
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


def train_all(group: Group, graph: Path, run_dir: Path, config: Config, stop_at: int) -> str:
    """Train a run and the teachers it names by the recipes below, which are no files; give what ended it."""
    recipes = {"tiny": config_for(2, **TEACHER), "taught": config_for(2, **TAUGHT_TEACHER, teacher="tiny")}
    taken, steps = [0], Steps("")

    def count(epoch: int, step: int) -> None:
        taken[0] += 1
        if taken[0] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.ExitStack() as patches:
        for module in (teacher_module, memory):
            patches.enter_context(mock.patch.object(module, "recipe_names", return_value=list(recipes)))
            patches.enter_context(mock.patch.object(module, "load_recipe", side_effect=recipes.__getitem__))
        patches.enter_context(mock.patch.object(steps, "note", count))
        try:
            _, lock = train_run(config.override({"out": str(run_dir)}, "test"), Graph.open(graph), group, CPU, steps)
        except Interrupted as stop:
            return str(stop)
        del lock
        return ""


def test_a_recipe_as_teacher_is_trained_first(graph: Path, tmp_path: Path) -> None:
    """One run stopped while its second teacher learns, and begun again, against three runs: the same weights of all."""
    one, config = tmp_path / "one", student_config(Path("tiny"), Path("tiny"))
    num_steps = math.ceil(len(Graph.open(graph).index("train")) / config.train.batch_size)
    for rank in run_processes(2, train_all, graph, one, config, 2 * num_steps + 2):
        assert f"saved as {one / 'teacher-2' / 'checkpoints'}" in rank
    assert not (one / "checkpoints").exists()
    for name in ("teacher-1", "teacher-2"):  # results of a run stay as long as it is not trained on
        (one / name / "test.json").touch()
    assert run_processes(2, train_all, graph, one, config, 0) == ["", ""]
    assert (one / "teacher-1" / "test.json").exists()
    assert not (one / "teacher-2" / "test.json").exists()

    apart = [tmp_path / "teacher-1", tmp_path / "teacher-2"]
    for i, run in enumerate(apart):
        run_processes(2, train_all, graph, run, config_for(2, **{**TEACHER, "seed": config.train.seed + i}), 0)
        assert weights_of(one / run.name) == weights_of(run)
    run_processes(2, train_all, graph, tmp_path / "taught", student_config(*apart), 0)
    assert weights_of(one) == weights_of(tmp_path / "taught")


def test_a_teacher_can_have_its_own_teacher(graph: Path, tmp_path: Path) -> None:
    """One run stopped while its teacher learns, and begun again, against three runs: the same weights of all.

    It learns from that teacher's teacher, too, which is not trained again.
    """
    one, config = tmp_path / "one", student_config(Path("taught"), Path("tiny"))
    num_steps = math.ceil(len(Graph.open(graph).index("train")) / config.train.batch_size)
    for rank in run_processes(2, train_all, graph, one, config, 2 * num_steps + 2):
        assert f"saved as {one / 'teacher-1' / 'checkpoints'}" in rank
    assert run_processes(2, train_all, graph, one, config, 0) == ["", ""]

    seed, first, second = config.train.seed, tmp_path / "first", tmp_path / "second"
    run_processes(2, train_all, graph, first, config_for(2, **{**TEACHER, "seed": seed}), 0)
    taught = config_for(2, **{**TAUGHT_TEACHER, "seed": seed, "teacher": str(first)})
    run_processes(2, train_all, graph, second, taught, 0)
    run_processes(2, train_all, graph, tmp_path / "third", student_config(second, first), 0)
    assert weights_of(one / "teacher-1" / "teacher-1") == weights_of(first)
    assert weights_of(one / "teacher-1") == weights_of(second)
    assert not (one / "teacher-2").exists()
    assert weights_of(one) == weights_of(tmp_path / "third")


def test_a_run_can_begin_with_a_teacher_of_its_own(graph: Path, tmp_path: Path) -> None:
    """One run against two: the same weights, which are others than those of a run that begins anew."""
    model = {"decoder": TEACHER["decoder"], "dim": TEACHER["dim"]}
    one, apart = tmp_path / "one", tmp_path / "teacher-1"
    config = student_config(Path("tiny"), grow_from="tiny", **model)
    assert run_processes(2, train_all, graph, one, config, 0) == ["", ""]
    run_processes(2, train_all, graph, apart, config_for(2, **{**TEACHER, "seed": config.train.seed}), 0)
    run_processes(2, train_all, graph, tmp_path / "two", student_config(apart, grow_from=str(apart), **model), 0)
    run_processes(2, train_all, graph, tmp_path / "anew", student_config(apart, **model), 0)
    assert weights_of(one) == weights_of(tmp_path / "two") != weights_of(tmp_path / "anew")

    (said,) = run_processes(1, refused, graph, tmp_path / "other", student_config(Path("tiny"), grow_from="tiny"))
    assert "teacher-1: that run has another model (decoder was 'tucker', is 'twomult'; dim was 5, is 9)" in said
    assert not (tmp_path / "other" / "teacher-1").exists()
    with pytest.raises(ConfigError, match="--grow-from families: that is a recipe; to train it first"):
        teacher_module.with_absolute_paths(student_config(apart, grow_from="families"))


def disagree(group: Group, graph: Path, run_dir: Path) -> list[str]:
    """Name the same recipe once or twice, by rank; then begin with it, or with a run."""
    said = []
    for names, begin in (([Path("families")] * (1 + group.rank), ""), ([Path("families")], ["families", "/run"])):
        config = student_config(*names, grow_from=begin and begin[group.rank], out=str(run_dir))
        with pytest.raises(ConfigError) as caught:
            train_run(config, Graph.open(graph), group, CPU, Steps(""))
        said.append(str(caught.value))
    return said


def test_ranks_that_name_other_runs_are_refused(graph: Path, tmp_path: Path) -> None:
    for teachers, beginnings in run_processes(2, disagree, graph, tmp_path / "run"):
        assert "teacher differs between processes: 'families' on rank 0, 'families, families' on rank 1" in teachers
        assert "grow_from differs between processes: 'families' on rank 0, 'a run' on rank 1" in beginnings


def test_what_a_run_needs_is_asked_before_its_teachers_learn(graph: Path, tmp_path: Path) -> None:
    config = student_config(Path("tiny")).override({"grow_from": str(tmp_path / "nowhere")}, "test")
    (said,) = run_processes(1, refused, graph, tmp_path / "grown", config)
    assert f"no run at {tmp_path / 'nowhere'}" in said
    assert not (tmp_path / "grown" / "teacher-1").exists()


def test_a_teacher_whose_recipe_has_changed_can_be_named_as_a_run(graph: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_processes(1, train_teacher, graph, run / "teacher-1", 2)  # with another seed than the run's
    (said,) = run_processes(1, refused, graph, run, student_config(Path("tiny")))
    assert said.startswith(f"in teacher-1: {run / 'teacher-1'} holds a run with other settings (seed was 8, is 3)")
    assert f"`--teacher {run / 'teacher-1'}` takes what it has learnt" in said
    assert run_processes(1, train_all, graph, tmp_path / "taught", student_config(run / "teacher-1"), 0) == [""]
    gone = tmp_path / "a_recipe_of_an_older_release"
    assert run_processes(1, train_all, graph, run, student_config(gone), 0) == [""]  # what it has trained is there


def refused(group: Group, graph: Path, run_dir: Path, config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        train_all(group, graph, run_dir, config, 0)
    said = str(caught.value)
    del caught
    gc.collect()  # the frames of the traceback hold the lock of the run directory
    return said


def test_a_run_whose_name_has_a_comma_can_teach(graph: Path, teacher: Path, tmp_path: Path) -> None:
    shutil.copytree(teacher, tmp_path / "a,b", symlinks=True)
    (got,) = run_processes(1, train_all, graph, tmp_path / "run", student_config(tmp_path / "a,b"), 0)
    assert got == ""


def test_the_command_trains_a_recipe_as_teacher(tmp_path: Path) -> None:
    graph = small_graph(tmp_path)
    run = tmp_path / "run"
    arguments = [*SATTLE, *SMALL, "--graph", str(graph), "--loss", "filtered", "--epochs", "2"]
    arguments += ["--teacher", "families", "--out", str(run)]
    with running(arguments, tmp_path) as command:
        code, errors = command.end()
    assert code == 0, errors
    assert "learning from epoch-" in command.out.read_text()
    assert 'teacher = "families"' in (run / "config.toml").read_text()
    assert (run / "test.json").exists()
    assert not (run / "teacher-1" / "test.json").exists()  # it is not judged

    shutil.rmtree(run / "teacher-1")  # without it the run cannot go on, and says so
    with running(arguments, tmp_path) as command:
        code, errors = command.end()
    assert code == 2
    assert f"the teacher that this run has trained first, {run / 'teacher-1'}, is gone" in errors
    assert "Traceback" not in errors
