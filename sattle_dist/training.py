"""`sattle train` from the resolved config on: start workers where they are wanted, or be one."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.graph import Graph
from sattle_dist.launch import run_workers
from sattle_dist.run import default_run_dir, prepare_run_dir
from sattle_dist.runtime import Place, end_with_parent, joined, require_same_everywhere
from sattle_dist.sharding import Sharding
from sattle_dist.trainer import Trainer


def start(config: Config) -> int:
    """Train with this config in the processes it asks for; return the exit code."""
    place = Place.from_environment()
    graph = Graph.open(Path(config.run.graph).absolute())
    nproc = number_of_processes(config.run.nproc, config.run.device, place)
    Sharding(graph.num_entities, max(nproc, place.world_size))  # refuses more processes than entities
    if graph.num_triples["train"] == 0:
        raise ConfigError(f"{graph.path} has no training triples")
    config = config.override({"graph": str(graph.path), "nproc": nproc}, "command line")
    if place.world_size > 1 or nproc == 1:
        return work(config, graph)
    run_dir = Path(config.run.out or default_run_dir(graph))
    config = config.override({"out": str(run_dir)}, "command line")
    prepare_run_dir(run_dir, config, graph)
    # The workers read the very config that was checked and written here.
    return run_workers(["train", "--config", str(run_dir / "config.toml")], nproc)


def number_of_processes(wanted: int, device: str, place: Place) -> int:
    """Count the processes of this machine: torchrun's where it started several, else as wanted, else one per GPU."""
    if place.world_size > 1:
        if wanted not in (0, place.local_world_size):
            raise ConfigError(
                f"--nproc {wanted} contradicts torchrun, which started {place.local_world_size} processes on this "
                f"machine; leave --nproc away, or start with `torchrun --nproc-per-node {wanted}`"
            )
        return place.local_world_size
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    return wanted or max(1, num_gpus)


def work(config: Config, graph: Graph) -> int:
    """Be one process of the run, alone or among others."""
    if Place.from_environment().world_size > 1:
        end_with_parent()
    with joined(config.run) as (group, device):
        require_same_everywhere(config, graph.checksum, group)
        config = agree_on_run_dir(config, graph, group)
        trainer = Trainer(config, graph, Path(config.run.out), group, device)
        if group.rank == 0:
            describe(trainer)
        try:
            test = trainer.run()
        except RuntimeError as error:
            if group.world_size == 1 or isinstance(error, ValueError):
                raise
            # A peer that died or hung shows up here as a failed exchange.
            reason = str(error).splitlines()[0]
            where = f"epoch {trainer.epoch + 1}, step {trainer.step + 1}"
            print(f"error: rank {group.rank} stopped at {where}: {reason}", file=sys.stderr, flush=True)
            return 1
        if group.rank == 0:
            summarise(test, config)
        group.barrier()  # nobody leaves while another still needs it
    return 0


def agree_on_run_dir(config: Config, graph: Graph, group: Group) -> Config:
    """Let rank 0 choose and prepare the run directory; all learn it, or all fail with its error."""
    run_dir, problem = "", ""
    if group.rank == 0:
        run_dir = config.run.out or str(default_run_dir(graph))
        try:
            prepare_run_dir(Path(run_dir), config.override({"out": run_dir}, "command line"), graph)
        except ValueError as error:
            problem = str(error)
    run_dir, problem = group.share((run_dir, problem))
    if problem:
        raise ConfigError(problem)
    return config.override({"out": run_dir}, "command line")


def describe(trainer: Trainer) -> None:
    """Say what is about to be trained."""
    graph, config, group = trainer.graph, trainer.config, trainer.group
    click.echo(
        f"{graph.name}: {graph.num_entities:,} entities, {graph.num_relations:,} relations, "
        f"{graph.num_triples['train']:,} training triples in {len(trainer.batches.index):,} queries"
    )
    click.echo(
        f"{config.model.decoder}, d={config.model.dim}, {config.model.num_heads} heads, {config.train.loss} loss; "
        f"{group.world_size} process(es) on {trainer.learner.device.type}; run directory {config.run.out}"
    )
    if trainer.epoch:
        click.echo(f"resuming after epoch {trainer.epoch} of {config.train.epochs}")


def summarise(test: dict[str, float], config: Config) -> None:
    """Print the table of test metrics."""
    click.echo(f"\ntest, filtered, both directions, ties {config.eval.ties}")
    for name, value in test.items():
        click.echo(f"  {name.upper() if name == 'mrr' else name.capitalize():8s} {value:.4f}")
    click.echo(f"\nrun directory: {config.run.out}")
