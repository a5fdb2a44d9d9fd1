"""A run begun from another whose graph has grown: old rows are kept, new ones are as drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.graph import Graph
from sattle_dist.run import check_resumable, has_ended, prepare_run_dir
from sattle_dist.storage import read_facts
from sattle_dist.trainer import Trainer
from tests.distributed.test_checkpoint import config_for, make_trainer
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R, MORE_N, MORE_R = 131, 3, 150, 5
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A graph, and one with more entities and relations behind the same ones."""
    folder = tmp_path_factory.mktemp("graphs")
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=200)
    old = write_graph(folder / "old", splits, num_entities=N, num_relations=R)
    new = {**splits, "train": [*splits["train"], (140, 4, 3), (2, 3, 149)]}
    return old, write_graph(folder / "new", new, num_entities=MORE_N, num_relations=MORE_R)


def tensors_of(trainer: Trainer) -> dict[str, Any]:
    return {k: v.clone() for k, v in checkpoint.local_tensors(trainer.learner, with_optimizer=True).items()}


def train_old(group: Group, path: Path, run_dir: Path) -> dict[str, Any]:
    trainer = make_trainer(group, path, run_dir, config_for(2))
    trainer.run()
    return tensors_of(trainer)


def grow(group: Group, path: Path, run_dir: Path, old_run: Path) -> dict[str, Any]:
    fresh = tensors_of(make_trainer(group, path, run_dir.with_name("fresh"), config_for(2)))
    config = config_for(2, grow_from=str(old_run))
    trainer = make_trainer(group, path, run_dir, config)
    began = tensors_of(trainer)
    trainer.run()
    again = make_trainer(group, path, run_dir, config)  # continues its own run, and knows where it came from
    return {
        "fresh": fresh,
        "began": began,
        "again": (again.epoch, again.lineage["grown_from"]["checkpoint"]),
    }


def test_old_rows_are_kept_and_new_ones_drawn(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    """From 2 processes to 3, with rows that change their process."""
    old = run_processes(2, train_old, graphs[0], tmp_path / "old")
    ranks = run_processes(3, grow, graphs[1], tmp_path / "grown", tmp_path / "old")
    for name in ("table.rows", "table.bias", *(f"optimizer.table.rows.{m}" for m in MOMENTS)):
        before = torch.cat([rank[name] for rank in old])
        began, fresh = (torch.cat([rank[kind][name] for rank in ranks]) for kind in ("began", "fresh"))
        assert torch.equal(began[:N], before)
        assert torch.equal(began[N:], fresh[N:])
        assert len(began) == MORE_N
        assert not torch.equal(before, fresh[:N])
        assert name.startswith("table") or not began[N:].any()
    for name in ("model.relations", *(f"optimizer.model.relations.{m}" for m in MOMENTS)):
        before, (began, fresh) = old[0][name], (ranks[0][kind][name] for kind in ("began", "fresh"))
        assert torch.equal(began[:R], before[:R])
        assert torch.equal(began[MORE_R : MORE_R + R], before[R:])
        assert torch.equal(began[R:MORE_R], fresh[R:MORE_R])
        assert torch.equal(began[MORE_R + R :], fresh[MORE_R + R :])
    others = [name for name in old[0] if "relations" not in name and "table" not in name]
    assert len(others) > 20
    assert all(torch.equal(ranks[2]["began"][name], old[0][name]) for name in others)
    assert ranks[0]["again"] == (2, "epoch-00002")


def refused(group: Group, graph: Path, run_dir: Path, config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(group, graph, run_dir, config)
    return str(caught.value)


def refuse_all(group: Group, graphs: tuple[Path, Path], renamed: Path, work: Path) -> list[str]:
    train_old(group, graphs[1], work / "old")
    wanted = [(renamed, {}), (graphs[0], {}), (graphs[1], {"dim": 8})]
    return [
        refused(group, graph, work / "new", config_for(2, grow_from=str(work / "old"), **more))
        for graph, more in wanted
    ]


def test_what_does_not_extend_is_refused(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=200)
    write_graph(renamed, splits, num_entities=MORE_N, num_relations=MORE_R)
    labels = [f"e{i}" for i in range(MORE_N)]
    labels[3], labels[4] = labels[4], labels[3]
    pq.write_table(pa.table({"label": labels}), renamed / "entities.parquet")
    said = run_processes(1, refuse_all, graphs, renamed, tmp_path)[0]
    assert "renamed does not begin with the 150 entities of its graph; grow a graph with `sattle-ingest" in said[0]
    assert "old does not begin with the 150 entities" in said[1]
    assert "that run has another model (dim was 9, is 8)" in said[2]
    assert not any("\n" in line for line in said)


def refuse_resume(group: Group, graphs: tuple[Path, Path], run_dir: Path) -> list[str]:
    train_old(group, graphs[0], run_dir)
    said = []
    for graph, more in [
        (graphs[1], {}),
        (graphs[0], {"batch_size": 8, "seed": 9}),
        (graphs[0], {"epochs": 1}),
        (graphs[0], {"epochs": 3, "schedule": "cosine"}),
        (graphs[0], {"epochs": 9, "keep": 5, "eval_every": 1, "save_minutes": 2.0, "threads": 1, "patience": 3}),
    ]:
        try:
            prepare_run_dir(run_dir, config_for(2).override(more, "test"), Graph.open(graph))
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def resume_grown(group: Group, graph: Path, work: Path) -> list[str]:
    """Prepare to go on with a run that has begun anew, and one that was grown, each with and without --grow-from."""
    old, new = work / "old", work / "new"
    train_old(group, graph, old)
    make_trainer(group, graph, new, config_for(2, grow_from=str(old))).run()
    said = []
    for run_dir, begin in ((old, ""), (old, str(new)), (new, str(old)), (new, ""), (new, str(work / "none"))):
        try:
            prepare_run_dir(run_dir, config_for(2, grow_from=begin), Graph.open(graph))
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_run_is_continued_with_the_beginning_it_had(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    """Else its config.toml would tell of another run."""
    (said,) = run_processes(1, resume_grown, graphs[0], tmp_path)
    assert said[0] == said[2] == ""
    assert f"began without --grow-from; leave {tmp_path / 'new'} away" in said[1]
    assert f"began with what another has learnt; name it: --grow-from {tmp_path / 'old'}" in said[3]
    assert f"began with what {tmp_path / 'old'} has learnt, not {tmp_path / 'none'}" in said[4]


def refuse_fewer_epochs(group: Group, graph: Path, run_dir: Path) -> None:
    train_old(group, graph, run_dir)
    facts = {**read_facts(checkpoint.find(run_dir, "latest")), "step": 4}  # as if stopped in its third epoch
    assert has_ended({**facts, "step": 0}, config_for(2))
    assert not has_ended(facts, config_for(2))
    check_resumable(run_dir, facts, config_for(3), Graph.open(graph))
    with pytest.raises(ConfigError, match=r"for 2 epochs and 4 steps, more than --epochs 2; ask for at least 3, or"):
        check_resumable(run_dir, facts, config_for(2), Graph.open(graph))


def test_steps_beyond_the_epochs_asked_for_are_refused(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    run_processes(1, refuse_fewer_epochs, graphs[0], tmp_path / "run")


def test_another_graph_or_config_is_refused_by_its_differing_fields(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    (said,) = run_processes(1, refuse_resume, graphs, tmp_path / "run")
    checksums = [json.loads((graph / "manifest.json").read_text())["checksum"][:20] for graph in graphs]
    assert "(entities were 131, are 150; relations were 3, are 5; " in said[0]
    assert f"checksum was {checksums[0]}, is {checksums[1]}" in said[0]
    assert f"`--grow-from {tmp_path / 'run'}` keeps what was learnt" in said[0]
    assert "(batch_size was 16, is 8; seed was 3, is 9)" in said[1]
    assert "has been trained for 2 epochs, more than --epochs 1" in said[2]
    assert "(epochs was 2, is 3; schedule was 'constant', is 'cosine')" in said[3]
    assert said[4] == ""  # changes no number that was computed
