"""Runs that end before their time: stopped, killed, hung, or started with settings that differ."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import random
import re
import signal
import subprocess
import termios
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from sattle_dist import checkpoint, jobs, launch
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, load_toml
from sattle_dist.graph import Graph
from sattle_dist.runtime import EXIT_LOST_PEER, WHEREABOUTS, Whereabouts, require_same_everywhere
from sattle_dist.stopping import SAME_SIGNAL
from sattle_dist.trainer import Trainer
from tests.distributed.test_checkpoint import read_whole
from tests.launching import ROOT, SATTLE, SMALL, TIMEOUT, TORCHRUN, TRAIN, results, running, small_graph
from tests.processes import run_processes

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")


def endless(start: list[str], folder: Path, *options: str) -> list[str]:
    graph = str(small_graph(folder))
    return [*start, *SMALL, "--graph", graph, "--epochs", "1000000", "--out", str(folder / "run"), *options]


@pytest.mark.parametrize(
    ("start", "sent", "message"),
    [
        ([*SATTLE, "--nproc", "1"], signal.SIGUSR1, "stopped by SIGUSR1, saved as"),
        ([*SATTLE, "--nproc", "2"], signal.SIGINT, "stopped by SIGINT; all processes have ended"),
        ([*TORCHRUN, TRAIN, "--nproc", "2"], signal.SIGTERM, "stopped by SIGTERM; all processes have ended"),
    ],
    ids=["SIGUSR1, 1 process", "Ctrl-C, 2 processes", "SIGTERM, 2 processes below torchrun"],
)
def test_signals_save_and_end_all_processes_with_a_message(
    start: list[str], sent: signal.Signals, message: str, tmp_path: Path
) -> None:
    with running(endless(start, tmp_path), tmp_path) as command:
        command.wait_for("epoch 2/")
        assert len(command.seen) == {"--nproc 1": 0, "--nproc 2": 2}[" ".join(start[-2:])] + (TRAIN in start)
        command.process.send_signal(sent)
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == 128 + sent
    assert message in errors
    assert "Traceback" not in errors
    saved = re.search(r"saved as (\S+)", errors)
    assert saved
    assert checkpoint.latest(tmp_path / "run") == Path(
        saved[1]
    )  # --save-every is 10 epochs: it is there for the signal
    facts = checkpoint.read_facts(Path(saved[1]))
    assert Path(saved[1]).name == checkpoint.name_of(facts["epoch"], facts["step"])


def take_terminal() -> None:
    """Make standard input the terminal of this process, which heeds SIGHUP even where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_terminal_that_closes_ends_a_run_which_saves_first(nproc: int, tmp_path: Path) -> None:
    """The terminal is gone by then, so every message fails."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        endless([*SATTLE, "--nproc", str(nproc)], tmp_path),
        **dict.fromkeys(("stdin", "stdout", "stderr"), its),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    try:
        os.close(its)
        said = b""
        while b"epoch 2/" not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(TIMEOUT) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    assert checkpoint.latest(tmp_path / "run")  # --save-every is 10 epochs: it is there for the signal


@pytest.mark.parametrize("start", [SATTLE, [*TORCHRUN, TRAIN]], ids=["sattle", "torchrun"])
def test_a_run_under_nohup_outlives_the_terminal(start: list[str], tmp_path: Path) -> None:
    with running(["nohup", *endless([*start, "--nproc", "2"], tmp_path)], tmp_path) as command:
        command.wait_for("epoch 2/")
        command.process.send_signal(signal.SIGHUP)
        time.sleep(SAME_SIGNAL + 0.1)  # sooner the next would count as the same
        command.wait_for("epoch", command.out.read_text().count("epoch") + 3)
        command.process.send_signal(signal.SIGTERM)
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == 143, errors
    assert "SIGHUP" not in errors


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Even where the first can do nothing, because a process hangs."""
    with running(endless([*SATTLE, "--nproc", "2"], tmp_path), tmp_path) as command:
        command.wait_for("epoch 2/")
        os.kill(command.note_descendants()[1], signal.SIGSTOP)
        command.process.send_signal(signal.SIGTERM)
        while "a second signal stops at once" not in command.err.read_text():
            time.sleep(0.05)
        time.sleep(SAME_SIGNAL + 0.1)  # sooner it would count as the same
        assert command.process.poll() is None
        command.process.send_signal(signal.SIGTERM)
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == 143
    assert "stopped by SIGTERM; all processes have ended" in errors
    assert "saved as" not in errors
    assert "Traceback" not in errors


def reference_run(group: Group, graph: Path, run_dir: Path, config: Config) -> None:
    if group.rank == 0:
        run_dir.mkdir()
    group.barrier()
    Trainer(config, Graph.open(graph), run_dir, group, torch.device("cpu")).run()


def test_a_run_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """kill -9 of either process, while it saves among other moments; the launcher starts all again, and says so."""
    options = ["--epochs", "12", "--eval-every", "3", "--save-minutes", "0.001", "--max-restarts", "2"]
    rng = random.Random(1)
    with running(endless([*SATTLE, "--nproc", "2"], tmp_path, *options), tmp_path) as command:
        for number in range(2):
            command.wait_for("resuming after epoch" if number else "epoch 1/", number or 1)
            if number:  # in the middle of a save
                command.wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("*.partial")), "saving")
            os.kill(command.note_descendants()[rng.randrange(2)], signal.SIGKILL)
        code, errors = command.end()
        command.wait_until_none_is_left()
        said = command.out.read_text()
    assert code == 0, errors
    restarts = [line for line in errors.splitlines() if "restart" in line]
    assert len(restarts) == 2
    for number, line in enumerate(restarts, 1):
        assert re.match(r"error: the process of rank \d was killed by SIGKILL in ", line)
        assert re.search(rf"; restart {number} of 2: all 2 processes begin again from epoch-\d+", line)
    assert said.count("resuming after epoch") == 2

    config = load_toml(tmp_path / "run" / "config.toml", Config())
    run_processes(2, reference_run, tmp_path / "small", tmp_path / "whole", config.override({"threads": 1}, "test"))
    ours, theirs = (read_whole(tmp_path / run / "checkpoints" / "latest") for run in ("run", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with running(endless([*SATTLE, "--nproc", "2"], tmp_path), tmp_path) as command:
        command.wait_for("epoch 2/")
        ranks = command.note_descendants()
        os.kill(ranks[1], signal.SIGSTOP)  # not even one that cannot act
        command.process.kill()
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == -signal.SIGKILL
    assert "Traceback" not in errors


def test_a_killed_worker_is_named_with_signal_and_step(tmp_path: Path) -> None:
    with running(endless([*SATTLE, "--nproc", "2"], tmp_path), tmp_path) as command:
        command.wait_for("epoch 2/")
        os.kill(command.note_descendants()[1], signal.SIGKILL)
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == 1
    assert len(errors.splitlines()) == 1
    found = re.match(r"error: the process of rank 1 was killed by SIGKILL in epoch (\d+), step (\d+) ", errors)
    assert found, errors
    assert int(found[1]) >= 2
    assert 1 <= int(found[2]) <= 14  # 891 queries by 64


def test_a_hung_worker_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    with running(endless([*SATTLE, "--nproc", "2"], tmp_path, "--timeout", "0.1"), tmp_path) as command:
        command.wait_for("epoch 2/")
        os.kill(command.note_descendants()[1], signal.SIGSTOP)
        code, errors = command.end()
        command.wait_until_none_is_left()
    assert code == 1
    waiting, hung = errors.splitlines()
    assert re.match(r"error: rank 0 gave up in epoch \d+, step \d+: it waited 0.1 minutes \(--timeout\)", waiting)
    assert re.match(r"error: the process of rank 1 hung in epoch \d+, step \d+ and was killed", hung)


def test_torchrun_starts_a_killed_run_again_from_its_last_checkpoint(tmp_path: Path) -> None:
    start = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", TRAIN]
    with running(endless(start, tmp_path, "--epochs", "10", "--save-every", "1"), tmp_path) as command:
        command.wait_for("epoch 2/")
        os.kill(command.note_descendants()[1], signal.SIGKILL)
        code, errors = command.end()
        command.wait_until_none_is_left()
        said = command.out.read_text()
    assert code == 0, errors
    assert "; 2 processes on cpu" in said
    assert "\n  MRR " in said
    assert re.search(r"resuming after epoch \d+ of 10", said)
    history, _ = results(tmp_path / "run")
    assert [record["epoch"] for record in history] == list(range(1, 11))


def failure(local_rank: int, exitcode: int, seconds: int = 0) -> ProcessFailure:
    made = ProcessFailure(local_rank=local_rank, pid=1, exitcode=exitcode, error_file="/nonexistent")
    made.timestamp = 1000 + seconds
    return made


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        # Whoever is noticed first, the process that was killed is the cause.
        ([(EXIT_LOST_PEER, 0), (-9, 0), (-2, 0)], 1, "rank 1 was killed by SIGKILL in epoch 3, step 4"),
        ([(-2, 0), (-11, 0)], 1, "rank 1 was killed by SIGSEGV in epoch 3, step 4"),
        ([(EXIT_LOST_PEER, 0), (-15, 0)], 1, "rank 1 was killed by SIGTERM in epoch 3, step 4"),
        ([(-9, 0), (EXIT_LOST_PEER, 0)], 1, "rank 0 was killed by SIGKILL before the first step"),
        ([(EXIT_LOST_PEER, 0), (EXIT_LOST_PEER, 0)], 1, "rank 0 lost the others before the first step"),
        ([(1, 0), (-9, launch.SHUTDOWN_SECONDS)], 1, "rank 1 hung in epoch 3, step 4 and was killed"),
        ([(-2, 0), (2, 0)], 2, ""),  # it has said why itself
        ([(-2, 0), (1, 0)], 1, ""),
        ([(143, 0), (-2, 0)], 143, ""),  # a worker alone was asked to stop: all have saved, and rank 0 has said so
    ],
)
def test_the_launcher_finds_the_cause(ends: list[tuple[int, int]], code: int, message: str, tmp_path: Path) -> None:
    whereabouts = Whereabouts(tmp_path / "whereabouts")
    whereabouts.path.touch()
    whereabouts.writer(1)(2, 3)
    failures = {rank: failure(rank, exitcode, seconds) for rank, (exitcode, seconds) in enumerate(ends)}
    got_code, got_message = launch.explain(failures, whereabouts)
    assert got_code == code
    assert message in got_message
    assert bool(message) == bool(got_message)


LOST = "[/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:1: Connection reset by peer. This is typically caused"


@pytest.mark.parametrize("launched_by_us", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            RuntimeError(LOST),
            EXIT_LOST_PEER,
            "lost another process in epoch 1, step 8: Read error [10.0.0.1]:1: Connection reset by peer\n",
        ),
        (
            RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"),
            1,
            "gave up in epoch 1, step 8: it waited 3 minutes (--timeout) for a process that died or hung\n",
        ),
        (KeyError("a defect"), 1, "failed in epoch 1, step 8:\nTraceback"),
    ],
    ids=["lost", "timed out", "defect"],
)
def test_a_worker_says_where_it_was_stopped(
    error: Exception,
    code: int,
    said: str,
    launched_by_us: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "5")
    if launched_by_us:
        (tmp_path / "whereabouts").touch()
        monkeypatch.setenv(WHEREABOUTS, str(tmp_path / "whereabouts"))
    steps = jobs.Steps("before the first step")
    steps.note(0, 7)
    try:
        raise error
    except Exception as raised:
        got = jobs.explain(raised, steps, 3.0)
    assert got == code
    silent = launched_by_us and code == EXIT_LOST_PEER  # our launcher saw the death itself
    err = capsys.readouterr().err
    assert err == "" if silent else err.startswith(f"error: rank 5 {said}")


def test_lack_of_resources_is_said_in_words() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert jobs.lack_of_resources(refused.value, "buy some") == "out of memory; buy some"
    with pytest.raises(OSError, match="no-such-file") as missing:
        Path("no-such-file").read_text()
    assert "No such file" in jobs.lack_of_resources(missing.value, "")
    assert jobs.lack_of_resources(RuntimeError("a defect"), "") == ""


DIFFERING: list[tuple[dict[str, Any], str, str]] = [
    ({"dim": 8}, "sha256:a", "dim differs between processes: 100 on rank 0, 8 on rank 1"),
    ({"seed": 1}, "sha256:a", "seed differs between processes: 0 on rank 0, 1 on rank 1"),
    ({"eval_every": 3}, "sha256:a", "eval_every differs between processes: 10 on rank 0, 3 on rank 1"),
    ({"save_every": 3}, "sha256:a", "save_every differs between processes: 10 on rank 0, 3 on rank 1"),
    ({}, "sha256:b", "graph checksum differs between processes: 'sha256:a' on rank 0, 'sha256:b' on rank 1"),
    ({"score_memory": 7}, "sha256:a", "score_memory differs between processes: 0 on rank 0, 7 on rank 1"),
    ({"threads": 3, "timeout": 7.0, "graph": "elsewhere"}, "sha256:a", ""),  # every machine may have its own
]


def start_differently(group: Group) -> list[str]:
    """Start rank 1 with other settings than the others, in all ways; give the errors of this rank."""
    errors = []
    for differing, checksum, _ in DIFFERING:
        config = Config().override(differing if group.rank == 1 else {}, "test")
        try:
            require_same_everywhere(config, checksum if group.rank == 1 else "sha256:a", group)
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_differing_settings_are_refused_on_every_rank() -> None:
    for errors in run_processes(3, start_differently):
        for error, (_, _, message) in zip(errors, DIFFERING, strict=True):
            assert error.startswith(message)
            assert bool(error) == bool(message)


def work_while_others_wait(group: Group) -> tuple[int, object, object]:
    """Give how often the ranks heard from one another during a work that waits for it, and what came of two works."""
    heard, enough, share = 0, threading.Event(), group.share

    def counted(value: Any) -> Any:
        nonlocal heard
        heard += 1
        if heard == 3:
            enough.set()
        return share(value)

    def fail() -> None:
        raise ConfigError("first fails")

    group.share = counted  # type: ignore[method-assign]
    try:
        result, exchanged = group.on_first(lambda: enough.wait(TIMEOUT)), heard
        try:
            return exchanged, result, group.on_first(fail)
        except ConfigError as error:
            return exchanged, result, str(error)
    finally:
        group.share = share  # type: ignore[method-assign]


def test_ranks_hear_from_the_first_while_it_works_alone() -> None:
    """So that a file of queries may take longer to read than --timeout."""
    (heard, *first), (heard_there, *other) = run_processes(2, work_while_others_wait)
    assert heard == heard_there >= 3
    assert (first, other) == ([True, "first fails"], [None, None])


def test_every_setting_that_decides_numbers_is_compared() -> None:
    class Pair(Group):
        """Two ranks with equal settings."""

        def __init__(self) -> None:
            self.rank, self.world_size = 0, 2
            self.compared: set[str] = set()

        def gather_objects(self, value: Any) -> list[Any]:
            self.compared |= set(value)
            return [value, value]

    group, config = Pair(), Config()
    require_same_everywhere(config, "sha256:a", group)
    decisive = {f.name for section in (config.model, config.train, config.eval) for f in dataclasses.fields(section)}
    assert decisive <= group.compared
