"""`sattle predict`: the best targets of a query, by name."""

from __future__ import annotations

from pathlib import Path

import click

from sattle_dist.commands.errors import one_line_errors


@click.command()
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
