"""One point of benchmarks.scale: what is measured in processes of its own, and what the planner says of it."""

from __future__ import annotations

import math
import os
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.memory import random_index
from benchmarks.phases import Phases
from benchmarks.ranks import run_ranks
from sattle_dist import costs
from sattle_dist.calibrate import calibrate
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.costs import Workload
from sattle_dist.data import Batches
from sattle_dist.learner import Learner
from sattle_dist.memory import memory_peaks
from sattle_dist.plan import step_seconds

NUM_RELATIONS = 237
TARGETS_PER_QUERY = 4
WARM_STEPS, FEWEST_STEPS, MOST_STEPS, ENOUGH_SECONDS = 2, 3, 10, 2.0
PHASE_STEPS = 2
MOST_OTHERS = 0.1  # cores busy with something else; a point disturbed more is measured again
MOST_DRIFT = 0.2  # between calibrations before and after a point, as a logarithm; likewise
MOST_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is varied. A point's key names it in the results."""

    study: str
    decoder: str
    dim: int
    num_heads: int
    entities: int
    processes: int
    threads: int
    batch_size: int
    loss: str

    @property
    def key(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def config(self) -> Config:
        names = ("decoder", "dim", "num_heads", "batch_size", "loss", "threads")
        return Config().override({name: getattr(self, name) for name in names}, "benchmark")

    @property
    def work(self) -> Workload:
        """The point as the planner sees it; one epoch is a million queries."""
        return Workload(
            config=self.config,
            num_entities=self.entities,
            num_relations=NUM_RELATIONS,
            num_triples=10**6 * TARGETS_PER_QUERY // 2,
            num_queries=10**6,
            world_size=self.processes,
        )


def run_point(point: Point) -> dict[str, Any]:
    """Predict and measure a point; again where the machine was not left alone. Give the steadiest row."""
    rows: list[dict[str, Any]] = []
    while len(rows) < MOST_TRIES and not any(is_steady(row) for row in rows):
        busy, began = others_seconds(), time.monotonic()
        row = predict_and_measure(point)
        rows.append({**row, "others": (others_seconds() - busy) / (time.monotonic() - began)})
    return next(filter(is_steady, rows), min(rows, key=lambda row: float(row["drift"])))


def is_steady(row: dict[str, Any]) -> bool:
    """Tell whether the machine was the same while a point was measured."""
    return bool(row["others"] <= MOST_OTHERS and row["drift"] <= MOST_DRIFT)


def others_seconds() -> float:
    """Give the CPU seconds that went to other processes than this one and its ended children, or to other machines."""
    try:
        user, nice, system, _, _, _, _, stolen = (int(n) for n in Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = user + nice + system + stolen
    return ticks / os.sysconf("SC_CLK_TCK") - sum(use.ru_utime + use.ru_stime for use in own)


def predict(work: Workload) -> float:
    """Predict the seconds of a step, from a calibration made now."""
    parts = step_seconds(work, calibrate(work, here=True))
    # The value of the loss, formed at every tenth step, is part of an epoch but of no step that is measured here.
    return sum(s for name, s in parts.items() if not name.startswith("value of the loss"))


def predict_and_measure(point: Point) -> dict[str, Any]:
    """Predict a point, measure it in fresh processes, and predict it again, to see how steady the machine is."""
    work = point.work
    seconds = predict(work)
    ranks = run_ranks(point.processes, measure, point, threads=point.threads)
    drift = abs(math.log(predict(work) / seconds))
    slowest = max(ranks, key=lambda rank: float(rank["seconds"]))
    nfp, efp = work.parameters
    return {
        **asdict(point),
        "nfp": nfp,
        "efp": efp,
        "encoder_flops": costs.encoder_flops(work),
        "score_flops": costs.score_flops(work),
        "seconds": slowest["seconds"],
        "queries_per_second": point.batch_size / slowest["seconds"],
        "triples_per_second": point.batch_size * TARGETS_PER_QUERY / slowest["seconds"],
        "encoder_seconds": slowest["encoder_seconds"],
        "score_seconds": slowest["score_seconds"],
        "peak_memory": max(rank["peak"] for rank in ranks),
        "start_memory": max(rank["start"] for rank in ranks),
        "bytes_sent": max(rank["bytes_sent"] for rank in ranks),
        "predicted_seconds": seconds,
        "predicted_memory": memory_peaks(work)["training"],
        "predicted_bytes_sent": sum(costs.bytes_sent(work).values()),
        "drift": drift,
        "step_seconds": slowest["step_seconds"],
    }


def measure(group: Group, device: torch.device, point: Point) -> dict[str, Any]:
    """Time training steps on this rank; give also its peak memory and what it sent. Every rank must call it."""
    size = point.batch_size
    total = WARM_STEPS + MOST_STEPS + PHASE_STEPS
    index = random_index(point.entities, total * size, TARGETS_PER_QUERY)
    start = record.memory("VmRSS")
    learner = Learner(point.config, point.entities, NUM_RELATIONS, group, device)
    batches = Batches(
        index, batch_size=size, weigh_by_targets=True, seed=0, sharding=learner.sharding, group=group, device=device
    )
    began = time.perf_counter()
    planned = list(batches.epoch(0))
    planning = (time.perf_counter() - began) / len(planned)
    plan_bytes = group.bytes_sent.total() / len(planned)

    def step(number: int) -> float:
        began = time.perf_counter()
        learner.step(planned[number], 0, number, 0.001, report=False)
        assert learner.gradient_norm().isfinite()
        return time.perf_counter() - began

    warm = [step(number) for number in range(WARM_STEPS)]
    most = MOST_STEPS if warm[-1] < 3 else FEWEST_STEPS
    group.bytes_sent.clear()
    seconds: list[float] = []
    while len(seconds) < FEWEST_STEPS or group.share(sum(seconds) < ENOUGH_SECONDS and len(seconds) < most):
        seconds.append(step(WARM_STEPS + len(seconds)))
    found = {
        "seconds": statistics.median(seconds) + planning,
        "step_seconds": seconds,
        "peak": record.memory("VmHWM"),
        "start": start,
        "bytes_sent": group.bytes_sent.total() / len(seconds) + plan_bytes,
    }
    phases = Phases(learner)
    for number in range(total - PHASE_STEPS, total):
        step(number)
    parts = {name: s / PHASE_STEPS for name, s in phases.seconds.items()}
    encoder = parts["encode"] + parts["encode backward and rest"]
    return {**found, "encoder_seconds": encoder, "score_seconds": parts["score"]}
