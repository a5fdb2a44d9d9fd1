"""Time and memory of an evaluation: against its matrix products alone, and over a million entities.

python -m benchmarks.evaluation --graph FB15k-237.graph

First the graph's whole test split in one process: the time of `evaluate`, and in the same rounds that of the products
that score its queries, nothing else, in the shapes that evaluation gives them. Then 10,000 random queries over a
million entities in 2 processes: time, and memory above the process's own with its table.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks import record
from benchmarks.memory import random_index
from benchmarks.ranks import run_ranks
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.counting import Sizes
from sattle_dist.evaluator import encode_block, evaluate, query_blocks
from sattle_dist.graph import Graph, QueryIndex
from sattle_dist.learner import Learner

NUM_RELATIONS = 10
ENTITIES, QUERIES, TARGETS = 1_000_000, 10_000, 2


def measure_time(group: Group, device: torch.device, path: str, rounds: int) -> dict[str, Any]:
    """Time evaluation and its parts in turn; give the medians over the rounds."""
    graph = Graph.open(Path(path))
    index = graph.index("test")
    learner = Learner(Config(), graph.num_entities, graph.num_relations, group, device)
    sizes = Sizes.within(learner.loss.budget, learner.sharding.rows_per_shard, device)
    seconds: dict[str, list[float]] = {name: [] for name in ("evaluate", "encode", "distinct", "every")}
    for _ in range(rounds + 1):  # the first warms up
        started = time.perf_counter()
        evaluate(learner, graph, "test", "random", 0)
        seconds["evaluate"].append(time.perf_counter() - started)
        started = time.perf_counter()
        for places in query_blocks(index):
            encode_block(learner, *index.split_keys(index.queries[places]))
        seconds["encode"].append(time.perf_counter() - started)
        seconds["distinct"].append(time_products(learner, len(index), sizes.num_queries))
        seconds["every"].append(time_products(learner, len(index.targets), sizes.num_queries))
    return {
        "graph": graph.name,
        "distinct_queries": len(index),
        "queries": len(index.targets),
        "budget": learner.loss.budget,
        "seconds": {name: statistics.median(values[1:]) for name, values in seconds.items()},
    }


@torch.no_grad()
def time_products(learner: Learner, num_queries: int, at_once: int) -> float:
    """Score so many queries against all rows, in products of this many, into one buffer."""
    table = learner.table
    query = torch.randn(at_once, table.rows.shape[1])
    scores = torch.empty(at_once, len(table.rows))
    started = time.perf_counter()
    for start in range(0, num_queries, at_once):
        size = min(at_once, num_queries - start)
        torch.addmm(table.bias, query[:size], table.rows.T, out=scores[:size])
    return time.perf_counter() - started


@functools.cache
def test_index(num_entities: int) -> QueryIndex:
    return random_index(num_entities, QUERIES, TARGETS)


class RandomGraph(Graph):
    """A graph whose index is drawn: test queries with targets all over the table, and nothing else."""

    def index(self, split: str) -> QueryIndex:
        if split == "test":
            return test_index(self.num_entities)
        nothing = np.empty(0, np.int64)
        return QueryIndex(
            queries=nothing,
            offsets=np.zeros(1, np.int64),
            targets=nothing.astype(np.int32),
            num_relations_both=2 * NUM_RELATIONS,
        )


def measure_memory(group: Group, device: torch.device) -> dict[str, Any]:
    """Evaluate over a million entities; give the time, and the memory above that of the model."""
    graph = RandomGraph(
        path=Path(),
        name="random",
        checksum="",
        num_entities=ENTITIES,
        num_relations=NUM_RELATIONS,
        num_triples={"train": 0, "valid": 0, "test": QUERIES * TARGETS // 2},
    )
    graph.index("test")
    learner = Learner(Config(), ENTITIES, NUM_RELATIONS, group, device)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = record.memory("VmRSS")
    started = time.perf_counter()
    positions = evaluate(learner, graph, "test", "random", 0)
    return {
        "seconds": time.perf_counter() - started,
        "above": record.memory("VmHWM") - before,
        "budget": learner.loss.budget,
        "table": learner.table.rows.numel() * 4,
        "mean_position": float(positions.position.mean()),
    }


@click.command(help=__doc__)
@click.option("--graph", required=True, type=click.Path(exists=True), help="FB15k-237, as sattle-ingest makes it.")
@click.option("--rounds", default=5, show_default=True)
def main(graph: str, rounds: int) -> None:
    (timed,) = run_ranks(1, measure_time, graph, rounds, threads=2)
    ranks = run_ranks(2, measure_memory)
    result = {"stamp": record.stamp(), "time": timed, "memory": ranks}
    record.write("evaluation", result, render(result))


def render(result: dict[str, Any]) -> str:
    timed, seconds = result["time"], result["time"]["seconds"]
    worst = max(result["memory"], key=lambda rank: int(rank["above"]))
    lines = [
        "# Time and memory of an evaluation",
        "",
        f"{timed['graph']}, test, filtered, both directions: {timed['queries']:,} queries, of which "
        f"{timed['distinct_queries']:,} are distinct; TwoMult, d=100, 64 heads, one process, 2 threads. Medians.",
        "",
        "| what | seconds | evaluation takes |",
        "|---|---:|---:|",
        f"| the whole evaluation | {seconds['evaluate']:.2f} | |",
        f"| scoring products of all {timed['queries']:,} queries, alone | {seconds['every']:.2f} | "
        f"{seconds['evaluate'] / seconds['every']:.1f} x |",
        f"| scoring products of the {timed['distinct_queries']:,} distinct ones, which evaluation forms | "
        f"{seconds['distinct']:.2f} | {seconds['evaluate'] / seconds['distinct']:.1f} x |",
        f"| encoding the distinct queries, alone | {seconds['encode']:.2f} | |",
        "",
        f"{ENTITIES:,} entities, {QUERIES:,} distinct queries with {TARGETS} targets each, 2 processes: "
        f"{worst['seconds']:.0f} seconds. A process has a table of {worst['table'] / 1e6:.0f} MB and a budget of "
        f"{worst['budget'] / 1e6:.0f} MB (--score-memory); its peak rose by {worst['above'] / 1e6:.0f} MB.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
