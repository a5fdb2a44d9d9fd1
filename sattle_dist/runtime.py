"""Joining a run as one of its processes: device, threads, process group, and leaving it in an orderly way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, RunConfig

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which process of how many this is, as torchrun says in the environment; alone where it says nothing."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        names = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
        return cls(**{name: int(os.environ.get(name.upper(), default)) for name, default in names.items()})


def num_cores() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str, place: Place) -> torch.device:
    """Turn auto, cpu or cuda into this process's device: one GPU per process."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus < place.local_world_size:
        raise ConfigError(
            f"--device {name}: {place.local_world_size} processes on this machine need a GPU each, it has {num_gpus}; "
            f"use --device cpu, or {max(1, num_gpus)} processes"
        )
    return torch.device("cuda", place.local_rank)


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[tuple[Group, torch.device]]:
    """Join the process group of this run, and leave it at the end. Every rank must call it."""
    place = Place.from_environment()
    device = choose_device(config.device, place)
    torch.set_num_threads(config.threads or max(1, num_cores() // place.local_world_size))
    # Sums in a fixed order on a GPU too: a run is a function of its seed.
    torch.use_deterministic_algorithms(device.type == "cuda")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(minutes=config.timeout),
        store=dist.HashStore() if place.world_size == 1 else None,
        rank=place.rank,
        world_size=place.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Group(), device
    finally:
        if place.world_size == 1:  # a worker ends with its process, see end_process
            dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """End this process with an exit code; a worker ends at once.

    Taking a gloo group apart can wait forever in a worker: its thread wants the interpreter lock to free a tensor while
    the interpreter, holding the lock, waits for the thread. Everything is on disk by now, so nothing is taken apart.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if Place.from_environment().world_size > 1:
        os._exit(code)
    sys.exit(code)


def require_same_everywhere(config: Config, graph_checksum: str, group: Group) -> None:
    """Raise ConfigError, on every rank, where ranks were started with different settings or graphs."""
    mine = {"graph checksum": graph_checksum}
    for section in ("model", "train", "eval"):
        mine |= dataclasses.asdict(getattr(config, section))
    everyone = group.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name} differs between processes: {value!r} on rank 0, {theirs[name]!r} on rank {rank}; "
                    "start every process with the same settings"
                )


def end_with_parent() -> None:
    """End this process when the launcher that started it is gone, so that none is left over after a kill -9."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()
