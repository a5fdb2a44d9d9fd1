"""Kill a training run again and again, and compare what it ends with to an uninterrupted run's, bit for bit.

python -m benchmarks.kill                  25 kills of a 2-process run, then 1 -> 3 -> 2 processes, then a full disk
python -m benchmarks.kill --kills 5        fewer

A random process (one of the two workers, now and then the launcher) gets SIGKILL at random moments: in the middle of a
step, while a checkpoint is being written, during evaluation. The launcher's --max-restarts, or this script where the
launcher itself was killed, starts it again. The graph is the built-in one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.record import stamp, write

SMALL = ["--dim", "32", "--num-heads", "4", "--dim-hidden", "128", "--batch-size", "128", "--threads", "1"]
OFTEN = ["--eval-every", "2", "--save-every", "3", "--save-minutes", "0.005", "--device", "cpu", "--timeout", "1"]
PHASES = ("step", "saving", "evaluation")
LIMIT = 600.0  # seconds without the wanted moment, or without an end


class Run:
    """A `sattle train` in one run directory, started as often as it takes."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder, self.out = folder, folder / "run"
        self.arguments = [*SMALL, *OFTEN, "--epochs", str(epochs), "--out", str(self.out)]
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "log"

    def start(self, nproc: int, *more: str) -> None:
        command = [sys.executable, "-m", "sattle_dist.cli", "train", *self.arguments, "--nproc", str(nproc), *more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def workers(self) -> list[int]:
        """List the processes that have a rank."""
        assert self.process
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in task.read_text().split()]
        return [pid for pid in found if variable(pid, "SATTLE_WHEREABOUTS")]

    def phase(self) -> str:
        """Say what the run is doing; nothing while it starts or has ended."""
        if list((self.out / "checkpoints").glob("*.partial")):
            return "saving"
        for pid in self.workers():
            with contextlib.suppress(OSError):
                noted = Path(variable(pid, "SATTLE_WHEREABOUTS")).read_bytes()
                if len(noted) >= 16:
                    epoch, step = struct.unpack("=qq", noted[:16])
                    return "step" if step else "evaluation" if epoch else ""
        return ""

    def wait_for(self, phase: str) -> bool:
        """Wait until the run is in this phase; tell whether it came to that before it ended."""
        assert self.process
        deadline = time.monotonic() + LIMIT
        while self.phase() != phase:
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no {phase} within {LIMIT} s:\n{self.log.read_text()[-2000:]}"
        return True

    def end(self) -> int:
        assert self.process
        return self.process.wait(LIMIT)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the newest checkpoint as whole tensors, without the library's own loader."""
        folder = self.out / "checkpoints" / "latest"
        parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as shard:
                places = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
                for name in shard.keys():  # noqa: SIM118
                    tensor = shard.get_tensor(name)
                    parts.setdefault(name, []).append(((places[name]["saved_offsets"] or [0])[0], tensor))
        order = {
            name: [tensor for _, tensor in sorted(found, key=lambda part: part[0])] for name, found in parts.items()
        }
        return {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in order.items()}

    def history(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl without its times."""
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def variable(pid: int, name: str) -> str:
    """Read an environment variable of another process."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            if entry.startswith(f"{name}="):
                return entry.partition("=")[2]
    return ""


def kill_many(folder: Path, epochs: int, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill a 2-process run `kills` times; compare its end with an uninterrupted run's."""
    whole = finished(folder / "whole", epochs, 2)
    run = Run(new(folder / "killed"), epochs)
    done: Counter[str] = Counter()
    starts = 1
    run.start(2, "--max-restarts", str(kills))
    while sum(done.values()) < kills:
        wanted = PHASES[sum(done.values()) % len(PHASES)]
        time.sleep(rng.uniform(0.0, 0.5) if run.phase() else 0.0)
        if not run.wait_for(wanted):
            raise SystemExit(
                f"the run ended before its {kills} kills; use more --epochs:\n{run.log.read_text()[-2000:]}"
            )
        workers = run.workers()
        if len(workers) < 2 or run.phase() != wanted:
            continue
        launcher = rng.random() < 0.1
        assert run.process
        victim = run.process.pid if launcher else rng.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            done[wanted] += 1
            print(f"kill {sum(done.values())}: {'launcher' if launcher else 'worker'}, {wanted}", flush=True)
        while run.process.poll() is None and victim in (run.process.pid, *run.workers()):
            time.sleep(0.05)
        if launcher:
            run.end()
            run.start(2, "--max-restarts", str(kills))
            starts += 1
    code = run.end()
    text = run.log.read_text()
    return {
        "kills": dict(done),
        "launcher_starts": starts,
        "restarts_by_launcher": text.count("restart ") - text.count("(restart"),
        "exit_code": code,
        "tracebacks": text.count("Traceback"),
        "traceback_texts": [
            part[-1500:] for part in re.findall(r"Traceback.*?(?=\nerror|\nepoch|\Z)", text, re.DOTALL)
        ],
        "weights_equal_bit_for_bit": equal(whole.tensors(), run.tensors()),
        "metrics_equal": whole.history() == run.history(),
        "checkpoints_left": sorted(path.name for path in (run.out / "checkpoints").iterdir()),
    }


def change_processes(folder: Path, epochs: int) -> dict[str, Any]:
    """Kill a run of 1 process, go on with 3, kill it, end with 2; compare with an uninterrupted run of 2."""
    whole = Run(folder / "whole", epochs)
    run = Run(new(folder / "changing"), epochs)
    for nproc in (1, 3):
        run.start(nproc)
        assert run.process
        time.sleep(1)
        wanted = epochs // 3 * (1 if nproc == 1 else 2)
        deadline = time.monotonic() + LIMIT
        while newest_epoch(run) < wanted:
            if time.monotonic() > deadline or run.process.poll() is not None:
                raise SystemExit(f"no epoch {wanted}:\n{run.log.read_text()[-2000:]}")
            time.sleep(0.02)
        victims = run.workers() or [run.process.pid]
        os.kill(victims[-1], signal.SIGKILL)
        run.end()
    if newest_epoch(run) == epochs:
        raise SystemExit("the run of 3 processes ended before it was killed; use more --epochs")
    run.start(2)
    code = run.end()
    return {
        "processes": [1, 3, 2],
        "exit_code": code,
        "resumed": [line for line in run.log.read_text().splitlines() if line.startswith("resuming")],
        "killed_against_2": difference(run, whole),
        # What rounding alone makes of a run that nobody killed.
        "uninterrupted_1_against_2": difference(finished(folder / "alone", epochs, 1), whole),
    }


def difference(a: Run, b: Run) -> dict[str, float]:
    """Give the largest difference between two runs: of an epoch's loss, of validation MRR, of a score of the table."""
    ours, theirs = a.tensors()["table.rows"].double(), b.tensors()["table.rows"].double()
    pairs = list(zip(a.history(), b.history(), strict=True))
    mrr = [abs(x["valid"]["mrr"] - y["valid"]["mrr"]) for x, y in pairs if "valid" in x]
    return {
        "loss": max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in pairs),
        "first_epoch_loss": abs(pairs[0][0]["loss"] - pairs[0][1]["loss"]) / pairs[0][1]["loss"],
        "valid_mrr": max(mrr),
        "rows": float((ours - theirs).norm() / theirs.norm()),
    }


def words(differences: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in differences.items())


def newest_epoch(run: Run) -> int:
    names = [path.name for path in (run.out / "checkpoints").glob("epoch-*") if path.suffix == ""]
    return max((int(name.split("-")[1]) for name in names), default=0)


def fill_disk(folder: Path, epochs: int) -> dict[str, Any]:
    """Train into a file system that has room for one checkpoint and a half; needs root, to mount it."""
    room = new(folder / "room")
    size = sum(file.stat().st_size for file in (folder / "whole/run/checkpoints/latest/").iterdir())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(room)], check=True)
    try:
        run = Run(new(folder / "full"), epochs)
        run.out = room / "run"
        run.arguments[-1] = str(run.out)
        run.start(2)
        code = run.end()
        text = run.log.read_text()
        saved = [path.name for path in (run.out / "checkpoints").glob("epoch-*")]
        looks = [sys.executable, "-m", "sattle_dist.cli", "predict", str(run.out), "--source", "iris_baker"]
        asked = subprocess.run([*looks, "--relation", "mother_of"], capture_output=True, text=True, check=False)
        return {
            "exit_code": code,
            "first_warning": next((line for line in text.splitlines() if line.startswith("warning")), "").replace(
                str(folder), "..."
            ),
            "last_line": text.strip().splitlines()[-1].replace(str(folder), "..."),
            "tracebacks": text.count("Traceback"),
            "checkpoints_left": saved,
            "last_checkpoint_loads": asked.returncode == 0,
        }
    finally:
        subprocess.run(["umount", str(room)], check=False)


def finished(folder: Path, epochs: int, nproc: int) -> Run:
    run = Run(new(folder), epochs)
    run.start(nproc)
    assert run.process
    assert run.process.wait(600) == 0, run.log.read_text()
    return run


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true", help="only print what was found")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sattle_kill_"))
    try:
        killed = kill_many(folder, options.epochs, options.kills, random.Random(options.seed))
        changed = change_processes(folder, options.epochs)
        disk = fill_disk(folder, 12) if os.geteuid() == 0 else {"skipped": "mounting a small file system needs root"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"stamp": stamp(), "killed": killed, "changed": changed, "full_disk": disk}
    print(json.dumps(result, indent=1))
    if options.no_record:
        return
    rows = [
        ("kills (step, saving, evaluation)", ", ".join(str(killed["kills"].get(phase, 0)) for phase in PHASES)),
        (
            "of them restarted by the launcher / by hand",
            f"{killed['restarts_by_launcher']} / {killed['launcher_starts'] - 1}",
        ),
        ("weights and optimizer state equal bit for bit", killed["weights_equal_bit_for_bit"]),
        ("metrics of every epoch equal", killed["metrics_equal"]),
        (
            "killed at 1, at 3, ended with 2 processes, against 2: relative differences",
            words(changed["killed_against_2"]),
        ),
        ("yardstick: uninterrupted at 1, against 2", words(changed["uninterrupted_1_against_2"])),
        (
            "full disk: exit code, last checkpoint loads",
            f"{disk.get('exit_code')}, {disk.get('last_checkpoint_loads')}",
        ),
        ("Python tracebacks in all logs", killed["tracebacks"] + disk.get("tracebacks", 0)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    text = (
        f"# A run that is killed\n\nThe built-in graph, 2 processes, {options.epochs} epochs, SIGKILL to a random "
        "process; compared with a run that was left alone.\n\n| | |\n|---|---|\n" + table + "\n"
    )
    write("kill", result, text)


if __name__ == "__main__":
    main()
