"""Checkpoints: any number of processes reads what any other wrote, a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.graph import Graph
from sattle_dist.trainer import Trainer, TrainingError
from tests.distributed.test_step import make_config, near
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R = 131, 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=200)
    return write_graph(tmp_path / "g", splits, num_entities=N, num_relations=R)


def config_for(epochs: int) -> Config:
    return make_config("softmax", "twomult", epochs=epochs, schedule="constant", eval_every=0, save_every=2)


def train(group: Group, path: Path, run_dir: Path, epochs: int) -> dict[str, Any]:
    run_dir.mkdir(exist_ok=True)
    trainer = Trainer(config_for(epochs), Graph.open(path), run_dir, group, CPU)
    first = trainer.epoch
    trainer.run()
    learner = trainer.learner
    return {
        "first": first,
        "rows": learner.table.rows.detach(),
        "bias": learner.table.bias.detach(),
        "model": {name: value.clone() for name, value in learner.model.state_dict().items()},
        "losses": [record["loss"] for record in trainer.history],
    }


def test_resumed_run_is_the_uninterrupted_one(path: Path, tmp_path: Path) -> None:
    """Bit for bit at the same number of processes; within rounding at another."""
    whole = run_processes(2, train, path, tmp_path / "whole", 4)
    run_processes(2, train, path, tmp_path / "parts", 2)
    resumed = run_processes(2, train, path, tmp_path / "parts", 4)
    for a, b in zip(whole, resumed, strict=True):
        assert b["first"] == 2
        assert torch.equal(a["rows"], b["rows"])
        assert torch.equal(a["bias"], b["bias"])
        assert all(torch.equal(value, b["model"][name]) for name, value in a["model"].items())
        assert a["losses"] == b["losses"]
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]

    run_processes(1, train, path, tmp_path / "moved", 2)
    moved = run_processes(3, train, path, tmp_path / "moved", 4)
    near(torch.cat([r["rows"] for r in moved]), torch.cat([r["rows"] for r in whole]), "rows")
    for name, value in whole[0]["model"].items():
        near(moved[2]["model"][name], value, name)


def test_checkpoints_are_safetensors_and_few(path: Path, tmp_path: Path) -> None:
    run_processes(2, train, path, tmp_path / "run", 8)
    kept = checkpoint.list_checkpoints(tmp_path / "run")
    assert [folder.name for folder in kept] == ["epoch-00006", "epoch-00008"]
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}


def test_a_missing_shard_is_noticed(path: Path, tmp_path: Path) -> None:
    """torch would leave the rows of a missing file as they were drawn."""
    run_processes(2, train, path, tmp_path / "run", 2)
    folder = checkpoint.latest(tmp_path / "run")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        whole = shard.read_bytes()
        shard.unlink()
        assert f"{shard.name} is missing" in run_processes(1, load_same, path, folder)[0]
        shard.write_bytes(whole[:-1])
        assert f"{shard.name} is missing or has another size" in run_processes(1, load_same, path, folder)[0]
        shard.write_bytes(whole)
    assert run_processes(1, load_same, path, folder) == ["loaded"]


def load_same(group: Group, path: Path, folder: Path) -> str:
    trainer = Trainer(config_for(2), Graph.open(path), folder.parent / "x", group, CPU)
    try:
        checkpoint.load(trainer.learner, folder, with_optimizer=True)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "loaded"


def test_an_empty_shard_is_saved_and_loaded(tmp_path: Path) -> None:
    """5 entities over 4 processes: the last has no rows."""
    splits = {"train": [(0, 0, 1), (1, 0, 2), (3, 0, 4), (4, 0, 0)]}
    path = write_graph(tmp_path / "g", splits, num_entities=5, num_relations=1)
    trained = run_processes(4, train, path, tmp_path / "run", 2)
    resumed = run_processes(1, train, path, tmp_path / "run", 2)[0]
    assert resumed["first"] == 2
    assert torch.equal(torch.cat([r["rows"] for r in trained]), resumed["rows"])


def load_wrong(group: Group, path: Path, folder: Path) -> str:
    trainer = Trainer(make_config("softmax", "twomult", dim=8), Graph.open(path), folder.parent / "x", group, CPU)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(trainer.learner, folder, with_optimizer=True)
    return str(caught.value)


def test_what_does_not_fit_is_refused(path: Path, tmp_path: Path) -> None:
    run_processes(1, train, path, tmp_path / "run", 2)
    folder = checkpoint.latest(tmp_path / "run")
    message = run_processes(1, load_wrong, path, folder)[0]
    assert message.startswith(f"{folder} cannot be read: Size mismatch")
    assert "\n" not in message
    with pytest.raises(checkpoint.CheckpointError, match="no run at"):
        checkpoint.latest(tmp_path / "none")
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)


def train_with_poison(group: Group, path: Path, run_dir: Path) -> str:
    """Train two epochs; then a single number of one rank's shard goes bad at epoch 3, step 2."""
    run_dir.mkdir(exist_ok=True)
    trainer = Trainer(config_for(4), Graph.open(path), run_dir, group, CPU)
    step = trainer.learner.step

    def poisoned(batch: Any, epoch: int, number: int, rate: float, *, report: bool) -> Any:
        if (epoch, number) == (2, 1) and group.rank == 1:
            trainer.learner.table.bias.data[3] = float("nan")
        return step(batch, epoch, number, rate, report=report)

    trainer.learner.step = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.run()
    return str(caught.value)


def test_a_bad_gradient_stops_every_rank_and_keeps_the_checkpoint(path: Path, tmp_path: Path) -> None:
    for message in run_processes(2, train_with_poison, path, tmp_path / "run"):
        assert "not finite at epoch 3, step 2" in message
        assert "epoch-00002" in message
        assert "--learning-rate" in message
    assert checkpoint.latest(tmp_path / "run").name == "epoch-00002"
