"""Our training step against the straightforward dense one, on the same examples, in one run.

python -m benchmarks.step --graph FB15k-237.graph

Seconds per epoch and their ratio, counted FLOPs as a share of this machine's matrix-product peak, peak memory, phases.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import record
from benchmarks.dense import DenseStep
from benchmarks.phases import Phases
from sattle_dist.config import Config
from sattle_dist.data import Batches
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.runtime import joined

TRIPLES_PER_BATCH = 2048


def matmul_peak() -> float:
    """Measure the FLOP/s of a large float32 product, the best of a few."""
    a, out = torch.randn(4096, 4096), torch.empty(4096, 4096)
    return max(2 * 4096**3 / seconds for seconds in timed(lambda: torch.mm(a, a, out=out), 4))


def timed(function: Callable[[], Any], times: int) -> list[float]:
    function()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_dense(path: Path, config: Config, steps: int) -> dict[str, Any]:
    """Time dense steps on the triples of the graph, both directions, in a random order."""
    graph = Graph.open(path)
    index = graph.index("train")
    counts = np.diff(index.offsets)
    source, relation = (np.repeat(x, counts) for x in index.split_keys(np.asarray(index.queries)))
    triples = torch.from_numpy(np.stack([source, relation, index.targets.astype(np.int64)]))
    triples = triples[:, torch.randperm(triples.shape[1], generator=torch.Generator().manual_seed(0))]
    before = record.memory("VmRSS")
    step = DenseStep(config.model, graph.num_entities, graph.num_relations, config.train.label_smoothing)
    batches = iter(triples.split(TRIPLES_PER_BATCH, 1))
    seconds = timed(lambda: step(*next(batches)), steps)
    return {
        "seconds_per_step": seconds,
        "seconds_per_epoch": statistics.median(seconds) * triples.shape[1] / TRIPLES_PER_BATCH,
        "peak_memory": record.memory("VmHWM") - before,
    }


def measure_ours(path: Path, config: Config, steps: int, queries: int) -> dict[str, Any]:
    """Time our steps on the same triples grouped by query, so many queries a step, or as many as hold 2,048 triples."""
    graph = Graph.open(path)
    index = graph.index("train")
    size = queries or round(TRIPLES_PER_BATCH * len(index) / len(index.targets))
    config = config.override({"batch_size": size}, "benchmark")
    before = record.memory("VmRSS")
    with joined(config.run) as (group, device):
        learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
        batches = Batches(
            index,
            batch_size=size,
            weigh_by_targets=True,
            seed=0,
            sharding=learner.sharding,
            group=group,
            device=device,
        ).epoch(0)
        number = itertools.count()
        peak_before = matmul_peak()

        def step() -> None:
            i = next(number)
            learner.step(next(batches), 0, i, 0.001, report=i % 10 == 0)
            learner.gradient_norm().isfinite().item()

        seconds = timed(step, steps)
        peak = record.memory("VmHWM") - before
        with FlopCounterMode(display=False) as counter:
            step()
        phases = Phases(learner)
        for _ in range(20):
            step()
        return {
            "batch_size": size,
            "seconds_per_step": seconds,
            "seconds_per_epoch": statistics.mean(seconds) * len(index) / size,
            "peak_memory": peak,
            "flops_per_step": counter.get_total_flops(),
            "matmul_peak": max(peak_before, matmul_peak()),
            "phases": {name: s / 20 for name, s in phases.seconds.most_common()},
        }


def in_child(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run in a process of its own, so that its peak memory is its own."""
    with mp.get_context("spawn").Pool(1) as pool:
        return dict(pool.apply(function, args))


@click.command(help=__doc__)
@click.option("--graph", type=click.Path(path_type=Path), required=True, help="FB15k-237, ingested.")
@click.option("--steps", default=60, show_default=True, help="Steps of ours per round; a sixth as many dense ones.")
@click.option("--rounds", default=5, show_default=True, help="Rounds, each of both.")
@click.option("--queries", default=0, help="Queries per step of ours.  [default: as many as hold 2,048 triples]")
@click.option("--loss", default="bce", show_default=True, type=click.Choice(["bce", "softmax"]))
def main(graph: Path, steps: int, rounds: int, queries: int, loss: str) -> None:
    config = Config().override({"loss": loss, "label_smoothing": 0.1 if loss == "bce" else 0.0}, "benchmark")
    ours, dense = [], []
    for _ in range(rounds):
        dense.append(in_child(measure_dense, graph, config, max(2, steps // 6)))
        ours.append(in_child(measure_ours, graph, config, steps, queries))
    result = {"stamp": record.stamp(), "loss": loss, "dense": dense, "ours": ours}
    name = "-".join(["step", *([loss] if loss != "bce" else []), *([str(queries)] if queries else [])])
    record.write(name, result, render(result))
    plot(result, name)


def render(result: dict[str, Any]) -> str:
    dense, ours = (median_round(result[name]) for name in ("dense", "ours"))
    pairs = list(zip(result["dense"], result["ours"], strict=True))
    ratios = sorted(d["seconds_per_epoch"] / o["seconds_per_epoch"] for d, o in pairs)
    rates = [o["flops_per_step"] / statistics.mean(o["seconds_per_step"]) for o in result["ours"]]
    shares = sorted(rate / o["matmul_peak"] for rate, o in zip(rates, result["ours"], strict=True))
    lines = [
        "# One training step",
        "",
        f"FB15k-237, TwoMult, d=100, 64 heads, dropout on; {TRIPLES_PER_BATCH} triples a dense step,"
        f" {ours['batch_size']} queries a step of ours (563 queries hold as many triples), the same triples an epoch;"
        f" our loss: {result['loss']}, its value formed every tenth step."
        f" Medians of {len(result['ours'])} rounds.",
        "",
        "| | seconds per epoch | peak memory above start |",
        "|---|---:|---:|",
        f"| dense step | {dense['seconds_per_epoch']:.1f} | {dense['peak_memory'] / 2**20:,.0f} MiB |",
        f"| ours | {ours['seconds_per_epoch']:.1f} | {ours['peak_memory'] / 2**20:,.0f} MiB |",
        "",
        f"**{statistics.median(ratios):.1f} times faster** (rounds: {ratios[0]:.1f} to {ratios[-1]:.1f}). Counted FLOPs"
        f" of our step: {ours['flops_per_step'] / 1e9:.2f} G, done at **{statistics.median(shares):.0%}** (rounds:"
        f" {shares[0]:.0%} to {shares[-1]:.0%}) of the speed of a 4096 x 4096 product in the same round"
        f" ({min(o['matmul_peak'] for o in result['ours']) / 1e9:.0f} to"
        f" {max(o['matmul_peak'] for o in result['ours']) / 1e9:.0f} GFLOP/s).",
        "",
        "| phase of our step | ms |",
        "|---|---:|",
        *(f"| {name} | {1e3 * seconds:.1f} |" for name, seconds in ours["phases"].items()),
        "",
    ]
    return "\n".join(lines)


def median_round(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the round of median speed."""
    return sorted(rounds, key=lambda r: float(r["seconds_per_epoch"]))[len(rounds) // 2]


def plot(result: dict[str, Any], name: str) -> None:
    """Draw the two epochs side by side, and the phases of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dense, ours = (median_round(result[key]) for key in ("dense", "ours"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), width_ratios=(1, 2))
    bars = left.bar(["dense", "ours"], [dense["seconds_per_epoch"], ours["seconds_per_epoch"]], color=["#999", "#26c"])
    left.bar_label(bars, fmt="%.0f s")
    left.set_title("seconds per epoch, FB15k-237")
    phases = ours["phases"]
    right.barh(list(phases), [1e3 * s for s in phases.values()], color="#26c")
    right.invert_yaxis()
    right.set_title("our step, ms by phase")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(record.RESULTS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
