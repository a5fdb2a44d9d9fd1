"""Joining a run as one of its processes: device, threads, process group, and leaving it in an orderly way."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from sattle_dist import __version__
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, RunConfig, recipe_names
from sattle_dist.stopping import handling

EXIT_INTERRUPTED = 130
EXIT_DIVERGED = 4  # a gradient was not finite: it would be again
EXIT_LOST_PEER = 3  # of a worker whose peer is gone: never the cause, which its launcher tells
LAUNCHER_PID = "SATTLE_LAUNCHER_PID"
WHEREABOUTS = "SATTLE_WHEREABOUTS"


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
    if num_gpus == 0:
        raise ConfigError(f"--device {name}: torch finds no GPU on this machine; use --device cpu")
    if num_gpus < place.local_world_size:
        raise ConfigError(
            f"--device {name}: {place.local_world_size} processes need a GPU each, this machine has {num_gpus}; "
            f"use --nproc {num_gpus}, or --device cpu"
        )
    return torch.device("cuda", place.local_rank)


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[tuple[Group, torch.device]]:
    """Join the process group of this run, and leave it at the end. Every rank must call it."""
    place = Place.from_environment()
    device = choose_device(config.device, place)
    torch.set_num_threads(config.threads or max(1, num_cores() // place.local_world_size))
    if device.type == "cpu":
        keep_to_own_cores(place, torch.get_num_threads())
    before = arithmetic()
    set_arithmetic(deterministic=device.type == "cuda", matmul="highest", bf16_sums=False)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(minutes=config.timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        store=meeting_place(place, timeout),
        rank=place.rank,
        world_size=place.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Group(), device
    finally:
        set_arithmetic(**before)
        if place.world_size == 1:  # a worker ends with its process, see end_process
            dist.destroy_process_group()


def arithmetic() -> dict[str, Any]:
    """Say how torch is set to compute, in the words of `set_arithmetic`."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "bf16_sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }


def set_arithmetic(*, deterministic: bool, matmul: str, bf16_sums: bool) -> None:
    """Set whether torch sums in a fixed order, multiplies float32 as such, and sums products of bfloat16 in that.

    A run is a function of its seed, whatever the environment or the program around it has chosen: some images of
    systems turn float32 into TF32 by a variable.
    """
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bf16_sums


def keep_to_own_cores(place: Place, num_threads: int) -> None:
    """Keep to an own share of the cores where the processes of this machine use all of them.

    A thread that waits for a message is then woken on the core where it is awaited, and not behind the arithmetic of
    another process: that costs milliseconds, several times a step. Where cores are left over, the system places best.
    """
    if place.local_world_size == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores, count = sorted(os.sched_getaffinity(0)), place.local_world_size
    if len(cores) // count == num_threads:
        start, stop = (len(cores) * rank // count for rank in (place.local_rank, place.local_rank + 1))
        os.sched_setaffinity(0, cores[start:stop])


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers for the next step instead of giving them back to the system.

    A step frees and allocates the same tens of megabytes as the one before; fresh pages cost as much time as the
    arithmetic done on them.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # as in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        library = ctypes.CDLL(None)
        library.mallopt(m_mmap_threshold, 32 << 20)  # the most it takes
        library.mallopt(m_trim_threshold, 2**31 - 1)


def meeting_place(place: Place, timeout: timedelta) -> Store:
    """Give the store in which the processes find each other."""
    if place.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    store: Store = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    # Processes that torchrun has started again must not find the addresses of those before them.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code; a worker ends at once.

    Taking a gloo group apart can wait forever in a worker: its thread wants the interpreter lock to free a tensor while
    the interpreter, holding the lock, waits for the thread. Everything is on disk by now, so nothing is taken apart.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started this
            let_go(stream)
    if Place.from_environment().world_size > 1:
        os._exit(code)
    sys.exit(code)


def let_go(stream: TextIO) -> None:
    """Write out what a stream holds; where that cannot be, drop it, so that the end of Python does not try again."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):  # tests have streams that are no files
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def require_same_everywhere(config: Config, graph_checksum: str, group: Group) -> None:
    """Raise ConfigError, on every rank, where ranks were started with different settings or graphs."""
    mine: dict[str, Any] = {"version": f"{__version__}, torch {torch.__version__}", "graph checksum": graph_checksum}
    for section in ("model", "train", "eval"):
        mine |= dataclasses.asdict(getattr(config, section))
    # Of the settings that change no number, those that change which exchanges are made.
    names = ("precision", "save_every", "saving", "score_memory", "resume")
    mine |= {name: getattr(config.run, name) for name in names}
    # A path may differ between machines, a recipe's name may not.
    recipes = recipe_names()
    for name in ("grow_from", "teacher"):
        runs = [run.strip() for run in getattr(config.run, name).split(",") if run]
        mine[name] = ", ".join(run if run in recipes else "a run" for run in runs)
    everyone = group.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} differs between processes: {value!r} on rank 0, {theirs.get(name)!r} on rank {rank}; "
                    "start every process with the same settings"
                )


def under_launcher() -> bool:
    """Tell whether torchrun, or our own launcher, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """End this process when the launcher that started it is gone, so that none is left over after a kill -9."""
    # Given by the launcher where it is ours: it may be gone before this line is reached.
    parent = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it; it ends a stopped process too
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let the signals that ask for the end have it at once, with a line and the exit code 128 + signal.

    At once, because there is nothing to tidy up; training saves first (stopping.py). A worker says nothing: its
    launcher, which passed the signal on, does.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):  # a terminal that has closed
            os.write(2, f"\nstopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    with handling(signal.SIG_DFL if Place.from_environment().world_size > 1 else stop):
        yield


def place_in_words(epoch: int, step: int) -> str:
    """Say where a process was, both counted from 1; step 0 is the evaluation of the epoch."""
    return f"in epoch {epoch}, step {step}" if step else f"in the evaluation after epoch {epoch}"


class Whereabouts:
    """The epoch and step that each process of this machine is in, in a small file.

    The launcher makes the file, every process writes its own place in it as it goes, and when a process was killed the
    launcher can say where.
    """

    _place = struct.Struct("=qq")

    def __init__(self, path: Path, at_first: str = "before the first step") -> None:
        self.path, self.at_first = path, at_first

    @classmethod
    def from_environment(cls) -> Whereabouts | None:
        return cls(Path(os.environ[WHEREABOUTS])) if WHEREABOUTS in os.environ else None

    def writer(self, local_rank: int) -> Callable[[int, int], None]:
        """Give the function that notes (epoch, step), both counted from 0."""
        file = os.open(self.path, os.O_WRONLY)

        def note(epoch: int, step: int) -> None:
            os.pwrite(file, self._place.pack(epoch + 1, step + 1), local_rank * self._place.size)

        return note

    def describe(self, local_rank: int) -> str:
        """Say in words where the process of this local rank was last seen."""
        size = self._place.size
        noted = self.path.read_bytes()[local_rank * size :][:size]
        epoch, step = self._place.unpack(noted) if len(noted) == size else (0, 0)
        return place_in_words(epoch, step) if epoch else self.at_first
