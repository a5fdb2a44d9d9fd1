"""`sattle predict`: ask a trained run by name, one query, a file of them, or a whole relation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import checkpoint_option, given_arguments, job_options
from sattle_dist.config import ConfigError

if TYPE_CHECKING:
    from sattle_dist.collectives import Group
    from sattle_dist.graph import Graph
    from sattle_dist.learner import Learner
    from sattle_dist.predict import Prediction

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--source", help="Label of the source: the target is asked for.")
@click.option("--relation", help="Label of the relation.")
@click.option("--target", help="Label of the target: the source is asked for.")
@click.option("--all", "whole", is_flag=True, help="Propose the best new triples of the relation.")
@click.option(
    "--sources",
    type=click.Choice(("seen", "all")),
    help="--all: ask the sources that the relation has in train, or all entities.  [default: seen]",
)
@click.option("--input", "queries", type=FILE, help="Answer the queries of a TSV or Parquet file into --out.")
@click.option("--out", type=FILE, help="Parquet file to write (--input, or --all).")
@click.option("--skip-unknown", is_flag=True, help="--input: leave out queries whose labels the graph lacks.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(1, 1 << 20), help="How many answers.")
@click.option("--new-only", is_flag=True, help="Leave out facts that the graph holds, in any split.")
@checkpoint_option
@job_options
@one_line_errors
def predict(run: Path, which: str, nproc: int, device: str, threads: int, timeout: float, **asked: Any) -> None:
    """Ask which entities complete a triple, and show them by name, best first.

    \b
      sattle predict RUN --source ada --relation mother_of          which targets?
      sattle predict RUN --relation mother_of --target bob          which sources?
      sattle predict RUN --relation mother_of --all --top 100       which new triples?
      sattle predict RUN --input queries.tsv --out answers.parquet  lines source, relation, target; one of them ?

    Each answer has its score and its share: exp(score) divided by the sum of exp(score) over all entities (the softmax
    share; not a calibrated probability: the true answers of a query divide 1 among them). Facts that the graph holds
    are marked with the split that holds them.
    """
    from sattle_dist.jobs import run_job
    from sattle_dist.run import open_run
    from sattle_dist.runtime import end_process

    check_request(asked)

    def work(group: Group, device: Any) -> None:
        learner, graph, _ = open_run(run, group, device, which)
        ask = ask_file if asked["queries"] else ask_relation if asked["whole"] else ask_one
        ask(learner, graph, asked)

    end_process(run_job(given_arguments(), nproc, device, work, threads=threads, timeout=timeout))


def check_request(asked: dict[str, Any]) -> None:
    """Raise ConfigError where the options do not make one of the four requests."""

    def refuse_others(mode: str, *others: str) -> None:
        for name in others:
            if asked[name]:
                option = {"queries": "--input", "whole": "--all"}.get(name, f"--{name.replace('_', '-')}")
                raise ConfigError(f"{option} has no meaning with {mode}; leave it away")

    if asked["queries"]:
        refuse_others("--input", "source", "relation", "target", "whole", "sources")
        if not asked["out"]:
            raise ConfigError("--input needs --out, the Parquet file to write")
    elif not asked["relation"]:
        raise ConfigError("give --relation with --source, --target or --all; or --input with a file of queries")
    elif asked["whole"]:
        refuse_others("--all", "source", "target", "skip_unknown")
    else:
        refuse_others("a single query", "sources", "out", "skip_unknown")
        if (asked["source"] is None) == (asked["target"] is None):
            raise ConfigError(
                "give --source or --target, and not both: the other one is what is asked for (or --all: new triples)"
            )


def ask_one(learner: Learner, graph: Graph, asked: dict[str, Any]) -> None:
    """Answer a single query on the screen."""
    from sattle_dist.labels import Labels
    from sattle_dist.predict import predict as predict_one

    names = {name: asked[name] for name in ("source", "relation", "target", "top", "new_only")}
    predictions = predict_one(learner, graph, Labels(graph), **names)
    if learner.group.rank == 0:
        click.echo(f"{asked['source'] or '?'}  {asked['relation']}  {asked['target'] or '?'}")
        show([p.label for p in predictions], predictions)


def ask_relation(learner: Learner, graph: Graph, asked: dict[str, Any]) -> None:
    """Propose new triples of a relation, on the screen or into a file."""
    from sattle_dist.bulk import check_place, write_predictions
    from sattle_dist.labels import Labels
    from sattle_dist.predict import propose
    from sattle_dist.progress import Progress

    out, first = asked["out"], learner.group.rank == 0
    if out:
        check_place(out)
    bar: list[Progress] = []

    def advance(done: int, total: int) -> None:
        if not bar:
            bar.append(Progress(total_queries=total, done_queries=0, shown=first))
        bar[0].advance(done - bar[0].done, "propose", None)

    names = {"relation": asked["relation"], "top": asked["top"], "sources": asked["sources"] or "seen"}
    predictions = propose(learner, graph, Labels(graph), **names, on_progress=advance)
    if first and bar:
        bar[0].line(f"new triples of {asked['relation']}, from {bar[0].total:,} sources ({names['sources']})")
    if first and out:
        write_predictions(predictions, out)
        click.echo(f"{len(predictions):,} triples in {out}")
    elif first:
        show([f"{p.source}  {p.relation}  {p.target}" for p in predictions], predictions)


def ask_file(learner: Learner, graph: Graph, asked: dict[str, Any]) -> None:
    """Answer a file of queries into a Parquet file."""
    from sattle_dist.bulk import predict_file

    options = {name: asked[name] for name in ("top", "new_only", "skip_unknown")}
    report = predict_file(learner, graph, asked["queries"], asked["out"], **options, progress=True)
    if learner.group.rank == 0:
        skipped = f", {report.num_skipped:,} with unknown labels left out" if report.num_skipped else ""
        click.echo(f"{report.num_queries:,} queries answered in {asked['out']}{skipped}")


def show(texts: list[str], predictions: list[Prediction]) -> None:
    """Print answers as a table: place, answer, score, share, split."""
    if not predictions:
        click.echo("nothing: the graph holds every candidate already")
        return
    texts = ["".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text) for text in texts]
    width = max(map(len, texts))
    click.echo(f"      {'':<{width}}  {'score':>9}  {'share':>6}")
    for place, (text, p) in enumerate(zip(texts, predictions, strict=True), 1):
        click.echo(f"{place:4d}  {text:<{width}}  {p.score:9.3f}  {p.share:6.4f}  {p.known_in}".rstrip())
