"""What a run will need, before it is paid for: memory, traffic, time, and how many devices it takes.

`make_plan` puts the counts of costs.py, the memory there is and a speed together, measured by calibrate.py or given.
docs/scaling.md explains the model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from sattle_dist import costs
from sattle_dist.calibrate import Speed, exchange_seconds
from sattle_dist.costs import Workload
from sattle_dist.memory import Devices, fits, memory_peaks, remedies, smallest_number
from sattle_dist.trainer import REPORT_EVERY
from sattle_dist.units import DAY, size_text

IMPRACTICAL_DAYS = 1.0  # an epoch longer than this is called impractical
SHARE_OF_PEAK = 0.5  # of a device's FLOP/s, reached by the step's products: an assumption wherever peaks are given
BYTES_PER_FLOP = 0.1  # of memory bandwidth, where a device's FLOP/s alone are given: an assumption
DEFAULT_LINK = 12.5e9  # bytes per second and device, a 100 Gbit/s network: an assumption
DEFAULT_LATENCY = 20e-6  # seconds, likewise


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer, in plain numbers: bytes, seconds, operations."""

    work: Workload
    devices: Devices
    parts: dict[str, int]
    """Bytes of one process in a training step, by part."""
    peaks: dict[str, int]
    """Bytes of one process when it trains, evaluates and saves."""
    host: int
    """Bytes of host memory of one process, where it computes on a GPU."""
    sent: dict[str, float]
    """Bytes one process sends in a step, by kind."""
    step: dict[str, float]
    """Seconds of a step, by part."""
    smallest: int | None
    """The smallest number of devices of this memory that fits; None where none does."""
    warnings: list[str]
    assumptions: list[str]

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        return fits(self.work, self.devices)

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @property
    def epoch_seconds(self) -> float:
        return self.step_seconds * self.work.num_steps

    @property
    def epoch_flops(self) -> float:
        """Operations of an epoch, over all processes."""
        per_process = costs.encoder_flops(self.work) + costs.score_flops(self.work)
        return per_process * self.work.world_size * self.work.num_steps

    def as_dict(self) -> dict[str, Any]:
        """Give the plan for machines."""
        work, config = self.work, self.work.config
        return {
            "workload": {
                "entities": work.num_entities,
                "relations": work.num_relations,
                "triples": work.num_triples,
                "queries": work.num_queries,
                "devices": work.world_size,
                "loss": config.train.loss,
                "batch_size": config.train.batch_size,
                **dataclasses.asdict(config.model),
            },
            "parameters": dict(zip(("nfp", "efp"), work.parameters, strict=True)),
            "memory": {"parts": self.parts, "peaks": self.peaks, "peak": self.peak, "host": self.host},
            "device_memory": self.devices.memory,
            "device_memory_shared": self.devices.shared,
            "fits": self.fits,
            "smallest_devices": self.smallest,
            "disk": {
                "checkpoint": costs.checkpoint_bytes(work),
                "checkpoints": costs.num_checkpoints(work) * costs.checkpoint_bytes(work),
                "index": costs.index_bytes(work.num_queries, work.num_triples),
            },
            "bytes_sent_per_step": {**self.sent, "total": sum(self.sent.values())},
            "flops_per_epoch": self.epoch_flops,
            "steps_per_epoch": work.num_steps,
            "step_seconds": {**self.step, "total": self.step_seconds},
            "epoch_seconds": self.epoch_seconds,
            "warnings": self.warnings,
            "assumptions": self.assumptions,
        }


def make_plan(work: Workload, devices: Devices, speed: Speed, assumptions: list[str]) -> Plan:
    """Put counts and speed together."""
    step = step_seconds(work, speed)
    plan = Plan(
        work=work,
        devices=devices,
        parts=costs.memory_parts(work),
        peaks=memory_peaks(work),
        host=costs.PROCESS + costs.saving_bytes(work) if work.cuda else 0,
        sent=costs.bytes_sent(work),
        step=step,
        smallest=smallest_number(work, devices.memory),
        warnings=[],
        assumptions=assumptions,
    )
    return replace(plan, warnings=find_warnings(plan))


def step_seconds(work: Workload, speed: Speed) -> dict[str, float]:
    """Predict the seconds of a step, by part."""
    report = speed.report * work.num_rows * work.num_scored / REPORT_EVERY
    return {
        "encoder and decoder": costs.encoder_flops(work) / speed.encoder,
        "scoring": costs.score_flops(work) / speed.score + costs.score_traffic(work) / speed.uncached,
        f"value of the loss, every {REPORT_EVERY}th step": report,
        "optimizer": costs.optimizer_traffic(work) / speed.memory,
        "exchange": exchange_seconds(work, speed),
    }


def given_speed(
    flops: float, memory_bandwidth: float = 0, link: float = 0, *, cuda: bool = True
) -> tuple[Speed, list[str]]:
    """Turn a device's figures (0: not given) into a speed, and say what was assumed."""
    assumptions = [f"the products reach {SHARE_OF_PEAK:.0%} of the given {flops:.3g} FLOP/s"]
    if not memory_bandwidth:
        memory_bandwidth = BYTES_PER_FLOP * flops
        assumptions.append(f"memory moves {memory_bandwidth:.3g} bytes/s ({BYTES_PER_FLOP} per FLOP)")
    assumptions.append(f"an exchange waits {DEFAULT_LATENCY * 1e6:.0f} microseconds")
    rate = SHARE_OF_PEAK * flops
    speed = Speed(
        encoder=rate,
        score=rate,
        memory=memory_bandwidth,
        uncached=memory_bandwidth if cuda else math.inf,  # a CPU's blocks of scores stay in its caches
        link=link or DEFAULT_LINK,
        latency=DEFAULT_LATENCY,
    )
    return speed, assumptions


def find_warnings(plan: Plan) -> list[str]:
    """Say what stands against this run, with the criterion and the remedy."""
    warnings, days = [], plan.epoch_seconds / DAY
    if not plan.fits:
        more = f"{plan.smallest:,} devices of this memory, one process each" if plan.smallest else ""
        remedy = remedies(plan.work, lambda work: fits(work, plan.devices), more)
        warnings.append(f"it does not fit into {size_text(plan.devices.memory)}; {remedy}")
    if days > IMPRACTICAL_DAYS:
        warnings.append(
            f"exact 1-N is impractical here: an epoch would take {days:,.1f} days, more than {IMPRACTICAL_DAYS:g}; "
            "every query is scored against every entity, so use more or faster devices, or a smaller --dim"
        )
    if plan.step["exchange"] > plan.step_seconds / 2:
        warnings.append(
            f"the exchange takes {plan.step['exchange'] / plan.step_seconds:.0%} of a step, more than half: "
            "use a larger --batch-size, fewer devices, or a faster network"
        )
    return warnings
