"""`sattle train` from the resolved config on: start workers where they are wanted, or be one."""

from __future__ import annotations

import gc
import os
import shlex
import signal
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sattle_dist import grow, teacher
from sattle_dist.checkpoint import list_checkpoints
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, StoppedError, UserError
from sattle_dist.graph import Graph
from sattle_dist.jobs import Steps, number_of_processes, work_as_one
from sattle_dist.launch import Restarts, run_workers
from sattle_dist.memory import require_fits
from sattle_dist.progress import show
from sattle_dist.results import Result
from sattle_dist.run import default_run_dir, prepare_run_dir
from sattle_dist.runtime import Place, Whereabouts, choose_device, ending_on_signals, require_same_everywhere
from sattle_dist.sharding import Sharding
from sattle_dist.stopping import STOP_SIGNALS, Interrupted, StopRequest
from sattle_dist.trainer import Trainer

AT_FIRST = "before the first step"


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
        if config.eval.patience and not config.eval.eval_every:
            raise ConfigError(f"--patience {config.eval.patience} counts evaluations: --eval-every must be at least 1")
        if config.eval.patience and graph.num_triples["valid"] == 0:
            raise ConfigError(f"--patience {config.eval.patience} needs valid triples, and {graph.path} has none")
        if config.run.max_restarts and place.world_size > 1 and Whereabouts.from_environment() is None:
            raise ConfigError(
                f"--max-restarts {config.run.max_restarts} is for processes that `sattle train` starts itself; these "
                "are torchrun's: give it to torchrun, before the script"
            )
        places = {"graph": str(graph.path), **teacher.with_absolute_paths(config)}
        config = config.override({"nproc": nproc, **places}, "command line")
        if restarted():
            config = config.override({"resume": "auto"}, "restart")  # what was asked for was done the first time
        alone = nproc == 1 and (not config.run.max_restarts or Whereabouts.from_environment() is not None)
        if place.world_size > 1 or alone:
            return work(config, graph)
        run_dir = Path(config.run.out or default_run_dir(graph)).absolute()
        config = config.override({"out": str(run_dir)}, "command line")
        prepare_run_dir(run_dir, config, graph)  # whose lock is for the workers to take
        # The workers read the very config that was checked and written here.
        arguments = ["train", "--config", str(run_dir / "config.toml"), "--nproc", str(nproc)]

        def where_it_goes_on() -> str:
            saved = last_saved(config, run_dir)
            if not saved:
                return "from the beginning"
            run = saved.parents[1]
            return f"from {saved.name}" + (f" of {run.relative_to(run_dir)}" if run != run_dir else "")

        return run_workers(
            arguments,
            nproc,
            at_first=AT_FIRST,
            hint=f"`sattle {shlex.join(arguments)}` continues from the last checkpoint",
            saves=True,
            only_first=["--resume", config.run.resume],
            restarts=Restarts(config.run.max_restarts, where_it_goes_on),
        )


def last_saved(config: Config, run_dir: Path) -> Path | None:
    """Find the newest checkpoint of a run, or of the last of its own teachers that has one."""
    if saved := list_checkpoints(run_dir):
        return saved[-1]
    teachers = reversed(teacher.own_teachers(config, run_dir))
    return next(filter(None, (last_saved(each, Path(each.run.out)) for each in teachers)), None)


def work(config: Config, graph: Graph) -> int:
    """Be one process of the run, alone or among others; return the exit code."""
    steps = Steps(AT_FIRST)
    interrupted: list[Interrupted] = []

    def train(group: Group, device: torch.device) -> None:
        try:
            trainer, lock = train_run(config, graph, group, device, steps)
        except Interrupted as stop:
            interrupted.append(stop)
            if group.rank == 0:
                show(f"\n{stop}", err=True)
            return
        test = trainer.test()  # all is saved by now, so a signal may end the evaluation at once
        if group.rank == 0:
            summarise(test, trainer.config)
        del lock  # held until all is written

    more_memory = "lower --batch-size or --score-memory, or share the table among more processes"
    code = work_as_one(config.run, train, steps, more_memory)
    return interrupted[0].exit_code if interrupted else code


def train_run(
    config: Config, graph: Graph, group: Group, device: torch.device, steps: Steps, within: str = ""
) -> tuple[Trainer, object]:
    """Train a run, but first the teachers that are a part of it, if any; give it with the lock of its directory.

    Every rank must call it. `within` is the run's place in the one that was asked for, where it is a teacher.
    """
    require_same_everywhere(config, graph.checksum, group)
    require_fits(config, graph, group, device)
    config, lock = agree_on_run_dir(config, graph, group)
    run_dir = Path(config.run.out)
    if not group.share(bool(list_checkpoints(run_dir))):  # else its teachers had learnt all when it began
        train_teachers(config, graph, group, device, steps, within)
    trainer = Trainer(config, graph, run_dir, group, device)
    trainer.on_step = steps.note
    if group.rank == 0:
        describe(trainer)
    train_until_asked_to_stop(trainer)
    return trainer, lock


def train_teachers(config: Config, graph: Graph, group: Group, device: torch.device, steps: Steps, within: str) -> None:
    """Train the teachers that are a part of a run, or the rest of them, if it has any. Every rank must call it."""
    teachers = teacher.own_teachers(config, Path(config.run.out))
    if teachers and (
        begin := teacher.beginning(config, Path(config.run.out))
    ):  # refuse now what would be refused later
        if begin.own:
            grow.require_same_model(asdict(begin.own.model), config, begin.place)
        else:
            grow.choose(group, graph, config, begin.place)
    for its_config in teachers:
        require_fits(its_config, graph, group, device)
    for its_config in teachers:
        place = Path(its_config.run.out)
        if group.rank == 0:
            show(f"first {within}{place.name}:")
        try:
            train_run(its_config, graph, group, device, steps, f"{within}{place.name}/")
        except Interrupted:
            raise
        except (UserError, StoppedError) as error:
            advice = f"its settings are its recipe's; `--teacher {place}` takes what it has learnt"
            error.args = (f"in {place.name}: {error} ({advice})",)
            raise
        gc.collect()  # its optimizer state, before there is another
        if device.type == "cuda":
            torch.cuda.empty_cache()


def train_until_asked_to_stop(trainer: Trainer) -> None:
    """Train; let a signal that asks for the end wait for the next steps at which all ranks confer, save, and stop.

    Our own launcher passes such signals on as SIGTERM, and uses SIGINT to end its workers at once.
    """
    request = StopRequest()
    trainer.asked_to_stop = lambda: request.number
    ours = Whereabouts.from_environment() is not None
    with request.listening((signal.SIGTERM, signal.SIGUSR1) if ours else STOP_SIGNALS):
        trainer.train()


def restarted() -> int:
    """Count how often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def agree_on_run_dir(config: Config, graph: Graph, group: Group) -> tuple[Config, object]:
    """Let rank 0 choose, prepare and lock the run directory; all learn it, or all fail with its error."""
    run_dir, problem, lock = "", "", None
    if group.rank == 0:
        run_dir = str(Path(config.run.out or default_run_dir(graph)).absolute())
        try:
            lock = prepare_run_dir(Path(run_dir), config.override({"out": run_dir}, "command line"), graph)
        except UserError as error:
            problem = str(error)
    run_dir, problem = group.share((run_dir, problem))
    if problem:
        raise ConfigError(problem)
    return config.override({"out": run_dir}, "command line"), lock


def describe(trainer: Trainer) -> None:
    """Say what is about to be trained."""
    graph, config, group = trainer.graph, trainer.config, trainer.group
    show(
        f"{graph.name}: {graph.num_entities:,} entities, {graph.num_relations:,} relations, "
        f"{graph.num_triples['train']:,} training triples in {len(trainer.batches.index):,} queries"
    )
    show(
        f"{config.model.decoder}, d={config.model.dim}, {config.model.num_heads} heads, {config.train.loss} loss; "
        f"{group.world_size} process{'es' if group.world_size > 1 else ''} on {trainer.learner.device.type}; "
        f"run directory {config.run.out}"
    )
    if trainer.resumed_from:
        steps = f" and {trainer.step} steps" if trainer.step else ""
        show(
            f"resuming after epoch {trainer.epoch} of {config.train.epochs}{steps}, from {trainer.resumed_from}"
            + (f" (restart {restarted()})" if restarted() else "")
        )
    if taught := trainer.lineage.get("teacher"):
        show(f"learning from {taught['checkpoint']} of {taught['run']} besides")
    if grown := trainer.lineage.get("grown_from"):
        show(
            f"begun from {grown['checkpoint']} of {grown['run']}, with its {grown['num_entities']:,} entities and "
            f"{grown['num_relations']:,} relations"
        )


def summarise(test: Result, config: Config) -> None:
    """Print the table of test metrics."""
    if not test["metrics"].get("count"):
        show(f"\nthe graph has no test triples to evaluate\n\nrun directory: {config.run.out}")
        return
    show(f"\ntest, filtered, both directions, ties {config.eval.ties}")
    for name, value in test["metrics"].items():
        label = name.upper() if name in ("mrr", "amri") else name.replace("mean_position", "mean pos").capitalize()
        show(f"  {label:8s} {value:,}" if name == "count" else f"  {label:8s} {value:.4f}")
    show(f"\nrun directory: {config.run.out}")
