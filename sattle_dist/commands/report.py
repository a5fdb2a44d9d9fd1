"""`sattle report`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import checkpoint_option, given_arguments, job_options

if TYPE_CHECKING:
    from sattle_dist.collectives import Group


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="HTML file to write.  [default: RUN/report.html]")
@click.option(
    "--samples",
    default=6,
    show_default=True,
    type=click.IntRange(0, 1000),
    help="Test queries to answer on the page; with 0 the table is not loaded.",
)
@checkpoint_option
@job_options
@one_line_errors
def report(
    run: Path, out: Path | None, samples: int, which: str, nproc: int, device: str, threads: int, timeout: float
) -> None:
    """Write one self-contained HTML page about a run.

    Training curves, validation MRR, metrics by relation and direction, positions, degrees, times, sample predictions,
    config and protocol. The page needs no network and no scripts. It can be made while the run still trains.
    """
    from sattle_dist.checkpoint import latest, list_checkpoints
    from sattle_dist.config import ConfigError
    from sattle_dist.files import replacing, require_writable
    from sattle_dist.findings import read_findings
    from sattle_dist.jobs import run_job
    from sattle_dist.report import render, sample_predictions
    from sattle_dist.run import open_run
    from sattle_dist.runtime import end_process

    if not (run / "config.toml").is_file():
        latest(run)  # says in one line what is wrong with a folder that is no run
    file = out or run / "report.html"
    require_writable(file, "--out")

    def write(found: list[Any]) -> None:
        try:
            with replacing(file) as draft:
                draft.write_text(render(read_findings(run), found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error}") from None
        click.echo(f"{file}")

    def work(group: Group, device: Any) -> None:
        learner, graph, _ = open_run(run, group, device, which)
        found = sample_predictions(learner, graph, samples)
        if group.rank == 0:
            write(found)

    if samples == 0 or not list_checkpoints(run):
        write([])
    else:
        end_process(run_job(given_arguments(), nproc, device, work, threads=threads, timeout=timeout))
