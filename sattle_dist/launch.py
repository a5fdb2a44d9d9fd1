"""Starting the processes of a run on this machine, with torch's own elastic launcher, and saying how they ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sattle_dist.progress import show
from sattle_dist.runtime import (
    EXIT_DIVERGED,
    EXIT_LOST_PEER,
    LAUNCHER_PID,
    WHEREABOUTS,
    Whereabouts,
    end_with_parent,
    under_launcher,
)
from sattle_dist.stopping import SAME_SIGNAL, STOP_SIGNALS, handling

EXIT_FAILED = 1
EXIT_USAGE = 2
WHY_KILLED: dict[int, str] = {
    signal.SIGKILL: " (the system does so when memory runs out)",
    signal.SIGABRT: " (torch does so where NCCL fails or is waited for longer than --timeout; its own lines say which)",
}
SHUTDOWN_SECONDS = 5  # for a process that is told to end; then it is killed


@dataclass(frozen=True)
class Restarts:
    """How often failed processes are started again, and what is said of where they go on."""

    most: int = 0
    where: Callable[[], str] = lambda: "from the beginning"


NO_RESTARTS = Restarts()


def run_workers(
    arguments: list[str],
    nproc: int,
    *,
    at_first: str,
    hint: str = "",
    saves: bool = False,
    only_first: Sequence[str] = (),
    restarts: Restarts = NO_RESTARTS,
) -> int:
    """Run `sattle ARGUMENTS` in nproc processes and wait for them; return the exit code to end with.

    Where they do not end well, `at_first` says where a process was that had noted no step, and `hint` how to go on.
    `saves` says that they save when asked to stop. `only_first` are more arguments, which processes that are started
    again do not get.
    """
    if under_launcher():
        end_with_parent()
    leave_torchrun()
    silence_torch()
    hint = f"; {hint}" if hint else ""
    with (
        tempfile.TemporaryDirectory(prefix="sattle_") as folder,
        environment({LAUNCHER_PID: str(os.getpid()), WHEREABOUTS: f"{folder}/whereabouts"}),
        Shepherd(saves=saves).watching() as shepherd,
    ):
        whereabouts = Whereabouts(Path(folder) / "whereabouts", at_first)
        for attempt in range(restarts.most + 1):
            whereabouts.path.write_bytes(b"")
            more = only_first if attempt == 0 else ()
            failures = run_once([*arguments, *more], nproc, folder)
            if not failures:
                return 0
            if shepherd.stopped_by:
                show(f"\nstopped by {shepherd.stopped_by.name}; all processes have ended{hint}", err=True)
                return 128 + shepherd.stopped_by
            code, message = explain(failures, whereabouts)
            if code != EXIT_FAILED or attempt == restarts.most:
                if message:
                    show(f"error: {message}{hint}", err=True)
                return code
            cause = f"error: {message}; " if message else ""
            again = f"restart {attempt + 1} of {restarts.most}: all {nproc} processes begin again"
            show(f"{cause}{again} {restarts.where()}", err=True)
    raise AssertionError("unreachable")


def run_once(arguments: list[str], nproc: int, folder: str) -> Mapping[int, ProcessFailure]:
    """Run the processes under torch's elastic agent until they end; give those that failed, by rank.

    Starting again is left to the caller: the agent would do it after a wrong setting too, and without a word.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # the machine's own name need not be one that can be looked up
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle="SIGQUIT",  # the others are the shepherd's
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sattle_dist.cli", *arguments)
    except ChildFailedError as failed:
        return failed.failures
    return {}


class Shepherd:
    """Passes signals on to the workers: the first asks them to save and stop, the second ends them at once.

    Workers are asked by SIGTERM, and ended by SIGINT, which ends them wherever they are.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.stopped_by: signal.Signals | None = None
        self._since = 0.0
        self._workers: PContext | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[Shepherd]:
        """Take over the signals, and torch's way to end workers, while it runs them."""
        start, close = PContext.start, PContext.close

        def start_and_remember(context: PContext) -> None:
            self._workers = context
            start(context)
            if self.stopped_by:  # while they were being started
                self._tell(signal.SIGINT)

        def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            # torch waits 30 s for a worker after the failure of another, whatever its shutdown_timeout says.
            close(context, signal.SIGINT, min(timeout, SHUTDOWN_SECONDS))

        PContext.start, PContext.close = start_and_remember, close_soon  # type: ignore[assignment]
        try:
            with handling(self._pass_on):
                yield self
        finally:
            PContext.start, PContext.close = start, close  # type: ignore[method-assign]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by, self._since = signal.Signals(number), time.monotonic()
            if self.saves:
                with contextlib.suppress(OSError):  # a terminal that has closed
                    os.write(2, b"\nsaving, then stopping; a second signal stops at once\n")
            self._tell(signal.SIGTERM)
        elif time.monotonic() - self._since > SAME_SIGNAL:
            self._tell(signal.SIGINT)

    def _tell(self, number: signal.Signals) -> None:
        if self._workers is not None:
            for pid in self._workers.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def explain(failures: Mapping[int, ProcessFailure], whereabouts: Whereabouts) -> tuple[int, str]:
    """Give the exit code and the line for workers that failed; no line where a worker has said it itself.

    One process is the cause. The others were ended by the launcher (SIGINT), or lost the cause as their peer.
    """
    first = min(failure.timestamp for failure in failures.values())

    def hung(failure: ProcessFailure) -> bool:  # told to end, did not, and was killed in the end
        return failure.exitcode == -signal.SIGKILL and failure.timestamp - first >= SHUTDOWN_SECONDS - 1

    def order(failure: ProcessFailure) -> int:
        if failure.exitcode in (-signal.SIGINT, EXIT_LOST_PEER) or hung(failure):
            return {-signal.SIGINT: 2, EXIT_LOST_PEER: 3}.get(failure.exitcode, 4)
        return 0 if failure.exitcode == EXIT_USAGE else 1

    rank, cause = min(failures.items(), key=lambda item: order(item[1]))
    if cause.exitcode in (EXIT_USAGE, EXIT_DIVERGED) or cause.exitcode - 128 in STOP_SIGNALS:
        return cause.exitcode, ""  # it has said so itself
    if stuck := [(rank, failure) for rank, failure in failures.items() if hung(failure)]:
        rank, cause = stuck[0]
        where = whereabouts.describe(cause.local_rank)
        return EXIT_FAILED, f"the process of rank {rank} hung {where} and was killed"
    if cause.exitcode < 0:
        where = whereabouts.describe(cause.local_rank)
        why, name = WHY_KILLED.get(-cause.exitcode, ""), cause.signal_name()
        return EXIT_FAILED, f"the process of rank {rank} was killed by {name} {where}{why}; the others were stopped"
    if cause.exitcode == EXIT_LOST_PEER:
        return EXIT_FAILED, f"the process of rank {rank} lost the others {whereabouts.describe(cause.local_rank)}"
    return EXIT_FAILED, ""


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes started meanwhile; this one may go on to other work."""
    os.environ |= values
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def silence_torch() -> None:
    """Keep torch's launcher from logging what we say in one line ourselves."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def leave_torchrun() -> None:
    """Forget the torchrun that started this process: its variables describe a group that the workers must not join."""
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_") or name in _TORCHRUN_NAMES:
            del os.environ[name]


_TORCHRUN_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
}
