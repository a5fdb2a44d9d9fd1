"""Run a function in several real gloo processes, one thread each, with a bounded wait."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sattle_dist.collectives import Group

TIMEOUT = 60.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "tests.processes"])


def run_processes(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call function(group, *args) on every rank; give the results by rank, or raise with a rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        queue = _context.Queue()
        processes = [
            _context.Process(target=_worker, args=(rank, world_size, folder, queue, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(results) < world_size:
                rank, ok, value = queue.get(timeout=max(0.1, deadline - time.monotonic()))
                if not ok:
                    raise AssertionError(f"rank {rank} of {world_size} failed:\n{value}")
                results[rank] = pickle.loads(value)
            for process in processes:
                process.join(timeout)
        finally:
            for process in processes:
                process.kill()
        return [results[rank] for rank in range(world_size)]


def _worker(
    rank: int, world_size: int, folder: str, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        value = function(Group(), *args)
        dist.barrier()
        queue.put((rank, True, pickle.dumps(value)))  # by value: a shared tensor would die with this process
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # without taking the group apart: see runtime.end_process
