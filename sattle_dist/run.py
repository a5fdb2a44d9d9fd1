"""A run directory: where it is, what it was made from, and opening what was trained.

RUN/config.toml      the resolved config
RUN/metrics.jsonl    a line per epoch
RUN/test.json        the metrics of the test split with their protocol, once training has ended (docs/evaluation.md)
RUN/test_positions.parquet    the position of every test query
RUN/checkpoints/     see checkpoint.py
RUN/teacher-1/       the run directory of a teacher that the run has trained first, where it has any of its own
RUN/lock             held while a run trains here
"""

from __future__ import annotations

import dataclasses
import fcntl
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from sattle_dist import checkpoint, teacher
from sattle_dist.collectives import Group
from sattle_dist.config import LOCK, Config, ConfigError, load_toml, to_toml
from sattle_dist.files import replacing
from sattle_dist.graph import Graph, GraphError
from sattle_dist.learner import Learner, Teachers
from sattle_dist.selection import is_exhausted
from sattle_dist.settled import Settled
from sattle_dist.storage import CheckpointError, DamagedCheckpoint, read_facts

TEST_RESULTS = ("test.json", "test_positions.parquet")
MOST_TRIES = 5
HEAD = "# The settings of this run, written by `sattle train`.\n"


def default_run_dir(graph: Graph) -> Path:
    """Name a new run after its graph and the time."""
    return Path("runs") / f"{graph.name}-{datetime.now():%Y%m%d-%H%M%S}"


def prepare_run_dir(run_dir: Path, config: Config, graph: Graph) -> object:
    """Make the run directory, or check that the run in it is this one, to be resumed; give its lock."""
    file = run_dir / "config.toml"
    try:
        checkpoints = checkpoint.list_checkpoints(run_dir)
        its_teacher = teacher.identify_teachers(config, run_dir, graph, begun=bool(checkpoints))
        if config.run.resume != "auto" and not checkpoints:
            raise ConfigError(f"--resume {config.run.resume}: {run_dir} holds no checkpoint; leave --resume away")
        if run_dir.is_file():
            raise ConfigError(f"{run_dir} is a file; choose another --out for the run")
        if (run_dir / "manifest.json").exists():
            raise ConfigError(f"{run_dir} is a graph; choose another --out for the run")
        if not checkpoints and not (run_dir / LOCK).exists():
            require_no_results(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_run_dir(run_dir)
        if file.exists() and not file.read_text(encoding="utf-8").startswith(HEAD):
            raise ConfigError(f"{file} was not written by a run and would be overwritten; choose another --out")
        if facts := newest_readable(checkpoints):
            check_resumable(run_dir, facts, config, graph)
            teacher.require_same_teacher(facts.get("teacher"), its_teacher)
            teacher.require_same_beginning(facts.get("grown_from"), teacher.beginning(config, run_dir))
        elif not checkpoints:
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        # How many processes there are is the launcher's to say, each time; so is what to continue from.
        settings = config.override({"nproc": 0, "resume": "auto"}, "run directory")
        with replacing(file) as draft:
            draft.write_text(HEAD + to_toml(settings), encoding="utf-8")
        if not (facts and has_ended(facts, config) and config.run.resume == "auto"):
            for result in TEST_RESULTS:  # of fewer epochs
                (run_dir / result).unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the run directory {run_dir} cannot be used: {error}") from None
    return lock


def require_no_results(run_dir: Path) -> None:
    """Raise ConfigError where a folder that no run has begun in holds a file that a run would replace."""
    for name in ("metrics.jsonl", *TEST_RESULTS):
        if (run_dir / name).exists():
            raise ConfigError(f"{run_dir / name} was not written by a run and would be lost; choose another --out")


def newest_readable(checkpoints: list[Path]) -> dict[str, Any] | None:
    """Give the facts of the newest checkpoint that has them; the damaged ones are dealt with when one is chosen."""
    for folder in reversed(checkpoints):
        try:
            return read_facts(folder)
        except DamagedCheckpoint:
            continue
    return None


def has_ended(facts: dict[str, Any], config: Config) -> bool:
    """Tell whether a checkpoint is the last of its run."""
    at_its_end = (facts["epoch"], facts["step"]) == (config.train.epochs, 0)
    return at_its_end or is_exhausted(facts["history"], config.eval.patience)


def check_resumable(run_dir: Path, facts: dict[str, Any], config: Config, graph: Graph) -> None:
    """Raise ConfigError where the run in the directory is not the one that is asked for."""
    if differing := differences(facts["config"], config):
        raise ConfigError(
            f"{run_dir} holds a run with other settings ({'; '.join(differing)}); use the same settings to resume it, "
            f"or another --out, where `--grow-from {run_dir}` begins with what it has learnt if the model is the same"
        )
    if facts["graph_checksum"] != graph.checksum:
        raise ConfigError(
            f"{run_dir} holds a run of another graph than {graph.path} ({graph_differences(facts, graph)}); "
            f"use another --out; if the graph has grown, `--grow-from {run_dir}` keeps what was learnt"
        )
    epoch, step = facts["epoch"], facts["step"]
    if (epoch, step) > (config.train.epochs, 0):
        trained = f"{epoch} epochs" + (f" and {step} steps" if step else "")
        raise ConfigError(
            f"{run_dir} has been trained for {trained}, more than --epochs {config.train.epochs}; "
            f"ask for at least {epoch + (step > 0)}, or use another --out"
        )


def graph_differences(facts: dict[str, Any], graph: Graph) -> str:
    """Name the counts of a graph that differ from those of the graph trained before."""
    now = {"entities": graph.num_entities, "relations": graph.num_relations}
    counts = [
        f"{name} were {facts['graph'][name]['count']}, are {count}"
        for name, count in now.items()
        if facts["graph"][name]["count"] != count
    ]
    return "; ".join([*counts, f"checksum was {facts['graph_checksum'][:20]}, is {graph.checksum[:20]}"])


def lock_run_dir(run_dir: Path) -> object:
    """Keep other runs out of the directory for as long as the returned object lives."""
    lock = (run_dir / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is training in {run_dir}; wait for it, or use another --out") from None
    except OSError as error:  # some network file systems have no locks, and nothing else is wrong with them
        print(f"{run_dir} cannot be locked ({error}); see to it that no other run writes there", file=sys.stderr)
    return lock


def differences(old: Mapping[str, Mapping[str, Any]], new: Config) -> list[str]:
    """List the settings that differ and change a run's numbers; epochs do so only where the schedule ends with them."""
    harmless = {"epochs"} if new.train.schedule != "cosine" else set()
    found = []
    for section in ("model", "train"):
        # A setting that the release which wrote the checkpoint did not have yet had the effect of its default.
        before = {**dataclasses.asdict(getattr(Config(), section)), **old[section]}
        after = dataclasses.asdict(getattr(new, section))
        found += [
            f"{name} was {before[name]!r}, is {value!r}"
            for name, value in after.items()
            if before[name] != value and name not in harmless
        ]
    return found


def open_graph(run_dir: Path, config: Config, facts: dict[str, Any]) -> Graph:
    """Open the graph that a run was trained on; raise GraphError where another one is in its place."""
    try:
        graph = Graph.open(Path(config.run.graph))
    except GraphError as error:
        raise GraphError(
            f"{run_dir} needs the graph that it was trained on: {error}; if it was moved, say so in "
            f"{run_dir / 'config.toml'} (graph = ...)"
        ) from None
    if facts["graph_checksum"] != graph.checksum:
        raise GraphError(
            f"{graph.path} has changed since {run_dir} was trained on it ({graph_differences(facts, graph)})"
        )
    return graph


def choose_checkpoint(run_dir: Path, which: str, group: Group) -> Path:
    """Find the checkpoint of a run that `open_run` calls `which`. Every rank must call it.

    Rank 0 looks: where the run still trains, or files show late, others might find another.
    """
    name = problem = ""
    if group.rank == 0:
        try:
            name = checkpoint.find(run_dir, which).name
        except CheckpointError as error:
            problem = str(error)
    name, problem = group.share((name, problem))
    if problem:
        raise CheckpointError(problem)
    return run_dir / "checkpoints" / str(name)


def read_config(run_dir: Path) -> Config:
    """Read the config.toml of a run."""
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(
            f"{run_dir} has lost its config.toml; the command that trained it, with the same --graph, settings and "
            f"--out, writes it again (the settings are in {run_dir / 'checkpoints' / 'latest' / 'state.json'})"
        )
    return load_toml(run_dir / "config.toml", Config())


def read_run(run_dir: Path, group: Group, which: str) -> tuple[Path, dict[str, Any], Config]:
    """Find a checkpoint of a run and check every byte; give it, its facts and its config. Every rank must call it.

    `which` is `best` (by validation MRR; the newest checkpoint where nothing was evaluated), `latest`, or a name.
    """
    folder = choose_checkpoint(run_dir, which, group)
    try:
        facts = checkpoint.verify(folder, group)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; {checkpoint.others(run_dir, folder)}") from None
    try:
        # What was trained is what the checkpoint says; config.toml may have been edited since.
        config = read_config(run_dir).merge(facts["config"], str(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder} was written by another release: {error}") from None
    return folder, facts, config


def open_run(run_dir: Path, group: Group, device: torch.device, which: str = "best") -> tuple[Learner, Graph, Config]:
    """Open a trained run, to evaluate or predict; `which` is as for `read_run`. Every rank must call it.

    A run that still trains removes old checkpoints, perhaps the one that is being read: then it is asked again.
    """
    for _ in range(MOST_TRIES):
        folder = choose_checkpoint(run_dir, which, group)
        try:
            return open_checkpoint(run_dir, folder.name, group, device)
        except CheckpointError:
            if group.share(folder.is_dir()):
                raise
    raise CheckpointError(
        f"{run_dir} still trains, and has removed {MOST_TRIES} checkpoints while they were read, at last "
        f"{folder.name}; wait for its end, or continue it with a larger --keep"
    )


def open_checkpoint(run_dir: Path, name: str, group: Group, device: torch.device) -> tuple[Learner, Graph, Config]:
    """Open one checkpoint of a run. Every rank must call it."""
    folder, facts, config = read_run(run_dir, group, name)
    graph = open_graph(run_dir, config, facts)
    graph.hold()
    learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
    checkpoint.load(learner, folder, with_optimizer=False, facts=facts)
    return learner, graph, config


def open_teachers(
    config: Config, run_dir: Path, graph: Graph, group: Group, device: torch.device
) -> tuple[Teachers, teacher.Identity]:
    """Open the teachers that a config names; give also what identifies them. Every rank must call it."""
    learners, found = [], []
    for place in (each.place for each in teacher.named(config, run_dir)):
        folder, facts, its_config = read_run(place, group, "best")
        teacher.require_same_graph(place, facts, graph)
        # It multiplies as the run that it teaches does.
        its_config = its_config.override({"precision": config.run.precision}, "teacher")
        learner = Learner(its_config, graph.num_entities, graph.num_relations, group, device)
        checkpoint.load(learner, folder, with_optimizer=False, facts=facts)
        learners.append(learner)
        found.append((place, folder, facts))
    shard, discount = learners[0].table.shard, config.train.settled_discount
    settled = Settled(graph.index("train"), shard, discount, device) if discount else None
    return Teachers(learners, settled), teacher.identify(found)
