"""Run a function in several processes of this machine that join one group, and give what it returns."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from sattle_dist.config import RunConfig
from sattle_dist.runtime import joined


class ProcessError(RuntimeError):
    """A process ended before it gave its result."""


def in_processes(world_size: int, run: RunConfig, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(group, device, *args) on every rank; give the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(rank, world_size, port, run, results, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < world_size:
        if not results.empty():
            rank, value = results.get()
            found[rank] = value
        elif dead := [process.exitcode for process in processes if process.exitcode]:
            for process in processes:
                process.kill()
            raise ProcessError(f"a process of {world_size} ended with exit code {dead[0]}")
        time.sleep(0.02)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(world_size)]


def _process(
    rank: int,
    world_size: int,
    port: int,
    run: RunConfig,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(run) as (group, device):
        value = function(group, device, *args)
        group.barrier()
        results.put((rank, value))
        os._exit(0)  # see runtime.end_process
