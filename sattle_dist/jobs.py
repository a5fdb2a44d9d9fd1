"""Being one of the processes of a command, or starting them: what training and every other command share.

An error that a user can cause or mend is one line and an exit code, whichever process meets it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, RunConfig, StoppedError, UserError
from sattle_dist.launch import EXIT_FAILED, run_workers
from sattle_dist.runtime import (
    EXIT_LOST_PEER,
    Place,
    Whereabouts,
    choose_device,
    end_with_parent,
    ending_on_signals,
    joined,
    place_in_words,
    under_launcher,
)

LOST_PEER = (
    "Connection refused",
    "Connection reset",
    "Connection closed",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
)
Work = Callable[[Group, torch.device], None]


def run_job(
    arguments: list[str], nproc: int, device: str, work: Work, *, threads: int = 0, timeout: float = 10.0
) -> int:
    """Do the work of `sattle ARGUMENTS` in nproc processes (0: one per GPU, else one); return the exit code.

    Where this process is alone and more are wanted, it starts them with these arguments, and each comes here again.
    Otherwise it joins the others, which under torchrun are torchrun's, and calls work(group, device).

        @click.command()
        @job_options  # commands.options: --nproc, --device, --threads, --timeout
        @one_line_errors
        def count(nproc: int, device: str, threads: int, timeout: float) -> None:
            end_process(run_job(given_arguments(), nproc, device, work, threads=threads, timeout=timeout))
    """
    name = arguments[0]
    asked = {"nproc": nproc, "device": device, "threads": threads, "timeout": timeout}
    run = Config().override(asked, "command line").run  # within their bounds
    with ending_on_signals():
        place = Place.from_environment()
        nproc = number_of_processes(nproc, device, place)
        choose_device(device, replace(place, local_world_size=nproc))  # refuses more than there are GPUs
        at_first = f"during `sattle {name}`"
        if place.world_size == 1 and nproc > 1:
            return run_workers(arguments, nproc, at_first=at_first)
        return work_as_one(run, work, Steps(at_first), "share the table among more processes (--nproc)")


def number_of_processes(wanted: int, device: str, place: Place) -> int:
    """Count the processes of this machine: torchrun's where it started several, else as wanted, else one per GPU."""
    if place.world_size > 1:
        if wanted not in (0, place.local_world_size):
            raise ConfigError(
                f"--nproc {wanted} contradicts torchrun, which started {place.local_world_size} processes on this "
                f"machine; leave --nproc away, or start with `torchrun --nproc-per-node {wanted}`"
            )
        return place.local_world_size
    # A driver that is too old for torch still counts its GPUs.
    num_gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return wanted or max(1, num_gpus)


class Steps:
    """Where in its work this process is: for its own messages, and noted for the launcher's."""

    def __init__(self, at_first: str) -> None:
        self.text = at_first
        whereabouts = Whereabouts.from_environment()
        self._tell = whereabouts.writer(Place.from_environment().local_rank) if whereabouts else None

    def note(self, epoch: int, step: int) -> None:
        """Note that this step begins, both counted from 0; step -1 is the evaluation of an epoch."""
        self.text = place_in_words(epoch + 1, step + 1)
        if self._tell:
            self._tell(epoch, step)


def work_as_one(run: RunConfig, work: Work, steps: Steps, more_memory: str) -> int:
    """Join the others and do this process's part of the work; return the exit code.

    `more_memory` is the advice to a user whose machine has run out of it.
    """
    if under_launcher():
        end_with_parent()
    try:
        with joined(run) as (group, device):
            work(group, device)
            group.barrier()  # nobody leaves while another still needs it
    except Exception as error:
        if isinstance(error, (StoppedError, UserError)):  # said in one line, which the command shows as such
            raise
        if reason := lack_of_resources(error, more_memory):
            raise StoppedError(f"stopped {steps.text}: {reason}") from None
        if Place.from_environment().world_size == 1:
            raise
        return explain(error, steps, run.timeout)
    return 0


def lack_of_resources(error: Exception, more_memory: str) -> str:
    """Give the reason in words where the machine has run out of something: memory, disk, a reader of the output."""
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in str(error)
        for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # CPU, CUDA, cuBLAS
    )
    if out_of_memory:
        return f"out of memory; {more_memory}"
    return str(error) if isinstance(error, OSError) else ""


def explain(error: Exception, steps: Steps, timeout: float) -> int:
    """Say what stopped this one of several processes; return its exit code.

    A peer that died or hung shows up as a failed exchange; what NCCL says of its set-up is for the user to read; the
    rest are defects, and show their traceback. It ends here in any case, because a worker must not take its process
    group apart (see end_process).
    """
    rank, text = Place.from_environment().rank, str(error)
    lost = any(words in text for words in LOST_PEER)
    if not lost and any(word in text for word in ("Timed out", "timed out", "timeout")):
        waited = f"it waited {timeout:g} minutes (--timeout) for a process that died or hung"
        print(f"error: rank {rank} gave up {steps.text}: {waited}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    of_backend = isinstance(error, dist.DistBackendError) and "gloo" not in text
    if lost or "gloo" in text or (isinstance(error, dist.DistError) and not of_backend):
        if Whereabouts.from_environment() is None:  # else our own launcher sees the death itself, and says whose it was
            reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", text.splitlines()[0])  # gloo's file and advice
            print(f"error: rank {rank} lost another process {steps.text}: {reason}", file=sys.stderr, flush=True)
        return EXIT_LOST_PEER
    print(f"error: rank {rank} failed {steps.text}:", file=sys.stderr)
    if of_backend:
        print(text, file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    return EXIT_FAILED
