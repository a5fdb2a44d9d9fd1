"""Measure ingest: time, rate and peak memory by size, and against a plain Python loop.

    python -m benchmarks.ingest --sizes 1e6,1e7,1e8 --memory-limit 4GB

Every size T is a generated graph of T lines over T / 10 entities (benchmarks/make_graph.py). Each run is a process of
its own, from start to end, and its peak memory is that of the whole process as the kernel counts it. The loop it is
compared with does what a short script does: read lines, number labels with dictionaries, numpy.unique, save.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import record


def plain_loop(path: Path, out: Path) -> dict[str, float]:
    """Number the labels of a file of triples the straightforward way; give the seconds of every step."""
    began = time.perf_counter()
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    triples = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            source, relation, target = line.rstrip("\n").split("\t")
            triples.append(
                (
                    entities.setdefault(source, len(entities)),
                    relations.setdefault(relation, len(relations)),
                    entities.setdefault(target, len(entities)),
                )
            )
    read = time.perf_counter()
    array = np.array(triples, dtype=np.int32)
    unique = np.unique(array, axis=0)
    sorted_ = time.perf_counter()
    np.save(out / "triples.npy", unique)
    for name, labels in (("entities", entities), ("relations", relations)):
        (out / f"{name}.txt").write_text("\n".join(labels), encoding="utf-8")
    saved = time.perf_counter()
    return {"read": read - began, "unique": sorted_ - read, "save": saved - sorted_}


def run_process(command: list[str]) -> dict[str, float]:
    """Run a command to its end; give its seconds, processor seconds and peak memory in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_gb": round(usage.ru_maxrss * 1024 / 1e9, 3),
    }


def make_input(work: Path, triples: int) -> Path:
    path = work / f"triples-{triples}.tsv"
    command = [sys.executable, "-m", "benchmarks.make_graph", "--entities", str(max(triples // 10, 1))]
    subprocess.run([*command, "--triples", str(triples), "--out", str(path)], check=True)
    return path


def measure_ingest(path: Path, triples: int, memory_limit: str, repeats: int) -> dict[str, Any]:
    """Ingest a file several times; give the median run and the counts of its manifest."""
    out = path.with_suffix(".graph")
    command = [
        sys.executable,
        "-m",
        "ingest.cli",
        str(path),
        "--out",
        str(out),
        "--memory-limit",
        memory_limit,
        "--force",
    ]
    runs = []
    for _ in range(repeats):
        shutil.rmtree(out, ignore_errors=True)
        runs.append(run_process([*command, "--quiet"]))
    manifest = json.loads((out / "manifest.json").read_text())
    size = sum(facts["bytes"] for facts in manifest["files"].values())
    shutil.rmtree(out)
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "lines": triples,
        "entities": manifest["num_entities"],
        "input_gb": round(path.stat().st_size / 1e9, 3),
        "graph_gb": round(size / 1e9, 3),
        "seconds": seconds,
        "triples_per_second": round(triples / seconds),
        "peak_memory_gb": max(run["peak_memory_gb"] for run in runs),
        "runs": runs,
    }


def measure_loop(path: Path, work: Path) -> dict[str, Any]:
    out = work / "loop"
    out.mkdir()
    run = run_process([sys.executable, "-m", "benchmarks.ingest", "--loop", str(path), "--work-dir", str(out)])
    steps = json.loads((out / "steps.json").read_text())
    shutil.rmtree(out)
    return {**run, "steps": {name: round(seconds, 2) for name, seconds in steps.items()}}


def render(result: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = [
        "# Ingest",
        "",
        f"Memory limit {result['memory_limit']}. Peak memory is of the whole process.",
        "",
        "| triples | entities | input | graph | seconds | triples/s | peak memory |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['lines']:,} | {row['entities']:,} | {row['input_gb']} GB | {row['graph_gb']} GB "
        f"| {row['seconds']:.1f} | {row['triples_per_second']:,} | {row['peak_memory_gb']:.2f} GB |"
        for row in result["ingest"]
    ]
    if "comparison" in result:
        loop = result["comparison"]
        steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in loop["loop"]["steps"].items())
        lines += [
            "",
            f"Against a plain Python loop on {loop['lines']:,} triples: {loop['loop']['seconds']:.1f} s ({steps}; peak "
            f"{loop['loop']['peak_memory_gb']:.2f} GB) to {loop['ingest_seconds']:.1f} s: **{loop['ratio']:.1f} times "
            "faster**. The loop leaves neither sorted ids, splits, an index nor checksums.",
        ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--sizes", default="1e6,1e7,1e8", show_default=True, help="Numbers of lines.")
@click.option("--compare", default="1e7", show_default=True, help="Size at which the plain loop runs too; 0: none.")
@click.option("--memory-limit", default="4GB", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs up to 10 million lines; larger ones run once.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Where inputs and graphs go.  [default: temporary]")
@click.option("--name", default="ingest", show_default=True, help="Name of the files in results/.")
@click.option("--loop", type=click.Path(path_type=Path), hidden=True)
def main(
    sizes: str, compare: str, memory_limit: str, repeats: int, work_dir: Path | None, name: str, loop: Path | None
) -> None:
    """Measure ingest and write benchmarks/results/NAME.json and NAME.md."""
    if loop:
        assert work_dir is not None
        (work_dir / "steps.json").write_text(json.dumps(plain_loop(loop, work_dir)))
        return
    packages = ("duckdb", "numpy", "pyarrow")
    result: dict[str, Any] = {"stamp": record.stamp(packages), "memory_limit": memory_limit, "ingest": []}
    with tempfile.TemporaryDirectory(prefix="bench-ingest-", dir=work_dir) as folder:
        for triples in (int(float(size)) for size in sizes.split(",")):
            path = make_input(Path(folder), triples)
            row = measure_ingest(path, triples, memory_limit, repeats if triples <= 10**7 else 1)
            result["ingest"].append(row)
            if triples == int(float(compare)):
                measured = measure_loop(path, Path(folder))
                ratio = measured["seconds"] / row["seconds"]
                result["comparison"] = {
                    "lines": triples,
                    "loop": measured,
                    "ingest_seconds": row["seconds"],
                    "ratio": round(ratio, 2),
                }
            path.unlink()
            click.echo(json.dumps(row), err=True)
    record.write(name, result, render(result))


if __name__ == "__main__":
    main()
