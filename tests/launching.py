"""Whole training commands in real processes, small enough to take seconds, bounded, and never left behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.graphs import random_splits, write_graph

ROOT = Path(__file__).parent.parent
TRAIN = str(ROOT / "launchers" / "train.py")
TORCHRUN = [sys.executable, str(ROOT / "launchers" / "torchrun.py")]
SATTLE = [sys.executable, "-m", "sattle_dist.cli", "train"]
NUM_ENTITIES = 131
TIMEOUT = 120.0
SMALL = [
    *("--dim", "8", "--num-heads", "2", "--dim-key", "4", "--dim-value", "4", "--dim-hidden", "8"),
    *("--batch-size", "64", "--threads", "1", "--device", "cpu"),
]


def small_graph(folder: Path) -> Path:
    splits = random_splits(0, num_entities=NUM_ENTITIES, num_relations=5, num_triples=900)
    return write_graph(folder / "small", splits, num_entities=NUM_ENTITIES, num_relations=5)


class Command:
    """A running command and all the processes it has started; its output goes to files in `folder`."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.out, self.err = folder / "stdout", folder / "stderr"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                arguments, stdout=out, stderr=err, env=environment, cwd=folder, start_new_session=True
            )
        self.seen: dict[int, str] = {}  # process -> its command line
        self.deadline = time.monotonic() + TIMEOUT

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the command has printed this so many times."""
        self.wait_until(lambda: self.out.read_text().count(text) >= times, f"printing {text!r}")
        self.note_descendants()

    def wait_until(self, happened: Callable[[], object], goal: str) -> None:
        """Wait for something while the command runs."""
        while not happened():
            assert self.process.poll() is None, f"ended too early:\n{self.err.read_text()}"
            self._tick(goal)

    def end(self) -> tuple[int, str]:
        """Wait for the end of the command; give its exit code and what it wrote to stderr."""
        while self.process.poll() is None:
            self._tick("ending")
        return self.process.returncode, self.err.read_text()

    def note_descendants(self) -> dict[int, int]:
        """Note all processes below the command; give those of the workers by rank."""
        ranks = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                self.seen[pid] = Path(f"/proc/{pid}/cmdline").read_text()
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                ranks |= {int(v.removeprefix("RANK=")): pid for v in variables if v.startswith("RANK=")}
        return ranks  # where torchrun started our launcher, its workers come later than it and take its place

    def wait_until_none_is_left(self) -> None:
        """Wait until all processes noted are gone."""
        while self.alive():
            self._tick("the end of all its processes")

    def alive(self) -> list[int]:
        return [pid for pid, line in self.seen.items() if state_of(pid) not in "XZ" and _cmdline(pid) == line]

    def kill_all(self) -> None:
        if self.process.poll() is None:
            self.note_descendants()
            self.process.kill()
            self.process.wait()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _tick(self, goal: str) -> None:
        assert time.monotonic() < self.deadline, f"no {goal} within {TIMEOUT} s:\n{self.err.read_text()}"
        time.sleep(0.01)


@contextlib.contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[Command]:
    """Run a command; whatever happens, nothing of it is left at the end."""
    command = Command(arguments, folder)
    try:
        yield command
    finally:
        command.kill_all()


def state_of(pid: int) -> str:
    """Give the state of a process as the system calls it, X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """List the processes below this one, parents before their children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


# The ways to start the same short run. They are run once, and compared by several tests.
WAYS = {
    "1 process, torchrun": [*TORCHRUN, TRAIN, "--nproc", "1"],
    "4 processes, torchrun": [*TORCHRUN, TRAIN, "--nproc", "4"],
    "2 processes, sattle": [*SATTLE, "--nproc", "2"],
}
_folder = functools.cache(lambda: tempfile.TemporaryDirectory(prefix="sattle_test_"))


@functools.cache
def trained(way: str) -> tuple[int, str, list[dict[str, Any]], dict[str, float]]:
    """Train two epochs in one of the WAYS; give exit code, stdout, the lines of metrics.jsonl, and the test metrics."""
    folder = Path(_folder().name) / way
    folder.mkdir()
    run = folder / "run"
    options = [*SMALL, "--graph", str(small_graph(folder)), "--epochs", "2", "--out", str(run)]
    with running([*WAYS[way], *options], folder) as command:
        code, errors = command.end()
        assert code == 0, errors
        return code, command.out.read_text(), *results(run)


def results(run: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Read what a finished run has written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((run / "test.json").read_text())["metrics"]
