"""`sattle train` from the resolved config on: start workers where they are wanted, or be one."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import click
import torch
import torch.distributed as dist

from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, UserError
from sattle_dist.graph import Graph
from sattle_dist.launch import EXIT_FAILED, run_workers
from sattle_dist.run import default_run_dir, lock_run_dir, prepare_run_dir
from sattle_dist.runtime import (
    EXIT_LOST_PEER,
    Place,
    Whereabouts,
    choose_device,
    end_with_parent,
    ending_on_signals,
    joined,
    require_same_everywhere,
    under_launcher,
)
from sattle_dist.sharding import Sharding
from sattle_dist.trainer import Trainer, TrainingError


def start(config: Config) -> int:
    """Train with this config in the processes it asks for; return the exit code."""
    with ending_on_signals():
        place = Place.from_environment()
        graph = Graph.open(Path(config.run.graph).absolute())
        nproc = number_of_processes(config.run.nproc, config.run.device, place)
        Sharding(graph.num_entities, max(nproc, place.world_size))  # refuses more processes than entities
        choose_device(config.run.device, replace(place, local_world_size=nproc))  # refuses more than there are GPUs
        if graph.num_triples["train"] == 0:
            raise ConfigError(f"{graph.path} has no training triples")
        config = config.override({"graph": str(graph.path), "nproc": nproc}, "command line")
        if place.world_size > 1 or nproc == 1:
            return work(config, graph)
        run_dir = Path(config.run.out or default_run_dir(graph)).absolute()
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
    """Be one process of the run, alone or among others; return the exit code."""
    if under_launcher():
        end_with_parent()
    steps = Steps()
    try:
        with joined(config.run) as (group, device):
            require_same_everywhere(config, graph.checksum, group)
            config, lock = agree_on_run_dir(config, graph, group)
            trainer = Trainer(config, graph, Path(config.run.out), group, device)
            trainer.on_step = steps.note
            if group.rank == 0:
                describe(trainer)
            test = trainer.run()
            if group.rank == 0:
                summarise(test, config)
            group.barrier()  # nobody leaves while another still needs it
            del lock
    except Exception as error:
        if is_for_the_user(error):
            raise
        if reason := lack_of_resources(error):
            raise TrainingError(f"stopped {steps.text}: {reason}") from None
        if Place.from_environment().world_size == 1:
            raise
        return explain(error, steps, config.run.timeout)
    return 0


class Steps:
    """Where in the training this process is: for its own messages, and noted for the launcher's."""

    def __init__(self) -> None:
        self.text = "before the first step"
        whereabouts = Whereabouts.from_environment()
        self._tell = whereabouts.writer(Place.from_environment().local_rank) if whereabouts else None

    def note(self, epoch: int, step: int) -> None:
        """Note that this step begins, both counted from 0."""
        self.text = f"in epoch {epoch + 1}, step {step + 1}"
        if self._tell:
            self._tell(epoch, step)


def is_for_the_user(error: Exception) -> bool:
    """Tell whether an error is one of ours, said in one line, which the command shows as such."""
    return isinstance(error, (TrainingError, UserError))


def lack_of_resources(error: Exception) -> str:
    """Give the reason in words where the machine has run out of something: memory, disk, a reader of the output."""
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    if out_of_memory:
        return "out of memory; lower --batch-size or --score-memory, or share the table among more processes"
    return str(error) if isinstance(error, OSError) else ""


def explain(error: Exception, steps: Steps, timeout: float) -> int:
    """Say what stopped this one of several processes; return its exit code.

    A peer that died or hung shows up as a failed exchange; anything else is a defect, and shows its traceback. It ends
    here in any case, because a worker must not take its process group apart (see end_process).
    """
    rank, text = Place.from_environment().rank, str(error)
    lost = any(word in text for word in ("Connection refused", "Connection reset", "Connection closed", "Broken pipe"))
    if not lost and any(word in text for word in ("Timed out", "timed out", "timeout")):
        waited = f"it waited {timeout:g} minutes (--timeout) for a process that died or hung"
        print(f"error: rank {rank} gave up {steps.text}: {waited}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    if lost or isinstance(error, dist.DistError) or "gloo" in text:
        if Whereabouts.from_environment() is None:  # else our own launcher sees the death itself, and says whose it was
            reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", text.splitlines()[0])  # gloo's file and advice
            print(f"error: rank {rank} lost another process {steps.text}: {reason}", file=sys.stderr, flush=True)
        return EXIT_LOST_PEER
    print(f"error: rank {rank} failed {steps.text}:", file=sys.stderr)
    traceback.print_exc()
    return EXIT_FAILED


def agree_on_run_dir(config: Config, graph: Graph, group: Group) -> tuple[Config, object]:
    """Let rank 0 choose, prepare and lock the run directory; all learn it, or all fail with its error."""
    run_dir, problem, lock = "", "", None
    if group.rank == 0:
        run_dir = str(Path(config.run.out or default_run_dir(graph)).absolute())
        try:
            prepare_run_dir(Path(run_dir), config.override({"out": run_dir}, "command line"), graph)
            lock = lock_run_dir(Path(run_dir))
        except UserError as error:
            problem = str(error)
    run_dir, problem = group.share((run_dir, problem))
    if problem:
        raise ConfigError(problem)
    return config.override({"out": run_dir}, "command line"), lock


def describe(trainer: Trainer) -> None:
    """Say what is about to be trained."""
    graph, config, group = trainer.graph, trainer.config, trainer.group
    click.echo(
        f"{graph.name}: {graph.num_entities:,} entities, {graph.num_relations:,} relations, "
        f"{graph.num_triples['train']:,} training triples in {len(trainer.batches.index):,} queries"
    )
    click.echo(
        f"{config.model.decoder}, d={config.model.dim}, {config.model.num_heads} heads, {config.train.loss} loss; "
        f"{group.world_size} process{'es' if group.world_size > 1 else ''} on {trainer.learner.device.type}; "
        f"run directory {config.run.out}"
    )
    if trainer.epoch:
        click.echo(f"resuming after epoch {trainer.epoch} of {config.train.epochs}")


def summarise(test: dict[str, float], config: Config) -> None:
    """Print the table of test metrics."""
    click.echo(f"\ntest, filtered, both directions, ties {config.eval.ties}")
    for name, value in test.items():
        click.echo(f"  {name.upper() if name == 'mrr' else name.capitalize():8s} {value:.4f}")
    click.echo(f"\nrun directory: {config.run.out}")
