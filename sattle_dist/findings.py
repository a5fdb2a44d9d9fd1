"""What a run has left behind, read for its report: metrics per epoch and of test, positions summed up by DuckDB."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from ingest.database import parquet
from sattle_dist import checkpoint
from sattle_dist.config import Config, ConfigError, load_toml
from sattle_dist.graph import Graph
from sattle_dist.run import newest_readable, open_graph

POSITION_ENDS = (1, 2, 3, 5, 10, 20, 50, 100, 1000, 10_000, 100_000, 1_000_000)
RECORDED = {"epoch", "loss", "learning_rate", "queries_per_second", "seconds"}  # of every epoch, in metrics.jsonl
POSITIONS = "test_positions.parquet"


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Test facts of a range of positions or degrees."""

    name: str
    start: int
    count: int
    mrr: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    run_dir: Path
    config: Config
    config_text: str
    graph: Graph
    epochs: list[dict[str, Any]]  # the lines of metrics.jsonl
    test: dict[str, Any]  # test.json, or nothing
    by_position: list[Bin]
    by_degree: list[Bin]  # of the answer, in train


def read_findings(run_dir: Path) -> Findings:
    """Read what is there of a run; whatever the training has not written yet is empty."""
    if not (run_dir / "config.toml").is_file():
        checkpoint.latest(run_dir)  # says in one line what is wrong with a folder that is no run
    try:
        config_text = (run_dir / "config.toml").read_text(encoding="utf-8")
        epochs = read_lines(run_dir / "metrics.jsonl")
        test = json.loads(text) if (text := read_text(run_dir / "test.json")) else {}
        if not isinstance(test, dict):
            raise ValueError("test.json is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the results in {run_dir} cannot be read: {error}") from None
    config = load_toml(run_dir / "config.toml", Config())
    facts = newest_readable(checkpoint.list_checkpoints(run_dir))
    graph = open_graph(run_dir, config, facts) if facts else Graph.open(Path(config.run.graph))
    by_position, by_degree = summarise(run_dir / POSITIONS, graph) if (run_dir / POSITIONS).is_file() else ([], [])
    return Findings(
        run_dir=run_dir,
        config=config,
        config_text=config_text,
        graph=graph,
        epochs=epochs,
        test=test,
        by_position=by_position,
        by_degree=by_degree,
    )


def read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a last line that is being written is left out."""
    lines = [json.loads(line) for line in read_text(file).splitlines(keepends=True) if line.endswith("\n")]
    if not all(isinstance(line, dict) and line.keys() >= RECORDED for line in lines):
        raise ValueError(f"{file.name} has a line that is no epoch's record")
    return lines


def summarise(positions: Path, graph: Graph) -> tuple[list[Bin], list[Bin]]:
    """Count test facts by their position, and take their mean reciprocal position by the degree of the answer."""
    ends = [end for end in POSITION_ENDS if end < graph.num_entities] + [graph.num_entities]
    whens = " ".join(f"WHEN position <= {end} THEN {place}" for place, end in enumerate(ends))
    facts = (
        f"SELECT *, CASE direction WHEN 'target' THEN target_id ELSE source_id END AS answer FROM {parquet(positions)}"
    )
    degrees = "SELECT entity_id, num_train_as_source + num_train_as_target AS degree FROM "
    degrees += parquet(graph.path / "entities.parquet")
    power = "CASE WHEN degree = 0 THEN 0 ELSE (2 ** floor(log2(degree)))::BIGINT END"  # the power of two at or below
    figures = "count(*), avg(1 / position)"
    try:
        with duckdb.connect(":memory:") as connection:
            by_position = connection.execute(
                f"SELECT CASE {whens} ELSE {len(ends) - 1} END AS place, {figures} FROM ({facts}) GROUP BY 1 ORDER BY 1"
            ).fetchall()
            by_degree = connection.execute(
                f"SELECT {power} AS start, {figures} FROM ({facts}) JOIN ({degrees}) ON entity_id = answer "
                "GROUP BY 1 ORDER BY 1"
            ).fetchall()
    except duckdb.Error as error:
        raise ConfigError(f"{positions} cannot be used: {' '.join(str(error).split())}") from None
    counted = {place: (count, mrr) for place, count, mrr in by_position}
    last = max(counted, default=-1)
    starts = [1, *(end + 1 for end in ends)]
    return [
        Bin(
            name=span(starts[place], ends[place] if place + 1 < len(ends) else None),
            start=starts[place],
            count=counted.get(place, (0, 0))[0],
            mrr=counted.get(place, (0, 0))[1],
        )
        for place in range(last + 1)
    ], [
        Bin(name=span(start, max(0, 2 * start - 1)), start=start, count=count, mrr=mrr)
        for start, count, mrr in by_degree
    ]


def span(first: int, last: int | None) -> str:
    """Write a range of whole numbers shortly: 7, 11-20, 101-1k, 10k+."""

    def short(value: int) -> str:
        if value >= 1_000_000:
            return f"{value / 1e6:.3g}M"
        return f"{value / 1e3:.3g}k" if value >= 1000 else str(value)

    if last is None:
        return f"{short(first)}+"
    return short(first) if first == last else f"{short(first)}-{short(last)}"
