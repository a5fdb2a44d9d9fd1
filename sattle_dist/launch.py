"""Starting the processes of a run on this machine, with torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

EXIT_USAGE = 2


def run_workers(arguments: list[str], nproc: int) -> int:
    """Run `sattle ARGUMENTS` in nproc processes and wait for them; return the exit code to end with."""
    # Where torchrun started this process, its variables describe a group of one that the workers must not join.
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_") or name in _TORCHRUN_NAMES:
            del os.environ[name]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it in one line ourselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sattle_dist.cli", *arguments)
    except SignalException as stop:
        print(f"\nstopped by {stop.sigval.name}; all processes have ended", file=sys.stderr)
        return 128 + stop.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == EXIT_USAGE:  # it has said so itself
            return EXIT_USAGE
        cause = (
            f"was killed by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode < 0
            else f"ended with exit code {failure.exitcode}"
        )
        print(f"error: the process of rank {rank} {cause}; the others were stopped", file=sys.stderr)
        return 1
    return 0


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
