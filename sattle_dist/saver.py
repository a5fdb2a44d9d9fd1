"""Saving while training goes on: a copy in host memory, written by a thread of each rank.

Training waits for the copy alone. The threads agree through a process group of their own, so they never meet the
exchanges of a step; a checkpoint appears under its name when all ranks have written it, or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from sattle_dist import checkpoint
from sattle_dist.learner import Learner
from sattle_dist.storage import CheckedWriter


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank makes one and calls each method at the same step."""

    def __init__(self, learner: Learner, run_dir: Path, *, keep: int, background: bool, timeout: float) -> None:
        self.learner, self.run_dir, self.keep = learner, run_dir, keep
        self.background = background
        self.num_saved = 0
        self.stalled = 0.0  # seconds that training waited
        self.seconds = 0.0  # seconds from the beginning of a save to its end
        self._copies: dict[str, Tensor] = {}  # kept, as new memory costs more time than the copy into it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[str] | None = None
        self._told = True  # of what went wrong with the last save
        self._last_times: dict[str, float] = {}
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout))

    def start(self, facts: dict[str, Any]) -> str:
        """Begin to write the state, with facts beside it; give what went wrong with the save before, or with this one
        where training waits for it.
        """
        self.wait()
        problem, began = self.problem(), time.monotonic()
        tensors = checkpoint.local_tensors(self.learner, with_optimizer=True)
        if self.background:
            tensors = self._copy(tensors)
        state = checkpoint.as_state(tensors, self.learner.sharding.num_entities, self.learner.group.world_size)
        name = checkpoint.name_of(facts["epoch"], facts["step"])
        writer = CheckedWriter(self.run_dir / "checkpoints" / name, facts)
        self._running = self._thread.submit(self._write, state, writer, began)
        self._told = False
        self.stalled += time.monotonic() - began
        return problem if self.background or not self.wait() else self.problem()

    def wait(self) -> str:
        """Wait for the save under way; give what went wrong with the last one, the same on every rank, or nothing."""
        if not self._running:
            return ""
        began = time.monotonic()
        problem = self._running.result()
        self.stalled += time.monotonic() - began
        return problem

    def problem(self) -> str:
        """Give, once, what went wrong with the last save, if it has ended; wait for nothing."""
        if self._told or not self._running or not self._running.done():
            return ""
        self._told = True
        return self._running.result()

    def times(self) -> dict[str, float]:
        """Give the seconds spent saving since this was last asked: in all, and those that training waited."""
        now = {"save_seconds": self.seconds, "save_stall_seconds": self.stalled}
        passed = {name: round(value - self._last_times.get(name, 0.0), 3) for name, value in now.items()}
        self._last_times = now
        return passed

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor, device="cpu")
            self._copies[name].copy_(tensor)
        return dict(self._copies)

    def _write(self, state: dict[str, Tensor], writer: CheckedWriter, began: float) -> str:
        """Write a checkpoint and remove old ones; give what went wrong with the files.

        A lost process is no such thing: that error stays in the future, for the thread that trains.
        """
        try:
            save_distributed(state, storage_writer=writer, process_group=self._group)
        except (CheckpointException, OSError) as error:
            if self.learner.group.rank == 0:
                shutil.rmtree(writer.partial, ignore_errors=True)
            return f"{writer.final.name} could not be written: {checkpoint.reason_of(error)}"
        finally:
            self.seconds += time.monotonic() - began
        self.num_saved += 1
        if self.learner.group.rank == 0:
            with contextlib.suppress(OSError):  # what is left over is removed the next time
                checkpoint.tidy(self.run_dir, self.keep, writer.facts["history"])
        return ""
