"""A run directory: where it is, what it was made from, and opening what was trained.

RUN/config.toml      the resolved config
RUN/metrics.jsonl    a line per epoch
RUN/test.json        the metrics of the test split, once training has ended
RUN/checkpoints/     see checkpoint.py
"""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path

import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, load_toml, to_toml
from sattle_dist.graph import Graph, GraphError
from sattle_dist.learner import Learner


def default_run_dir(graph: Graph) -> Path:
    """Name a new run after its graph and the time."""
    return Path("runs") / f"{graph.name}-{datetime.now():%Y%m%d-%H%M%S}"


def prepare_run_dir(run_dir: Path, config: Config, graph: Graph) -> None:
    """Make the run directory, or check that the run in it is this one, to be resumed."""
    file = run_dir / "config.toml"
    if checkpoints := checkpoint.list_checkpoints(run_dir):
        if differing := differences(load_toml(file, Config()), config):
            raise ConfigError(
                f"{run_dir} holds a run with other settings ({'; '.join(differing)}); "
                "use the same settings to resume it, or another --out"
            )
        if checkpoint.read_facts(checkpoints[-1])["graph_checksum"] != graph.checksum:
            raise ConfigError(f"{run_dir} holds a run of another graph than {graph.path}; use another --out")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(to_toml(config), encoding="utf-8")
        if not checkpoints:
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the run directory {run_dir} cannot be written: {error.strerror}") from None


def differences(old: Config, new: Config) -> list[str]:
    """List the settings that change a run's numbers and differ; more epochs of the same run are no difference."""
    found = []
    for section in ("model", "train"):
        before, after = dataclasses.asdict(getattr(old, section)), dataclasses.asdict(getattr(new, section))
        found += [
            f"{name} was {value!r}, is {after[name]!r}"
            for name, value in before.items()
            if value != after[name] and name != "epochs"
        ]
    return found


def open_run(run_dir: Path, group: Group, device: torch.device) -> tuple[Learner, Graph, Config]:
    """Open a trained run from its newest checkpoint, to evaluate or predict. Every rank must call it."""
    newest = checkpoint.latest(run_dir)
    config = load_toml(run_dir / "config.toml", Config())
    graph = Graph.open(Path(config.run.graph))
    if checkpoint.read_facts(newest)["graph_checksum"] != graph.checksum:
        raise GraphError(f"{graph.path} has changed since {run_dir} was trained on it")
    learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
    checkpoint.load(learner, newest, with_optimizer=False)
    return learner, graph, config
