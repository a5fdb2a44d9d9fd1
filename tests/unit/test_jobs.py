"""Commands in one or several processes: what a job does alone, what it hands to its workers, how it ends."""

from __future__ import annotations

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from sattle_dist import jobs
from sattle_dist.collectives import Group
from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import given_arguments, job_options
from sattle_dist.config import StoppedError
from sattle_dist.runtime import Place


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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--threads", "-5"], "threads must be at least 0, got -5"),
        (["--nproc", "-3"], "nproc must be at least 0, got -3"),
        (["--timeout", "-1"], "timeout must be greater than 0, got -1.0"),
        (["--timeout", "nan"], "timeout must be finite, got nan"),
    ],
)
def test_settings_of_a_job_have_their_bounds(options: list[str], line: str) -> None:
    result = run("hey", "--device", "cpu", *options)
    assert (result.exit_code, result.stderr) == (2, f"error: command line: {line}\n")


def test_what_nccl_says_of_its_set_up_is_shown_and_a_lost_peer_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts as torch's NCCL backend makes them; a duplicate GPU is not a process that died."""
    twice = "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27\nLast error:\nDuplicate GPU detected"
    gone = "NCCL error in: ..., remote process exited or there was a network error, NCCL version 2.27"
    steps = jobs.Steps("before the first step")
    assert jobs.explain(dist.DistBackendError(twice), steps, 10) == jobs.EXIT_FAILED
    said = capsys.readouterr().err
    assert said == f"error: rank 0 failed before the first step:\n{twice}\n"
    assert jobs.explain(dist.DistBackendError(gone), steps, 10) == jobs.EXIT_LOST_PEER
    assert jobs.explain(dist.DistNetworkError("the store is gone"), steps, 10) == jobs.EXIT_LOST_PEER
    assert capsys.readouterr().err.count("lost another process before the first step") == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_a_gpu_without_memory_is_told_as_such(error: Exception) -> None:
    assert jobs.lack_of_resources(error, "use more") == "out of memory; use more"


def test_gpus_that_torch_cannot_use_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is too old for torch still counts its GPUs."""
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for usable, expected in ((True, 4), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert jobs.number_of_processes(0, "auto", place) == expected
