"""How fast this machine is at a workload: real steps over small tables, timed for a few seconds.

Two tables of different size and the same queries give the speed of the scoring, which grows with the rows, and of
everything else, which does not. The optimizer is timed apart. With several processes, all of them measure at once and
together, as they would train, and the time of an exchange is measured with real ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from sattle_dist.collectives import Group
from sattle_dist.config import Config, RunConfig, UserError
from sattle_dist.costs import (
    FLOAT,
    Workload,
    bytes_sent,
    encoder_flops,
    num_messages,
    optimizer_traffic,
    score_flops,
)
from sattle_dist.data import STEPS_PER_PLAN, Batches
from sattle_dist.graph import QueryIndex
from sattle_dist.learner import MIB, Learner
from sattle_dist.loss import CACHE_BYTES, SOFTMAXES
from sattle_dist.processes import ProcessError, in_processes
from sattle_dist.runtime import joined

MOST_STATE = 256 * MIB  # of the larger table: beyond the caches, and made in no time
MOST_FLOPS = 4e10  # of a step over the larger table
WARM_STEPS, FEWEST_STEPS, MOST_STEPS, ENOUGH_SECONDS = 2, 5, 12, 1.5
MOST_QUERIES = 4096  # of a step of the calibration: more are no faster, and may need much memory
MOST_TARGETS = 64  # of a query of the calibration


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one process is. Rates are what the step achieves, not what a device promises."""

    encoder: float  # operations per second in encoder and decoder
    score: float  # operations per second in the scoring
    memory: float  # bytes per second in the optimizer
    uncached: float = math.inf  # bytes per second of scores through memory, where `score` does not include it
    report: float = 0.0  # seconds per row and query that the value of the loss adds, when it is formed
    link: float = math.inf  # bytes per second that a process sends
    latency: float = 0.0  # seconds of the shortest exchange


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step: all of it, the optimizer's share, and what forming the value of the loss adds."""

    step: float
    optimizer: float
    report: float


def calibrate(work: Workload, *, here: bool) -> Speed:
    """Time this machine at a workload, in the workload's processes (`here`), or as one device among others like it."""
    work = replace(work, teachers=())  # the same arithmetic
    if here and work.world_size > 1:
        run = RunConfig(device=work.config.run.device, threads=work.config.run.threads)
        try:
            found: Speed = in_processes(work.world_size, run, measure_speed, work)[0]
        except ProcessError as error:
            raise UserError(f"the calibration failed: {error}; plan from given figures, with --device-flops") from None
        return found
    with joined(work.config.run) as (group, device):
        return measure_speed(group, device, work)


def measure_speed(group: Group, device: torch.device, work: Workload) -> Speed:
    """Measure the speed of this process while all do the same. Every rank must call it."""
    alone = replace(work, world_size=group.world_size)
    fewest, most = table_sizes(work)
    config = calibration_config(work)

    def sample(num_rows: int, batch_size: int) -> Workload:
        settings = config.override({"batch_size": batch_size}, "calibration")
        return replace(alone, config=settings, num_entities=num_rows * group.world_size, num_queries=10**9)

    scored, encoded = min(work.num_scored, MOST_QUERIES), min(work.num_own, MOST_QUERIES)
    large, small = sample(most, scored), sample(fewest, scored)
    own = sample(fewest, encoded) if group.world_size < work.world_size else small  # a device encodes only its own
    works = [large, small] if own is small else [large, small, own]
    slow, fast, *others = time_steps(works, group, device)
    own_times = others[0] if others else fast
    growth = (slow.step - slow.optimizer) - (fast.step - fast.optimizer)
    floor = 0.05 * (slow.step - slow.optimizer)  # a growth that drowns in noise is not taken for infinite speed
    score = (score_flops(large) - score_flops(small)) / max(growth, floor)
    exchange = measure_exchange(group, device) if group.world_size > 1 else {}
    rest = own_times.step - own_times.optimizer - score_flops(own) / score
    rest -= exchange_seconds(own, Speed(encoder=1, score=1, memory=1, **exchange))
    return Speed(
        encoder=encoder_flops(own) / max(rest, 0.05 * own_times.step),
        score=score,
        memory=optimizer_traffic(large) / slow.optimizer,
        report=max(0.0, slow.report) / (large.num_rows * large.num_scored),
        **exchange,
    )


def exchange_seconds(work: Workload, speed: Speed) -> float:
    """Give the seconds that the exchanges of a step take."""
    return sum(bytes_sent(work).values()) / speed.link + num_messages(work) * speed.latency


def table_sizes(work: Workload) -> tuple[int, int]:
    """Choose the rows of a small and a larger shard, in which softmax treats scores as it will in the real one."""
    scored = min(work.num_scored, MOST_QUERIES)
    affordable = min(MOST_STATE / (4 * FLOAT * (work.dim + 1)), MOST_FLOPS / (8 * scored * work.dim))
    if work.config.train.loss not in SOFTMAXES or work.keeps_scores:
        most = max(2, min(work.num_rows, max(64, int(affordable))))  # two different sizes, of any graph
        return max(1, most // 4), most
    fewest = 2 * calibration_budget(work) // (FLOAT * scored)  # twice what is kept
    return fewest, max(4 * fewest, int(affordable))


def calibration_budget(work: Workload) -> int:
    """Give the smallest score buffer that is cut into the same blocks."""
    return work.score_budget if work.cuda else min(work.score_budget, CACHE_BYTES)


def calibration_config(work: Workload) -> Config:
    """Give the workload's settings; a smaller score buffer where scores are formed twice anyway.

    Without hearsay: it takes the encoder's and the link's speed, and a random graph of few facts has no neighbours.
    Without discounts, as without teachers.
    """
    config = work.config.override({"hearsay": 0.0, "settled_discount": 0.0}, "calibration")
    if config.train.loss not in SOFTMAXES or work.keeps_scores:
        return config
    return config.override({"score_memory": max(1, calibration_budget(work) // MIB)}, "calibration")


class Sample:
    """A learner over a random graph of some size, whose training steps are timed. Every rank must do the same."""

    def __init__(self, work: Workload, group: Group, device: torch.device) -> None:
        self.learner = Learner(work.config, work.num_entities, work.num_relations, group, device)
        batches = Batches(
            random_index(work, STEPS_PER_PLAN * work.config.train.batch_size),
            batch_size=work.config.train.batch_size,
            weigh_by_targets=work.config.train.loss != "kvsall",
            seed=0,
            sharding=self.learner.sharding,
            group=group,
            device=device,
        )
        self.seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        clock = Clock(device)
        self.learner.optimizer.register_step_pre_hook(lambda *_: clock.start())
        self.learner.optimizer.register_step_post_hook(lambda *_: self.optimizer_seconds.append(clock.stop()))
        began = time.perf_counter()
        self.planned = list(batches.epoch(0))
        self.planning = (time.perf_counter() - began) / len(self.planned)

    def step(self, *, report: bool = False) -> float:
        """Take one more step; give its seconds."""
        number = len(self.seconds) % len(self.planned)
        began = time.perf_counter()
        self.learner.step(self.planned[number], 0, number, 0.001, report=report)
        self.learner.gradient_norm().isfinite().item()  # as the trainer does; it also waits for a GPU
        self.seconds.append(time.perf_counter() - began)
        return self.seconds[-1]

    def times(self) -> StepTimes:
        """Give the medians of the steps taken after the first ones; takes one more."""
        plain = statistics.median(self.seconds[WARM_STEPS:])
        return StepTimes(
            step=self.planning + plain,
            optimizer=statistics.median(self.optimizer_seconds[WARM_STEPS:]),
            report=self.step(report=True) - plain,
        )


def time_steps(works: list[Workload], group: Group, device: torch.device) -> list[StepTimes]:
    """Time training steps of these sizes, in turns, so that all meet the same machine. Every rank must call it."""
    samples = [Sample(work, group, device) for work in works]
    for _ in range(WARM_STEPS):
        for sample in samples:
            sample.step()
    rounds, spent = 0, 0.0
    # All ranks take the same number of steps: rank 0 says when they are enough.
    while rounds < FEWEST_STEPS or group.share(spent < ENOUGH_SECONDS and rounds < MOST_STEPS):
        spent += sum(sample.step() for sample in samples)
        rounds += 1
    return [sample.times() for sample in samples]


class Clock:
    """Measures a part of a step; waits for a GPU at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def start(self) -> None:
        self._wait()
        self._started = time.perf_counter()

    def stop(self) -> float:
        self._wait()
        return time.perf_counter() - self._started


def random_index(work: Workload, num_queries: int) -> QueryIndex:
    """Draw queries with as many targets as the workload's have on average, over its entities."""
    rng = np.random.default_rng(0)
    num_targets = max(1, min(round(work.targets_per_query), MOST_TARGETS, work.num_entities))
    queries = rng.integers(work.num_entities * 2 * work.num_relations, size=num_queries)
    first = rng.integers(work.num_entities, size=(num_queries, 1))
    targets = (first + np.arange(num_targets) * (work.num_entities // num_targets)) % work.num_entities
    return QueryIndex(
        queries=np.sort(queries),
        offsets=np.arange(num_queries + 1) * num_targets,
        targets=targets.astype(np.int32).ravel(),
        num_relations_both=2 * work.num_relations,
    )


def measure_exchange(group: Group, device: torch.device) -> dict[str, float]:
    """Measure the shortest exchange and the bytes per second of a long one. Every rank must call it."""

    def seconds(x: torch.Tensor, times: int) -> float:
        group.all_gather(x, "calibration")
        group.barrier()
        started = time.perf_counter()
        for _ in range(times):
            group.all_gather(x, "calibration").sum().item()
        return (time.perf_counter() - started) / times

    latency = seconds(torch.zeros(1, device=device), 50)
    x = torch.zeros(4 * MIB // FLOAT // group.world_size, device=device)
    sent = (group.world_size - 1) * x.numel() * FLOAT
    return {"latency": latency, "link": sent / max(seconds(x, 5) - latency, 1e-6)}
