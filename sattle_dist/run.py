"""A run directory: where it is, what it was made from, and opening what was trained.

RUN/config.toml      the resolved config
RUN/metrics.jsonl    a line per epoch
RUN/test.json        the metrics of the test split with their protocol, once training has ended (docs/evaluation.md)
RUN/test_positions.parquet    the position of every test query
RUN/checkpoints/     see checkpoint.py
RUN/lock             held while a run trains here
"""

from __future__ import annotations

import dataclasses
import fcntl
from datetime import datetime
from pathlib import Path

import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, load_toml, to_toml
from sattle_dist.graph import Graph, GraphError
from sattle_dist.learner import Learner

HEAD = "# The settings of this run, written by `sattle train`.\n"


def default_run_dir(graph: Graph) -> Path:
    """Name a new run after its graph and the time."""
    return Path("runs") / f"{graph.name}-{datetime.now():%Y%m%d-%H%M%S}"


def prepare_run_dir(run_dir: Path, config: Config, graph: Graph) -> None:
    """Make the run directory, or check that the run in it is this one, to be resumed."""
    file = run_dir / "config.toml"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.read_text(encoding="utf-8").startswith(HEAD):
            raise ConfigError(f"{file} was not written by a run and would be overwritten; choose another --out")
        if checkpoints := checkpoint.list_checkpoints(run_dir):
            check_resumable(run_dir, checkpoints[-1], config, graph)
        # How many processes there are is the launcher's to say, each time.
        file.write_text(HEAD + to_toml(config.override({"nproc": 0}, "run directory")), encoding="utf-8")
        if not checkpoints:
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        for name in ("test.json", "test_positions.parquet"):
            (run_dir / name).unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the run directory {run_dir} cannot be used: {error}") from None


def check_resumable(run_dir: Path, newest: Path, config: Config, graph: Graph) -> None:
    """Raise ConfigError where the run in the directory is not the one that is asked for."""
    if differing := differences(load_toml(run_dir / "config.toml", Config()), config):
        raise ConfigError(
            f"{run_dir} holds a run with other settings ({'; '.join(differing)}); "
            "use the same settings to resume it, or another --out"
        )
    facts = checkpoint.read_facts(newest)
    if facts["graph_checksum"] != graph.checksum:
        raise ConfigError(f"{run_dir} holds a run of another graph than {graph.path}; use another --out")
    if facts["epoch"] > config.train.epochs:
        raise ConfigError(
            f"{run_dir} has been trained for {facts['epoch']} epochs, more than --epochs {config.train.epochs}; "
            f"ask for at least {facts['epoch']}, or use another --out"
        )


def lock_run_dir(run_dir: Path) -> object:
    """Keep other runs out of the directory for as long as the returned object lives."""
    lock = (run_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"another process is training in {run_dir}; wait for it, or use another --out") from None
    return lock


def differences(old: Config, new: Config) -> list[str]:
    """List the settings that differ and change a run's numbers; epochs do so only where the schedule ends with them."""
    harmless = {"epochs"} if new.train.schedule != "cosine" else set()
    found = []
    for section in ("model", "train"):
        before, after = dataclasses.asdict(getattr(old, section)), dataclasses.asdict(getattr(new, section))
        found += [
            f"{name} was {value!r}, is {after[name]!r}"
            for name, value in before.items()
            if value != after[name] and name not in harmless
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
