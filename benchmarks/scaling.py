"""Throughput at 1, 2 and 4 processes with one thread each, and where the time of a step goes.

python -m benchmarks.scaling --graph FB15k-237.graph

Queries per second, speed-up over one process, milliseconds by phase, bytes each process sends per step. The groups of
processes are all there from the beginning and take turns of a few steps, so that a speed-up compares what was measured
within seconds: the speed of a shared machine changes within minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.multiprocessing as mp

from benchmarks import record
from benchmarks.phases import Phases
from benchmarks.ranks import run_ranks
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.data import Batches
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner

WARM_UP = 5


class Turns:
    """Lets several groups of processes work one after the other, round by round."""

    def __init__(self, count: int) -> None:
        context = mp.get_context("spawn")
        self._gates = [context.Semaphore(1 if i == 0 else 0) for i in range(count)]
        self.failed = context.Event()

    @contextmanager
    def turn(self, place: int, group: Group) -> Iterator[None]:
        """Wait for this group's turn, and pass it on afterwards."""
        while group.rank == 0 and not self._gates[place].acquire(timeout=1):
            if self.failed.is_set():
                raise SystemExit(1)
        group.barrier()
        yield
        group.barrier()  # the slowest rank counts
        if group.rank == 0:
            self._gates[(place + 1) % len(self._gates)].release()


def measure(
    group: Group, device: torch.device, turns: Turns, place: int, path: Path, config: Config, steps: int, rounds: int
) -> dict[str, Any]:
    """Time so many steps in every round, then once more with the phases apart."""
    graph = Graph.open(path)
    learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
    batches = Batches(
        graph.index("train"),
        batch_size=config.train.batch_size,
        weigh_by_targets=config.train.loss != "kvsall",
        seed=0,
        sharding=learner.sharding,
        group=group,
        device=device,
    )
    supply = (batch for epoch in range(1 << 30) for batch in batches.epoch(epoch))

    def train(count: int) -> float:
        started = time.perf_counter()
        for step in range(count):
            learner.step(next(supply), 0, step, 0.001, report=False)
        group.barrier()
        return (time.perf_counter() - started) / count

    with turns.turn(place, group):
        train(WARM_UP)
    group.bytes_sent.clear()
    seconds = []
    for _ in range(rounds):
        with turns.turn(place, group):
            seconds.append(train(steps))
    sent = group.bytes_sent.total() / (steps * rounds)
    phases = Phases(learner)
    with turns.turn(place, group):
        train(3 * steps)
    return {
        "seconds_per_step": seconds,
        "bytes_sent_per_step": sent,
        "phases": {name: s / (3 * steps) for name, s in phases.seconds.items()},
    }


def measure_all(world_sizes: Sequence[int], *args: Any) -> dict[int, dict[str, Any]]:
    """Run the groups side by side, working in turns; give what rank 0 of each measured."""
    turns = Turns(len(world_sizes))
    with ThreadPoolExecutor(len(world_sizes)) as pool:
        runs = [pool.submit(run_ranks, w, measure, turns, place, *args) for place, w in enumerate(world_sizes)]
        if any(run.exception() for run in wait(runs, return_when=FIRST_EXCEPTION).done):
            turns.failed.set()
        return {w: run.result()[0] for w, run in zip(world_sizes, runs, strict=True)}


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@click.command(help=__doc__)
@click.option("--graph", type=click.Path(path_type=Path), required=True, help="FB15k-237, ingested.")
@click.option("--processes", default="1,2,4", show_default=True)
@click.option(
    "--batch-sizes", default="512,1024,2048,4096", show_default=True, help="Queries a step, all processes together."
)
@click.option("--steps", default=5, show_default=True, help="Steps of a turn.")
@click.option("--rounds", default=15, show_default=True, help="Turns of each number of processes.")
@click.option("--loss", default="bce", show_default=True, type=click.Choice(["bce", "kvsall", "softmax"]))
def main(graph: Path, processes: str, batch_sizes: str, steps: int, rounds: int, loss: str) -> None:
    world_sizes = _numbers(processes)
    rows = {}
    for size in _numbers(batch_sizes):
        config = Config().override({"batch_size": size, "loss": loss}, "benchmark")
        rows[size] = measure_all(world_sizes, graph, config, steps, rounds)
    result = {"stamp": record.stamp(), "loss": loss, "steps": steps, "rows": rows}
    record.write("scaling", result, render(result))


def speedups(one: dict[str, Any], many: dict[str, Any]) -> list[float]:
    """Give the speed-up of every round, from the slowest to the fastest."""
    return sorted(a / b for a, b in zip(one["seconds_per_step"], many["seconds_per_step"], strict=True))


def render(result: dict[str, Any]) -> str:
    names = ["encode", "encode backward and rest", "score", "lookup", "exchange", "optimizer"]
    first = next(iter(result["rows"].values()))
    rounds = len(next(iter(first.values()))["seconds_per_step"])
    lines = [
        "# Scaling over processes",
        "",
        f"FB15k-237, TwoMult, d=100, 64 heads, {result['loss']} loss, one thread per process,"
        f" {result['stamp']['cores']} cores: beyond that many processes the cores are shared. The numbers of processes"
        f" took turns of {result['steps']} steps, {rounds} rounds; a speed-up compares the turns of one round. Phases"
        " on rank 0, measured in further steps.",
        "",
        "| queries a step | processes | queries/s (median) | speed-up: median | lowest to highest | MiB sent per step"
        " and process | " + " | ".join(f"{name} (ms)" for name in names) + " |",
        "|---:|---:|---:|---:|---|---:|" + "---:|" * len(names),
    ]
    for size, row in result["rows"].items():
        one = next(iter(row.values()))
        for world_size, measured in row.items():
            ratios = speedups(one, measured)
            phases = " | ".join(f"{1e3 * measured['phases'].get(name, 0):.1f}" for name in names)
            speed = size / median(measured["seconds_per_step"])
            sent = measured["bytes_sent_per_step"] / 2**20
            lines.append(
                f"| {size:,} | {world_size} | {speed:,.0f} | {median(ratios):.2f} | "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {sent:.2f} | {phases} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
