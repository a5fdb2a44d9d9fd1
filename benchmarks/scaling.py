"""Throughput at 1, 2 and 4 processes with one thread each, and where the time of a step goes.

python -m benchmarks.scaling --graph FB15k-237.graph

Queries per second, speed-up over one process, milliseconds by phase, bytes each process sends per step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import record
from benchmarks.phases import Phases
from benchmarks.ranks import run_ranks
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.data import Batches
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner

DEFAULT_SIZE = 2048


def measure(group: Group, device: torch.device, path: Path, config: Config, steps: int) -> dict[str, Any]:
    """Time steps on this rank, after a few to warm up; then again with the phases apart."""
    graph = Graph.open(path)
    index = graph.index("train")
    learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
    batches = Batches(
        index,
        batch_size=config.train.batch_size,
        weigh_by_targets=config.train.loss != "kvsall",
        seed=0,
        sharding=learner.sharding,
        group=group,
        device=device,
    ).epoch(0)
    for i in range(5):
        learner.step(next(batches), 0, i, 0.001, report=False)
    group.barrier()
    group.bytes_sent.clear()
    started = time.perf_counter()
    for i in range(steps):
        learner.step(next(batches), 0, i, 0.001, report=False)
    group.barrier()  # the slowest rank counts
    seconds = (time.perf_counter() - started) / steps
    sent = group.bytes_sent.total() / steps
    phases = Phases(learner)
    timed_steps = max(5, steps // 3)
    for i in range(timed_steps):
        learner.step(next(batches), 0, i, 0.001, report=False)
    return {
        "seconds_per_step": seconds,
        "bytes_sent_per_step": sent,
        "phases": {name: s / timed_steps for name, s in phases.seconds.items()},
    }


@click.command(help=__doc__)
@click.option("--graph", type=click.Path(path_type=Path), required=True, help="FB15k-237, ingested.")
@click.option("--processes", default="1,2,4", show_default=True)
@click.option("--batch-size", default=DEFAULT_SIZE, show_default=True, help="Queries per step, over all processes.")
@click.option("--steps", default=30, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Rounds over all numbers of processes.")
@click.option("--loss", default="softmax", show_default=True, type=click.Choice(["bce", "kvsall", "softmax"]))
def main(graph: Path, processes: str, batch_size: int, steps: int, rounds: int, loss: str) -> None:
    config = Config().override({"batch_size": batch_size, "loss": loss}, "benchmark")
    world_sizes = [int(w) for w in processes.split(",")]
    rows: dict[int, list[dict[str, Any]]] = {w: [] for w in world_sizes}
    for _ in range(rounds):
        for world_size in world_sizes:
            rows[world_size].append(run_ranks(world_size, measure, graph, config, steps)[0])
    medians = {}
    for world_size, measured in rows.items():
        chosen = sorted(measured, key=lambda r: float(r["seconds_per_step"]))[len(measured) // 2]
        speed = batch_size / chosen["seconds_per_step"]
        medians[world_size] = {**chosen, "queries_per_second": speed}
    result = {"stamp": record.stamp(), "batch_size": batch_size, "loss": loss, "rows": rows, "medians": medians}
    record.write("scaling" if batch_size == DEFAULT_SIZE else f"scaling-{batch_size}", result, render(result))


def render(result: dict[str, Any]) -> str:
    medians = result["medians"]
    first = next(iter(medians.values()))["queries_per_second"]
    names = list(max(medians.values(), key=lambda row: len(row["phases"]))["phases"])
    lines = [
        "# Scaling over processes",
        "",
        f"FB15k-237, TwoMult, d=100, 64 heads, {result['loss']} loss, {result['batch_size']} queries per step over all"
        f" processes, one thread per process, {result['stamp']['cores']} cores: beyond that many processes the cores"
        " are shared. Medians of the rounds; phases on rank 0, measured in further steps.",
        "",
        "| processes | queries/s | speed-up | MiB sent per step and process | "
        + " | ".join(f"{name} (ms)" for name in names)
        + " |",
        "|---:|---:|---:|---:|" + "---:|" * len(names),
    ]
    for world_size, row in medians.items():
        phases = " | ".join(f"{1e3 * row['phases'].get(name, 0):.1f}" for name in names)
        lines.append(
            f"| {world_size} | {row['queries_per_second']:,.0f} | {row['queries_per_second'] / first:.2f} | "
            f"{row['bytes_sent_per_step'] / 2**20:.2f} | {phases} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
