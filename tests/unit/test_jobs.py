"""Commands in one or several processes: what a job does alone, what it hands to its workers, how it ends."""

from __future__ import annotations

import click
import pytest
import torch
from click.testing import CliRunner, Result

from sattle_dist import jobs
from sattle_dist.collectives import Group
from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import given_arguments, job_options
from sattle_dist.config import StoppedError


@click.command()
@click.argument("word")
@click.option("--times", type=int)
@click.option("--loud", is_flag=True)
@job_options
@one_line_errors
def shout(word: str, times: int | None, loud: bool, nproc: int, device: str, threads: int, timeout: float) -> None:
    def work(group: Group, device: torch.device) -> None:
        if word == "memory":
            raise MemoryError
        if word == "stop":
            raise StoppedError("stopped, in one line")
        click.echo(f"{word} x {times} on rank {group.rank} of {group.world_size}, {device}")

    raise SystemExit(jobs.run_job(given_arguments(), nproc, device, work, threads=threads, timeout=timeout))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(shout, list(arguments))


def test_a_lone_process_does_the_work_itself() -> None:
    result = run("hey", "--times", "2", "--threads", "1", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (0, "hey x 2 on rank 0 of 1, cpu\n")


def test_more_processes_are_started_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run_workers(arguments: list[str], nproc: int, *, at_first: str, hint: str = "") -> int:
        started.append((arguments, nproc, at_first, hint))
        return 7

    monkeypatch.setattr(jobs, "run_workers", run_workers)
    result = run("--nproc", "2", "--times", "-3", "--loud", "--device", "cpu", "--", "-odd")
    assert result.exit_code == 7
    ((arguments, nproc, at_first, hint),) = started
    assert (nproc, at_first, hint) == (2, "during `sattle shout`", "")
    assert arguments[0] == "shout"
    with shout.make_context("shout", arguments[1:]) as again:
        assert again.params | {"nproc": 2} == {
            "word": "-odd", "times": -3, "loud": True, "nproc": 2, "device": "cpu", "threads": 0, "timeout": 10.0
        }  # fmt: skip
        assert again.params["nproc"] == 0


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("memory", "stopped during `sattle shout`: out of memory; share the table among more processes (--nproc)"),
        ("stop", "stopped, in one line"),
    ],
)
def test_what_stops_a_job_is_one_line(word: str, line: str) -> None:
    result = run(word, "--device", "cpu", "--threads", "1")
    assert (result.exit_code, result.stderr) == (1, f"error: {line}\n")
