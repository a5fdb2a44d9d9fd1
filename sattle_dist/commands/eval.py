"""`sattle eval`: rank a split with a trained run, and show, with its protocol, how well it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import checkpoint_option, given_arguments, job_options, setting_option
from sattle_dist.config import Config, UserError

if TYPE_CHECKING:
    import torch

    from sattle_dist.collectives import Group

SPLITS = ("test", "valid", "train")
TIES = ("random", "mean", "optimistic", "pessimistic")
NUM_RELATIONS_SHOWN = 5
LABEL_WIDTH = 34


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--split", type=click.Choice(SPLITS), default="test", show_default=True, help="Triples to rank.")
@click.option(
    "--ties",
    type=click.Choice(TIES),
    help="Position of a true target among candidates of equal score  [default: the run's own]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of random ties and resamples  [default: the run's own]")
@click.option("--raw", is_flag=True, help="Let the query's other known targets compete too; by default they do not.")
@click.option(
    "--bootstrap",
    type=click.IntRange(min=2, max=1_000_000),
    help="Give 95% confidence intervals from so many resamples of the triples.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write all metrics and the protocol here (-: show them instead of the table).",
)
@click.option("--positions", type=click.Path(path_type=Path), help="Write every query's position here, as Parquet.")
@checkpoint_option
@setting_option("score_memory", with_default=True)
@job_options
@one_line_errors
def evaluate(
    run: Path,
    split: str,
    json_file: Path | None,
    positions: Path | None,
    nproc: int,
    device: str,
    threads: int,
    timeout: float,
    **rules: Any,
) -> None:
    """Rank every triple of a split in both directions among all entities, and show the metrics.

    \b
      sattle eval runs/demo                                      the test split
      sattle eval runs/demo --split valid --ties mean --json v.json
      sattle eval runs/demo --nproc 4 --positions p.parquet      four processes; p.parquet has each position, by name
      torchrun --nproc-per-node 4 launchers/eval.py runs/demo    the same through torchrun, also over many machines
    """
    from sattle_dist.files import require_writable
    from sattle_dist.jobs import run_job
    from sattle_dist.runtime import Place, end_process

    Config().override({"score_memory": rules["score_memory"]}, "command line")  # within its bounds
    if Place.from_environment().rank == 0:  # before any work is done, and on the machine where they will be written
        for option, path in (("--json", json_file), ("--positions", positions)):
            if path and str(path) != "-":
                require_writable(path, option)
        if json_file and positions and json_file.absolute() == positions.absolute():
            raise UserError(f"--json and --positions are both {positions}; write them to two files")
    require_triples(run, rules["which"], split, nproc)

    def work(group: Group, device: torch.device) -> None:
        evaluate_run(run, split, json_file, positions, group, device, **rules)

    end_process(run_job(given_arguments(), nproc, device, work, threads=threads, timeout=timeout))


def require_triples(run: Path, which: str, split: str, nproc: int) -> None:
    """Raise UserError where there is no such run, nothing in the split, or fewer entities than processes."""
    from sattle_dist import checkpoint
    from sattle_dist.run import open_graph, read_config
    from sattle_dist.sharding import Sharding

    facts = checkpoint.read_facts(checkpoint.find(run, which))
    graph = open_graph(run, read_config(run), facts)
    Sharding(graph.num_entities, max(1, nproc))
    if graph.num_triples[split] == 0:
        others = [name for name in SPLITS if graph.num_triples[name]]
        raise UserError(f"{graph.path} has no {split} triples; use --split {' or '.join(others)}")


def evaluate_run(
    run: Path,
    split: str,
    json_file: Path | None,
    positions_file: Path | None,
    group: Group,
    device: torch.device,
    *,
    which: str,
    ties: str | None,
    seed: int | None,
    raw: bool,
    bootstrap: int | None,
    score_memory: int,
) -> None:
    """Evaluate as one of several processes; the first shows and writes the result."""
    from sattle_dist import checkpoint
    from sattle_dist.evaluator import evaluate as rank_targets
    from sattle_dist.learner import score_budget
    from sattle_dist.progress import Progress
    from sattle_dist.results import make_protocol, make_result, write_json, write_positions
    from sattle_dist.run import choose_checkpoint, open_run

    opened = choose_checkpoint(run, which, group)
    learner, graph, config = open_run(run, group, device, which=opened.name)
    epoch = checkpoint.read_facts(opened)["epoch"]
    if score_memory:
        learner.loss.budget = score_budget(score_memory, device)
    ties, seed = ties or config.eval.ties, config.train.seed if seed is None else seed
    progress = Progress(total_queries=len(graph.index(split)), done_queries=0, shown=group.rank == 0)
    positions = rank_targets(
        learner,
        graph,
        split,
        ties,
        seed,
        filtered=not raw,
        on_queries=lambda number: progress.advance(number, f"ranking {split}", None),
    )

    def finish() -> None:
        protocol = make_protocol(
            graph,
            split=split,
            ties=ties,
            seed=seed,
            filtered=not raw,
            checkpoint=opened.name,
            epoch=epoch,
        )
        result = make_result(positions, graph, protocol, num_resamples=bootstrap or 0)
        if json_file and str(json_file) != "-":
            write_json(json_file, result)
        if positions_file:
            write_positions(positions_file, positions, graph)
        progress.clear()
        click.echo(json.dumps(result, indent=2, ensure_ascii=False) if str(json_file) == "-" else table(result))

    group.on_first(finish)


def table(result: dict[str, Any]) -> str:
    """Lay out the protocol, and the metrics overall and by group, with the relations of most triples."""
    protocol = result["protocol"]
    against = f"filtered by {', '.join(protocol['filter'])}" if protocol["filter"] else "raw"
    seed = f" (seed {protocol['seed']})" if protocol["ties"] == "random" else ""
    names = [name for name in result["metrics"] if name != "count"]
    titles = [name.replace("mean_position", "mean pos").replace("hits", "Hits") for name in names]
    titles = [title.upper() if title in ("mrr", "amri") else title for title in titles]
    rows: list[tuple[str, dict[str, Any]]] = [("all", result["metrics"])]
    if sampled := result.get("bootstrap"):
        for end, word in enumerate(("from", "to")):
            rows.append((f"  95% {word}", {name: sampled["intervals"][name][end] for name in names}))
    rows += [(f"{name} asked for", m) for name, m in result["by_direction"].items()]
    rows += [(f"{name} relations", m["both"]) for name, m in result["by_cardinality"].items()]
    rows += [("entities all seen in training", result["by_seen"]["seen"])]
    rows += [("an entity unseen in training", result["by_seen"]["unseen"])]
    rows += [(f"  {r['relation']}", r["both"]) for r in result["by_relation"][:NUM_RELATIONS_SHOWN]]
    lines = [
        f"{protocol['graph']}, {protocol['split']}: {protocol['triples']:,} triples in both directions, among "
        f"{protocol['candidates']:,} entities",
        f"{against}; ties {protocol['ties']}{seed}; {protocol['checkpoint']}",
        "",
        f"{'':{LABEL_WIDTH}}{'queries':>10}" + "".join(f"{title:>9}" for title in titles),
    ]
    for label, m in rows:
        if m.get("count") != 0:
            short = label if len(label) < LABEL_WIDTH else label[: LABEL_WIDTH - 2] + "…"
            count = f"{m['count']:,}" if "count" in m else ""
            cells = "".join(f"{m[name]:9.1f}" if name == "mean_position" else f"{m[name]:9.4f}" for name in names)
            lines.append(f"{short:{LABEL_WIDTH}}{count:>10}{cells}")
    return "\n".join(lines)
