"""`sattle export`: the vectors, relations and weights of a run, for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import checkpoint_option

FORMATS = ("parquet", "safetensors", "npy", "tsv")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "format", type=click.Choice(FORMATS), default="parquet", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.  [default: RUN/export-FORMAT]")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@checkpoint_option
@one_line_errors
def export(run: Path, format: str, out: Path | None, force: bool, which: str) -> None:
    """Write the trained vectors with their labels, and the weights, for other tools.

    \b
      parquet      entities.parquet (entity_id, label, vector, bias), relations.parquet
      safetensors  entities.safetensors (vector, bias), labels in entities.tsv and relations.tsv
      npy          vectors.npy, bias.npy, relations.npy, labels in entities.tsv and relations.tsv
      tsv          entities.tsv (entity_id, label, bias, numbers), relations.tsv

    Each has model.safetensors besides: relations, encoder and decoder, with the config in its metadata. The table is
    streamed from the checkpoint: a machine with little memory can export a table of any size.
    """
    from sattle_dist.export import export as export_run
    from sattle_dist.progress import Progress

    folder = out or run / f"export-{format}"
    bar: list[Progress] = []

    def advance(num_rows: int, total: int) -> None:
        if not bar:
            bar.append(Progress(total_queries=total, done_queries=0, shown=True, unit="entities"))
        bar[0].advance(num_rows, "export", None)

    trained = export_run(run, folder, format, force=force, which=which, on_rows=advance)
    bar[0].clear()
    click.echo(
        f"{trained.graph.num_entities:,} entities and {trained.graph.num_relations:,} relations, "
        f"{trained.dim} numbers each, after epoch {trained.epoch}: {folder}"
    )
