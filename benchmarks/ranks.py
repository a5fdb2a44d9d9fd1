"""Run a function in several processes that join one group, as `sattle train` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sattle_dist.config import RunConfig
from sattle_dist.processes import ProcessError, in_processes


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, threads: int = 1) -> list[Any]:
    """Call function(group, device, *args) on every rank, each with so many threads; give the results by rank."""
    try:
        return in_processes(world_size, RunConfig(threads=threads), function, *args)
    except ProcessError as error:
        raise SystemExit(f"the benchmark failed: {error}") from None
