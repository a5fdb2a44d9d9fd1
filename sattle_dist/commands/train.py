"""`sattle train`: one option per setting, layered over recipes and TOML files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ingest.datasets import dataset_graph
from ingest.families import ensure_family_graph
from ingest.progress import StageDisplay
from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import setting_option
from sattle_dist.config import LOCK, Config, ConfigError, load_recipe, load_toml, recipe_names, settings


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per setting of Config, `--learning-rate` for learning_rate."""
    for _, declared in reversed(settings()):
        command = setting_option(declared.name, with_default=False)(command)
    return command


def resolve_config(recipe: str | None, file: Path | None, given: dict[str, Any]) -> Config:
    """Layer the settings: defaults, recipe, TOML file, command line."""
    config = load_recipe(recipe) if recipe else Config()
    if file:
        config = load_toml(file, config)
        if file.name == "config.toml" and (file.parent / LOCK).exists():
            config = config.override({"out": str(file.parent)}, str(file))  # its run may have been moved or copied
    return config.override(given, "command line")


def require_effect(config: Config, given: dict[str, Any]) -> None:
    """Raise ConfigError where an option was given that could have no effect."""
    train, run = config.train, config.run
    if given.get("dataset") and run.graph:
        raise ConfigError(f"give either --graph or --dataset, not both (got {run.graph} and {run.dataset})")
    for name in ("graph", "out"):
        if given.get(name) == "":
            raise ConfigError(f"--{name} is empty; name a directory, or leave it away")
    idle = {
        "teacher_weight": "" if run.teacher else "a --teacher",
        "decay_factor": "" if train.schedule == "decay" else "--schedule decay",
        "decay_until": "" if train.schedule == "decay" else "--schedule decay",
        "weight_power": "" if train.loss != "kvsall" else "another --loss than kvsall, whose queries all weigh 1",
    }
    for name, needed in idle.items():
        if name in given and needed:
            option = f"--{name.replace('_', '-')} {given[name]:g}"
            raise ConfigError(f"{option} would have no effect: it goes with {needed}; leave it away")


def with_graph(config: Config) -> Config:
    """Name the graph to train: the one given, else that of the dataset, else the built-in one, made on first use."""
    if config.run.graph:  # a recipe may be tried on any graph
        return config.override({"dataset": ""}, "command line")
    if not (name := config.run.dataset):
        return config.override({"graph": str(ensure_family_graph())}, "built-in graph")
    with StageDisplay(sys.stderr) as progress:
        return config.override({"graph": str(dataset_graph(name, progress))}, "dataset")


@click.command()
@click.option("--recipe", type=click.Choice(recipe_names()), help="Settings shipped with the package.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings in a TOML file.")
@setting_options
@one_line_errors
def train(recipe: str | None, file: Path | None, **options: Any) -> None:
    """Train a graph, then evaluate it.

    Settings come from the defaults, a recipe, a TOML file and the command line, each over the one before. Without a
    graph, the dataset that a recipe names is trained, or the built-in family graph with its own recipe.

    \b
      sattle train                                      the built-in graph
      sattle train --recipe fb15k237-twomult-32-fast    a row of the paper, on its dataset
      sattle train --graph my.graph --nproc 4           four processes on this machine
      torchrun --nproc-per-node 4 launchers/train.py    the same through torchrun, also over many machines

    A run directory that already holds this run is resumed from its last checkpoint. SIGTERM, SIGUSR1, Ctrl-C
    or closing the terminal (without nohup) save and stop; a second signal stops at once.
    """
    from sattle_dist import training
    from sattle_dist.events import check_tensorboard
    from sattle_dist.precision import usable_precision
    from sattle_dist.runtime import Whereabouts, end_process

    given = {name: value for name, value in options.items() if value is not None}
    config = resolve_config(recipe, file, given)
    require_effect(config, given)
    if not config.run.graph and not config.run.dataset:
        config = resolve_config(recipe or "families", file, given)
    config = with_graph(config)
    if config.run.tensorboard == "on":
        check_tensorboard()
    if Whereabouts.from_environment() is None:  # else our launcher has tried it
        precision = usable_precision(config.run.precision, config.run.device)
        config = config.override({"precision": precision}, "command line")
    end_process(training.start(config))
