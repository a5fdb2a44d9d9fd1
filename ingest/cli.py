"""The commands `sattle-ingest` (`sattle ingest`), `sattle info` and `sattle sql`: options in, messages out."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from ingest.build import IngestReport, ingest_triples
from ingest.datasets import DATASETS, dataset_folder
from ingest.errors import IngestError
from ingest.info import describe, render
from ingest.options import FORMATS, SPLITS, IngestOptions, parse_size
from ingest.progress import StageDisplay
from ingest.signals import ends_on_signals
from ingest.sql import OUTPUTS, run_query


class UserError(click.ClickException):
    """An error the user can mend; exit code 2."""

    exit_code = 2


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except IngestError as error:
            self.fail(str(error), param, ctx)


class _Columns(click.ParamType[tuple[str, ...]]):
    name = "source,relation,target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        columns = value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(","))
        if len(columns) != 3:
            self.fail(f"{value!r} must name three columns, such as 1,3,2 or subject,predicate,object", param, ctx)
        return columns


_PATH = click.Path(path_type=Path)


@click.command(name="ingest", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--out", type=_PATH, help="Graph directory to write.  [default: INPUT's name with .graph, here]")
@click.option("--train", multiple=True, metavar="FILE", help="Training triples; may be repeated.")
@click.option("--valid", multiple=True, metavar="FILE", help="Validation triples; may be repeated.")
@click.option("--test", multiple=True, metavar="FILE", help="Test triples; may be repeated.")
@click.option("--dataset", metavar="|".join(DATASETS), help="A benchmark by name, downloaded if need be.")
@click.option("--data-dir", type=_PATH, help="Folder that holds the dataset's folder.  [default: SATTLE_DATA]")
@click.option("--append-to", type=_PATH, metavar="GRAPH", help="Extend this graph; its ids stay as they are.")
@click.option("--name", help="Name of the graph.  [default: from --out]")
@click.option("--format", "format", type=click.Choice(FORMATS), default="auto", show_default=True)
@click.option("--columns", type=_Columns(), help="Columns of a triple: positions from 1, or names with --header.")
@click.option("--header", is_flag=True, help="The first line of every file is a header.")
@click.option("--delimiter", help="Byte between fields; \\t is a tab.  [default: tab, comma for CSV]")
@click.option("--comment", metavar="TEXT", help="Pass over lines that start with this.")
@click.option("--strip", is_flag=True, help="Cut blanks around fields and at the end of lines.")
@click.option("--on-reject", type=click.Choice(("error", "skip")), default="error", show_default=True)
@click.option("--max-line-bytes", type=int, default=1 << 20, show_default=True, help="Longer lines are malformed.")
@click.option("--valid-fraction", type=float, help="Share of an unsplit input for valid.  [default: 0.05]")
@click.option("--test-fraction", type=float, help="Share of an unsplit input for test.  [default: 0.05]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the split.")
@click.option("--force", is_flag=True, help="Replace an existing graph.")
@click.option("--memory-limit", type=_Size(), help="Such as 4GB.  [default: half of the machine]")
@click.option("--threads", type=int, help="[default: one per processor]")
@click.option("--temp-dir", type=_PATH, help="Where to spill.  [default: beside the graph]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@ends_on_signals()
def ingest(
    inputs: tuple[str, ...],
    train: tuple[str, ...],
    valid: tuple[str, ...],
    test: tuple[str, ...],
    dataset: str | None,
    data_dir: Path | None,
    quiet: bool,
    **values: Any,
) -> None:
    """Turn triples into a graph directory of Parquet.

    INPUT is a file of triples (TSV, CSV, N-Triples or Parquet; plain, gz, zst or bz2), several, a glob, - for standard
    input, or a directory with train, valid and test files. An unsplit input is split by a hash of its triples.
    With --dataset the input is a published benchmark: from --data-dir or SATTLE_DATA, else downloaded and cached.
    """
    if values["delimiter"] == "\\t":
        values["delimiter"] = "\t"
    display = nullcontext() if quiet else StageDisplay(sys.stderr)
    try:
        _check_dataset(dataset, data_dir, inputs + train + valid + test)
        with display as progress:
            if dataset:
                inputs = (str(dataset_folder(dataset, data_dir, progress)),)
            report = ingest_triples(
                inputs, train=train, valid=valid, test=test, options=IngestOptions(**values), progress=progress
            )
    except IngestError as error:
        raise UserError(str(error)) from None
    if not quiet:
        _print_report(report)


def _check_dataset(dataset: str | None, data_dir: Path | None, others: tuple[str, ...]) -> None:
    if dataset and others:
        raise IngestError(f"give either --dataset or files, not both (--dataset is {dataset}, a file is {others[0]})")
    if data_dir is not None and not dataset:
        raise IngestError(f"--data-dir {data_dir} needs --dataset: name one of {', '.join(DATASETS)}")


def _print_report(report: IngestReport) -> None:
    manifest = report.manifest
    lines, splits = manifest["lines"], manifest["splits"]
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(
        f"lines: {lines['read']:,} read = {lines['kept']:,} kept + {lines['duplicates']:,} duplicates + "
        f"{lines['rejected']:,} rejected ({lines['blank']:,} empty, {lines['comments']:,} comment and "
        f"{lines['headers']:,} header lines besides)"
    )
    click.echo(
        f"{report.path}: {manifest['num_entities']:,} entities, {manifest['num_relations']:,} relations; "
        + ", ".join(f"{split} {splits[split]['triples']:,}" for split in SPLITS)
    )
    if manifest["split"]["how"] == "hash":
        moved = manifest["split"]["moved_to_train"]
        click.echo(
            f"split by hash (seed {manifest['split']['seed']}); moved to train, which lacked their entities or "
            f"relations: {moved['valid']:,} from valid, {moved['test']:,} from test"
        )
    if lines["rejected"]:
        click.echo(f"rejected lines: {report.path / 'rejects.parquet'}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("graph", type=_PATH)
@click.option("--verify", is_flag=True, help="Recompute every checksum.")
@click.option("--leakage/--no-leakage", default=True, show_default=True, help="Look for triples train gives away.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@ends_on_signals()
def info(graph: Path, verify: bool, leakage: bool, as_json: bool) -> None:
    """Show what a graph holds: counts, degrees, relations, unseen entities and leakage."""
    try:
        facts = describe(graph, check=verify, leakage=leakage)
    except IngestError as error:
        raise UserError(str(error)) from None
    click.echo(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else render(facts), nl=as_json)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("graph", type=_PATH)
@click.argument("query")
@click.option("--format", "output", type=click.Choice(OUTPUTS), default="table", show_default=True)
@ends_on_signals()
def sql(graph: Path, query: str, output: str) -> None:
    """Run a DuckDB QUERY on the views triples, entities and relations of a graph.

    triples has split, source, relation and target as labels, and source_id, relation_id and target_id.
    """
    try:
        run_query(graph, query, output, sys.stdout)
    except IngestError as error:
        raise UserError(str(error)) from None


def main() -> None:
    """Run `sattle-ingest`."""
    ingest(prog_name="sattle-ingest")


if __name__ == "__main__":
    main()
