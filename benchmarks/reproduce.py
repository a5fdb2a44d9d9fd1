"""The paper's results, reproduced: train chosen recipes, collect what they reached, write docs/reproduction.md.

python -m benchmarks.reproduce --runs runs/paper fb15k237-twomult-100-fast wn18rr-twomult-100-fast
python -m benchmarks.reproduce --runs runs/paper            # collect and write the page, train nothing
python -m benchmarks.reproduce --list                       # what can be run

Each job is one `sattle train` with its own directory under --runs. It may be stopped at any time; the same command goes
on where the last checkpoint is. Options of `sattle train` that change no number (--graph, --nproc, --threads, ...) may
follow after `--`. On a machine that others use meanwhile, say --shared-machine: no time is recorded then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import record, reproduction_page
from benchmarks.paper_figures import HITS, ROWS
from sattle_dist import teacher
from sattle_dist.commands.train import resolve_config
from sattle_dist.config import Config, ConfigError, load_toml, settings

RESULT = record.RESULTS / "reproduction.json"
OTHER_RUNS = ("grow_from", "teacher")  # settings by which other runs have a say in the numbers
CURVE_EPOCHS = 60


@dataclass(frozen=True)
class Job:
    """A recipe to train, with the settings that make it another experiment than the recipe itself."""

    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    folder: str = ""  # name of the run directory, where it is not the job's own
    module: str = "sattle_dist.cli"  # what is run in place of `sattle`

    def config(self) -> Config:
        """Give the settings of the run."""
        return resolve_config(self.recipe, None, self.settings)

    def arguments(self) -> list[str]:
        """Give the arguments of `sattle` that run it, but for places."""
        options = [word for name, value in self.settings.items() for word in (option(name), str(value))]
        return ["train", "--recipe", self.recipe, *options]

    def command(self) -> str:
        """Give what a user would type to run it, but for places."""
        program = "sattle" if self.module == Job.module else f"python -m {self.module}"
        return " ".join([program, *self.arguments()])


def option(name: str) -> str:
    """Spell a setting as an option."""
    return f"--{name.replace('_', '-')}"


def make_jobs() -> dict[str, Job]:
    """List the experiments by name: every recipe, the study of heads, and the beginnings of the paper's curves.

    A curve is the beginning of the run of the paper's recipe: it stays in that directory, and the recipe goes on there.
    """
    jobs = {name: Job(name) for row in ROWS for name in (f"{row.recipe}-fast", row.recipe)}
    for heads in (4, 16):
        jobs[f"heads-{heads}"] = Job("fb15k237-twomult-100-teacher", {"num_heads": heads})
    jobs["heads-64"] = Job("fb15k237-twomult-100-teacher", folder="fb15k237-twomult-100-fast/teacher-1")
    for dim in (32, 64, 100):
        recipe = f"fb15k237-twomult-{dim}"
        jobs[f"curve-{dim}"] = Job(recipe, {"epochs": CURVE_EPOCHS}, folder=recipe)
    for name, module in (("triples", "benchmarks.triples"), ("file-order", "benchmarks.file_order")):
        settings = {"batch_size": 2048, "epochs": CURVE_EPOCHS}
        jobs[f"curve-100-{name}"] = Job("fb15k237-twomult-100", settings, module=module)
    return jobs


JOBS = make_jobs()


@click.command()
@click.argument("names", nargs=-1, metavar="[JOB]... [-- OPTION...]")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/paper"), show_default=True)
@click.option("--shared-machine", is_flag=True, help="Others compute here too: record no times.")
@click.option("--list", "listed", is_flag=True, help="List the jobs.")
def main(names: tuple[str, ...], runs: Path, shared_machine: bool, listed: bool) -> None:
    """Train the JOBs, one after the other, then collect all results under --runs and write the page."""
    if listed:
        for name, job in JOBS.items():
            click.echo(f"{name:28s} {job.command()}")
        return
    jobs, options = separate(names)
    for name in jobs:
        job = JOBS[name]
        run_dir = runs / (job.folder or name)
        if is_done(run_dir, job.config().train.epochs) and collect(job, run_dir):
            click.echo(f"{name}: done before")
        elif (code := train(job, run_dir, options, shared_machine=shared_machine)) != 0:
            raise click.ClickException(f"{name} ended with exit code {code}; the same command goes on with it")
        update(runs)
    update(runs)


def separate(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Part the names of jobs from the options of `sattle train`, which may only be of those that change no number."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    jobs, options = list(words[:first]), list(words[first:])
    if unknown := [name for name in jobs if name not in JOBS]:
        raise click.UsageError(f"no job is called {unknown[0]!r}; --list shows them")
    harmless = {option(f.name) for section, f in settings() if section == "run" and f.name not in ("out", *OTHER_RUNS)}
    for word in options:
        if word.startswith("-") and word.partition("=")[0] not in harmless:
            raise click.UsageError(f"{word} would be another experiment; allowed are {', '.join(sorted(harmless))}")
    return jobs, options


def is_done(run_dir: Path, epochs: int) -> bool:
    """Tell whether a run has trained so many epochs and has been tested."""
    return (run_dir / "test.json").exists() and len(read_metrics(run_dir)) >= epochs


def train(job: Job, run_dir: Path, options: list[str], *, shared_machine: bool) -> int:
    """Train a job, or go on with it; keep beside it when it was at work, over all its resumes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = Sittings(run_dir / "sittings.json")
    signs = sorted(run_dir.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    log.begin(shared_machine, last_sign=signs[-1] if signs else run_dir / "metrics.jsonl")
    command = [sys.executable, "-m", job.module, *job.arguments(), "--out", str(run_dir), *options]
    code = attend(command)
    log.end()
    return code


def attend(command: list[str]) -> int:
    """Run a command to its end and give its exit code; SIGTERM is passed on, so that it saves and ends."""
    with subprocess.Popen(command) as child:
        before = signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
        try:
            return child.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


class Sittings:
    """When, where and with what a run was at work, each time it was started; kept in a file of the run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.items: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def begin(self, shared_machine: bool, last_sign: Path) -> None:
        """Note a beginning. A sitting that was killed without an end ended at the run's last sign of life."""
        if self.items and self.items[-1]["end"] is None:
            alive = last_sign.stat().st_mtime if last_sign.exists() else 0
            self.items[-1]["end"] = max(alive, self.items[-1]["begin"])
        stamp = record.stamp()
        stamp.pop("command")
        self.items.append({"begin": time.time(), "end": None, "shared": shared_machine, "stamp": stamp})
        self._write()

    def end(self) -> None:
        """Note the end of what was begun."""
        self.items[-1]["end"] = time.time()
        self._write()

    def seconds(self) -> float | None:
        """Sum the time at work: None where some of it is unknown, or others used the machine."""
        if not self.items or any(item["end"] is None or item["shared"] for item in self.items):
            return None
        return round(sum(item["end"] - item["begin"] for item in self.items), 1)

    def stamp(self) -> dict[str, Any] | None:
        """Say where and with what the run was last at work."""
        return self.items[-1]["stamp"] if self.items else None

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.items, indent=1) + "\n")


def update(runs: Path) -> None:
    """Collect every run there is into the results, keep what was recorded before, and write the page.

    A run that has only begun does not take the place of a result.
    """
    recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, job in JOBS.items():
        run_dir = runs / (job.folder or name)
        found = collect(job, run_dir)
        if found and ("test" in found or "test" not in recorded.get(name, {})):
            recorded[name] = found
    RESULT.write_text(json.dumps(recorded, indent=1) + "\n")
    reproduction_page.write(recorded, {name: job.config() for name, job in JOBS.items()})


def collect(job: Job, run_dir: Path) -> dict[str, Any] | None:
    """Read what a run has reached; None if it has not begun, or is an experiment of other settings."""
    metrics = read_metrics(run_dir)
    if not metrics or not (run_dir / "config.toml").exists():
        return None
    try:
        ran, asked = load_toml(run_dir / "config.toml", Config()), job.config()
    except ConfigError as error:  # a run of another version
        click.echo(f"passed over: {error}", err=True)
        return None
    if ran.model != asked.model or not same_training(ran, asked):
        return None
    metrics, sittings = metrics[: asked.train.epochs], Sittings(run_dir / "sittings.json")
    of_teachers = [Sittings(path) for path in run_dir.glob("teacher-*/**/sittings.json")]  # where they were jobs, too
    result: dict[str, Any] = {
        "command": job.command(),
        "seed": ran.train.seed,
        "precision": ran.run.precision,
        "epochs": len(metrics),
        "of": asked.train.epochs,
        "epochs_of_teachers": reproduction_page.epochs_of_teachers(asked),
        "valid": {str(line["epoch"]): line["valid"]["mrr"] for line in metrics if line.get("valid")},
        "seconds": sum_times([sittings, *of_teachers]),
        "stamp": sittings.stamp(),
    }
    if is_done(run_dir, asked.train.epochs) and len(read_metrics(run_dir)) == asked.train.epochs:
        test = json.loads((run_dir / "test.json").read_text())
        result["test"] = {key: round(test["metrics"][key], 5) for key in ("mrr", *HITS)}
        result["epoch_tested"] = test["protocol"]["epoch"]
    return result


def sum_times(sittings: list[Sittings]) -> float | None:
    """Give the time that a run and those of its teachers that were jobs of their own took; None where it is unknown."""
    seconds = [each.seconds() for each in sittings]
    return None if None in seconds else round(sum(filter(None, seconds)), 1)


def same_training(ran: Config, asked: Config) -> bool:
    """Tell whether a run is the one asked for, at least in its beginning."""
    if ran.run.grow_from != asked.run.grow_from or teacher.names(ran) != teacher.names(asked):
        return False
    before, after = vars(ran.train).copy(), vars(asked.train).copy()
    if asked.train.schedule != "cosine":  # only there the number of epochs changes the beginning
        before["epochs"] = after["epochs"] = 0
    return before == after


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read a run's line of each epoch; the last may be half there while it is written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    main()
