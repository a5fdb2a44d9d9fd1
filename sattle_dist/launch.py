"""Starting the processes of a run on this machine, with torch's own elastic launcher, and saying how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sattle_dist.runtime import (
    EXIT_LOST_PEER,
    LAUNCHER_PID,
    WHEREABOUTS,
    Whereabouts,
    end_with_parent,
    under_launcher,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
SHUTDOWN_SECONDS = 5  # for a process that is told to end; then it is killed


def run_workers(arguments: list[str], nproc: int, *, at_first: str, hint: str = "") -> int:
    """Run `sattle ARGUMENTS` in nproc processes and wait for them; return the exit code to end with.

    Where they do not end well, `at_first` says where a process was that had noted no step, and `hint` how to go on.
    """
    if under_launcher():
        end_with_parent()
    leave_torchrun()
    end_workers_soon()
    silence_torch()
    hint = f"; {hint}" if hint else ""
    with tempfile.TemporaryDirectory(prefix="sattle_") as folder:
        whereabouts = Whereabouts(Path(folder) / "whereabouts", at_first)
        whereabouts.path.touch()
        os.environ |= {LAUNCHER_PID: str(os.getpid()), WHEREABOUTS: str(whereabouts.path)}
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
        )
        try:
            elastic_launch(config, sys.executable)("-m", "sattle_dist.cli", *arguments)
        except SignalException as stop:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C changes nothing any more
            say(f"\nstopped by {stop.sigval.name}; all processes have ended{hint}")
            return 128 + stop.sigval
        except ChildFailedError as failed:
            code, message = explain(failed.failures, whereabouts)
            if message:
                say(f"error: {message}{hint}")
            return code
    return 0


def explain(failures: Mapping[int, ProcessFailure], whereabouts: Whereabouts) -> tuple[int, str]:
    """Give the exit code and the line for workers that failed; no line where a worker has said it itself.

    One process is the cause. The others were told to end by the launcher (SIGTERM), or lost the cause as their peer.
    """
    first = min(failure.timestamp for failure in failures.values())

    def hung(failure: ProcessFailure) -> bool:  # told to end, did not, and was killed in the end
        return failure.exitcode == -signal.SIGKILL and failure.timestamp - first >= SHUTDOWN_SECONDS - 1

    def order(failure: ProcessFailure) -> int:
        if failure.exitcode in (-signal.SIGTERM, EXIT_LOST_PEER) or hung(failure):
            return {-signal.SIGTERM: 2, EXIT_LOST_PEER: 3}.get(failure.exitcode, 4)
        return 0 if failure.exitcode == EXIT_USAGE else 1

    rank, cause = min(failures.items(), key=lambda item: order(item[1]))
    if cause.exitcode == EXIT_USAGE:
        return EXIT_USAGE, ""
    if stuck := [(rank, failure) for rank, failure in failures.items() if hung(failure)]:
        rank, cause = stuck[0]
        where = whereabouts.describe(cause.local_rank)
        return EXIT_FAILED, f"the process of rank {rank} hung {where} and was killed"
    if cause.exitcode < 0:
        where = whereabouts.describe(cause.local_rank)
        memory = " (the system does so when memory runs out)" if cause.exitcode == -signal.SIGKILL else ""
        name = cause.signal_name()
        return EXIT_FAILED, f"the process of rank {rank} was killed by {name} {where}{memory}; the others were stopped"
    if cause.exitcode == EXIT_LOST_PEER:
        return EXIT_FAILED, f"the process of rank {rank} lost the others {whereabouts.describe(cause.local_rank)}"
    return EXIT_FAILED, ""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def end_workers_soon() -> None:
    """Make torch end workers by SIGTERM alone, and bound its wait for one that does not react.

    torch passes a Ctrl-C on as SIGINT, which Python answers with a traceback while it still imports; and it waits 30 s
    for a worker after the failure of another, whatever its shutdown_timeout says.
    """
    close = PContext.close

    def close_soon(self: PContext, death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_SECONDS) -> None:
        close(self, signal.SIGTERM, min(timeout, SHUTDOWN_SECONDS))

    PContext.close = close_soon  # type: ignore[method-assign]


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
