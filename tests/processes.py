"""Run a function in several real gloo processes, one thread each, with a bounded wait.

The processes of a world size are started once and kept, with their group, for later calls: importing torch and meeting
takes longer than most tests. After a failure they are killed, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
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
    if world_size not in _running:
        _running[world_size] = Processes(world_size)
    try:
        return _running[world_size].call(function, args, timeout)
    except BaseException:
        stop_all()
        raise


class Processes:
    """Processes that have met in one group and wait for functions to call."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, world_size, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while waiting := [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer within {timeout} s; {len(results)} of {len(self.pipes)} ranks have answered"
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = self.pipes[rank].recv()
                assert ok, f"rank {rank} of {len(self.pipes)} failed:\n{value}"
                results[rank] = pickle.loads(value)
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


_running: dict[int, Processes] = {}


@atexit.register
def stop_all() -> None:
    """Kill the processes of all world sizes."""
    while _running:
        _running.popitem()[1].kill()


def _serve(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests are over
            os._exit(0)  # without taking the group apart: see runtime.end_process
        try:
            value = function(Group(), *args)
            dist.barrier()
            pipe.send((True, pickle.dumps(value)))  # by value: a shared tensor would die with this process
        except BaseException:
            pipe.send((False, traceback.format_exc()))
