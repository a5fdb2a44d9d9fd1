"""The `sattle` command: every command of `sattle_dist.commands`, and the graph commands of `ingest`."""

from __future__ import annotations

import signal

import click

from ingest.cli import info, ingest, sql
from sattle_dist import __version__
from sattle_dist.commands.eval import evaluate
from sattle_dist.commands.export import export
from sattle_dist.commands.plan import plan
from sattle_dist.commands.predict import predict
from sattle_dist.commands.report import report
from sattle_dist.commands.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sattle")
def main() -> None:
    """Train link-prediction embeddings of knowledge graphs, exactly, on all the processors there are."""


for command in (ingest, info, sql, plan, train, evaluate, predict, export, report):
    main.add_command(command)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker in the middle of an exchange ends at once
    main()
