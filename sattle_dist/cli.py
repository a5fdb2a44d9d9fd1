"""The `sattle` command: train, predict, and the graph commands of `ingest`."""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import click

from ingest.cli import info, ingest, sql
from ingest.errors import IngestError
from ingest.families import ensure_family_graph
from sattle_dist import __version__
from sattle_dist.config import Config, UserError, field_type, load_toml, settings

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
OTHERS_WAIT = 3.0  # seconds


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what a user can cause into one line and exit code 2, and Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            from sattle_dist.trainer import TrainingError
        except KeyboardInterrupt:  # torch takes seconds to import
            click.echo("error: interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        try:
            return command(*args, **kwargs)
        except (UserError, IngestError) as error:
            fail(str(error), EXIT_USAGE)
        except TrainingError as error:
            fail(str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            fail("interrupted", EXIT_INTERRUPTED)

    return wrapped


def fail(message: str, code: int) -> NoReturn:
    """End with this exit code and the message, which is said once where all processes of a machine have it."""
    from sattle_dist.runtime import Place, end_process

    place = Place.from_environment()
    if place.local_rank > 0 and code != EXIT_INTERRUPTED:
        time.sleep(OTHERS_WAIT)  # the first process of this machine says it and ends, and the launcher ends this one
    who = f"rank {place.rank}: " if place.rank > 0 else ""
    print(f"error: {who}{message}", file=sys.stderr, flush=True)
    end_process(code)


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per setting of Config, `--learning-rate` for learning_rate."""
    for section, declared in reversed(settings()):
        bounds = declared.metadata
        kind: Any = click.Choice(bounds["choices"]) if bounds["choices"] else field_type(section, declared.name)
        text = bounds["help"]
        if "[default" not in text:
            text += f"  [default: {declared.default}]"
        option = f"--{declared.name.replace('_', '-')}"
        command = click.option(option, declared.name, type=kind, default=None, help=text)(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sattle")
def main() -> None:
    """Train link-prediction embeddings of knowledge graphs, exactly, on all the processors there are."""


for graph_command in (ingest, info, sql):
    main.add_command(graph_command)


def recipe_names() -> list[str]:
    """List the recipes shipped with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("sattle_dist").joinpath("recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def resolve_config(recipe: str | None, file: Path | None, given: dict[str, Any]) -> Config:
    """Layer the settings: defaults, recipe, TOML file, command line."""
    config = Config()
    if recipe:
        with resources.as_file(resources.files("sattle_dist") / "recipes" / f"{recipe}.toml") as path:
            config = load_toml(path, config)
    if file:
        config = load_toml(file, config)
    return config.override(given, "command line")


@main.command()
@click.option("--recipe", type=click.Choice(recipe_names()), help="Settings shipped with the package.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings in a TOML file.")
@setting_options
@one_line_errors
def train(recipe: str | None, file: Path | None, **options: Any) -> None:
    """Train a graph, then evaluate it.

    Settings come from the defaults, a recipe, a TOML file and the command line, each over the one before. Without a
    graph, the built-in family graph is trained with its own recipe.

    \b
      sattle train                                      the built-in graph
      sattle train --graph my.graph --nproc 4           four processes on this machine
      torchrun --nproc-per-node 4 launchers/train.py    the same through torchrun, also over many machines

    A run directory that already holds this run is resumed from its last checkpoint.
    """
    from sattle_dist import training
    from sattle_dist.precision import usable_precision
    from sattle_dist.runtime import end_process

    given = {name: value for name, value in options.items() if value is not None}
    config = resolve_config(recipe, file, given)
    if not config.run.graph:
        config = resolve_config(recipe or "families", file, given).override(
            {"graph": str(ensure_family_graph())}, "built-in graph"
        )
    precision = usable_precision(config.run.precision, config.run.device)
    end_process(training.start(config.override({"precision": precision}, "command line")))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--source", required=True, help="Label of the source entity.")
@click.option("--relation", required=True, help="Label of the relation.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1), help="How many targets to show.")
@one_line_errors
def predict(run: Path, source: str, relation: str, top: int) -> None:
    """Show the best targets of (source, relation) by name, with their scores.

    Facts that the graph holds are marked with the split that holds them.
    """
    from sattle_dist.config import RunConfig
    from sattle_dist.predict import predict as predict_targets
    from sattle_dist.run import open_run
    from sattle_dist.runtime import joined

    with joined(RunConfig()) as (group, device):
        learner, graph, _ = open_run(run, group, device)
        predictions = predict_targets(learner, graph, source, relation, top)
    click.echo(f"{source}  {relation}  ?")
    width = max(len(p.label) for p in predictions)
    for place, p in enumerate(predictions, 1):
        click.echo(f"{place:4d}  {p.label:<{width}}  {p.score:9.3f}  {p.known_in}".rstrip())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker in the middle of an exchange ends at once
    main()
