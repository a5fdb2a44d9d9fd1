"""Parameters, speed and memory against dim, heads, entities and processes, and the planner's word against all of it.

python -m benchmarks.scale            the whole grid, about twenty minutes on two cores
python -m benchmarks.scale --quick    a few minutes

A point that the results hold for the same code is not measured again: a run that was stopped goes on where it was.
At the end come the tables and plots in benchmarks/results, and the tables of docs/scaling.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import click

from benchmarks import record
from benchmarks.scale_point import Point, run_point

FB15K_237 = 14_541
DIMS, HEADS = (32, 64, 100, 200), (4, 8, 16, 32, 64, 128)
DECODERS = ("twomult", "tucker")
CODE = ("sattle_dist", "benchmarks/scale_point.py")


def grid(quick: bool) -> list[Point]:
    """List the points: model sizes, numbers of entities, numbers of processes."""
    cores = os.cpu_count() or 1
    dims, heads = ((32, 100), (4, 64)) if quick else (DIMS, HEADS)
    base: dict[str, Any] = {"decoder": "twomult", "loss": "softmax", "processes": 1, "threads": cores}
    points = [
        Point(study="model", dim=d, num_heads=h, entities=FB15K_237, batch_size=512, **{**base, "decoder": decoder})
        for decoder in DECODERS
        for d in dims
        for h in heads
    ]
    small = {**base, "dim": 32, "num_heads": 8, "batch_size": 128}
    sizes = {"softmax": (10**4, 10**5, 10**6, 10**7), "bce": (10**4, 10**5, 10**6)}
    for loss, numbers in sizes.items():
        points += [
            Point(study="entities", entities=n, **{**small, "loss": loss}) for n in numbers if n < 10**7 or not quick
        ]
    for processes in (1, 2) if quick else (1, 2, 4):
        several = {**base, "processes": processes, "threads": 1}
        points.append(Point(study="processes", dim=100, num_heads=64, entities=FB15K_237, batch_size=1024, **several))
        if not quick:
            points.append(Point(study="processes", dim=32, num_heads=8, entities=10**6, batch_size=256, **several))
    return points


def code_version() -> str:
    """Name the code that is measured: the tree of the library, or nothing that could be found again."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    trees = " ".join(git("rev-parse", "--short", f"HEAD:{path}") for path in CODE)
    return "" if git("status", "--porcelain", *CODE) else trees


def load_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Read the rows measured so far, by key."""
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small part of the grid, recorded apart.")
@click.option("--study", type=click.Choice(["model", "entities", "processes"]), help="Measure the points of one study.")
@click.option("--again", is_flag=True, help="Measure every point again.")
@click.option("--render-only", is_flag=True, help="Measure nothing: write tables and plots from what is recorded.")
@click.option("--minutes", default=25.0, show_default=True, help="Begin no further point after so many minutes.")
def main(quick: bool, study: str | None, again: bool, render_only: bool, minutes: float) -> None:
    # Not at the top: the processes that are measured import this file, and would hold the libraries of the pictures.
    from benchmarks import scale_docs
    from benchmarks.scale_plots import plot
    from benchmarks.scale_report import render, write_table

    name = "scale-quick" if quick else "scale"
    path = record.RESULTS / f"{name}.json"
    rows, version, began = load_rows(path), code_version(), time.monotonic()
    points = grid(quick)
    stamp = json.loads(path.read_text())["stamp"] if render_only else record.stamp(("torch", "numpy"))
    missing = []
    for number, point in enumerate(points, 1):
        if study and point.study != study:
            continue
        row = rows.get(point.key)
        if render_only or (row and not again and version and row["version"] == version):
            continue
        if time.monotonic() - began > 60 * minutes:
            missing += [point.key] if row else []
            continue
        rows[point.key] = {**run_point(point), "version": version, "date": stamp["date"]}
        save(path, stamp, rows)
        seconds, memory = rows[point.key]["seconds"], rows[point.key]["peak_memory"]
        click.echo(f"{number}/{len(points)}  {point.key}: {1e3 * seconds:.0f} ms, {memory / 2**20:.0f} MiB", err=True)
    rows = {point.key: rows[point.key] for point in points if point.key in rows}
    if left := len(points) - len(rows) + len(missing):
        raise SystemExit(f"{left} points are left: say the same again to measure them, then tables and plots follow")
    record.write(name, {"stamp": stamp, "rows": rows}, render(list(rows.values()), name))
    write_table(list(rows.values()), record.RESULTS / name)
    plot(list(rows.values()), record.RESULTS / name)
    scale_docs.write()


def save(path: Path, stamp: dict[str, Any], rows: dict[str, Any]) -> None:
    """Write the rows whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"stamp": stamp, "rows": rows}, indent=2) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
