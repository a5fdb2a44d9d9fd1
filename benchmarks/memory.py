"""Memory of a training step over millions of entities, above what parameters, gradients and optimizer state need.

python -m benchmarks.memory

Two runs: 2 million entities in one process, and one step over 10 million entities in 2 processes.
"""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np
import torch

from benchmarks import record
from benchmarks.ranks import run_ranks
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.data import Batches
from sattle_dist.graph import QueryIndex
from sattle_dist.learner import Learner

NUM_RELATIONS = 10


def random_index(num_entities: int, num_queries: int, targets_per_query: int) -> QueryIndex:
    """Draw queries with distinct targets all over the table."""
    rng = np.random.default_rng(0)
    keys = np.sort(rng.choice(num_entities * 2 * NUM_RELATIONS, num_queries, replace=False, shuffle=False))
    steps = rng.integers(1, num_entities // targets_per_query, (num_queries, targets_per_query))
    return QueryIndex(
        queries=keys,
        offsets=np.arange(num_queries + 1) * targets_per_query,
        targets=(np.cumsum(steps, 1) - 1).astype(np.int32).ravel(),
        num_relations_both=2 * NUM_RELATIONS,
    )


def measure(group: Group, device: torch.device, config: Config, num_entities: int, steps: int) -> dict[str, Any]:
    """Take steps; give this process's peak memory above its start, and what the state itself needs."""
    size = config.train.batch_size
    index = random_index(num_entities, steps * size, 4)
    before = record.memory("VmRSS")
    learner = Learner(config, num_entities, NUM_RELATIONS, group, device)
    batches = Batches(
        index, batch_size=size, weigh_by_targets=True, seed=0, sharding=learner.sharding, group=group, device=device
    )
    seconds = []
    for i, batch in enumerate(batches.epoch(0)):
        started = time.perf_counter()
        learner.step(batch, 0, i, 0.001, report=True)
        seconds.append(time.perf_counter() - started)
        assert learner.gradient_norm().isfinite()
    parameters = sum(p.numel() * p.element_size() for _, p in learner.named_parameters())
    return {
        "peak_above_start": record.memory("VmHWM") - before,
        "state": 4 * parameters,  # the parameters, their gradients and two moments
        "seconds_per_step": seconds,
        "dense_scores": size * num_entities * 4,
    }


@click.command(help=__doc__)
@click.option("--batch-size", default=1024, show_default=True)
@click.option("--dim", default=32, show_default=True)
def main(batch_size: int, dim: int) -> None:
    rows = []
    for loss in ("bce", "softmax"):
        config = Config().override({"dim": dim, "batch_size": batch_size, "loss": loss}, "benchmark")
        rows.append({"entities": 2_000_000, "processes": 1, "loss": loss})
        rows[-1]["ranks"] = run_ranks(1, measure, config, 2_000_000, 2, threads=2)
    rows.append({"entities": 10_000_000, "processes": 2, "loss": "softmax"})
    rows[-1]["ranks"] = run_ranks(2, measure, config, 10_000_000, 1)
    result = {"stamp": record.stamp(), "dim": dim, "batch_size": batch_size, "rows": rows}
    record.write("memory", result, render(result))


def render(result: dict[str, Any]) -> str:
    lines = [
        "# Memory of a step over millions of entities",
        "",
        f"TwoMult, d={result['dim']}, 64 heads, {result['batch_size']} queries per step. State: parameters, gradients"
        " and Adam's moments. The rest is the peak of the resident memory above the process's start, less the state.",
        "",
        "| entities | processes | loss | state per process | rest per process | dense scores | seconds per step |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        worst = max(row["ranks"], key=lambda r: int(r["peak_above_start"] - r["state"]))
        lines.append(
            f"| {row['entities']:,} | {row['processes']} | {row['loss']} | {worst['state'] / 1e6:,.0f} MB | "
            f"{(worst['peak_above_start'] - worst['state']) / 1e6:,.0f} MB | {worst['dense_scores'] / 1e6:,.0f} MB | "
            f"{worst['seconds_per_step'][-1]:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
