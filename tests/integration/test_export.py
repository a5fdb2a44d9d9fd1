"""Exported vectors, read back by the tools they are meant for, are the very numbers of the checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open

from sattle_dist import export as export_module
from sattle_dist.cli import main
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.graph import Graph
from sattle_dist.run import open_run, prepare_run_dir
from sattle_dist.trainer import Trainer
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

N, R, DIM = 131, 5, 8  # 131 rows on 3 processes: 44, 44 and 43
SETTINGS = {"dim": DIM, "num_heads": 2, "dim_key": 4, "dim_value": 4, "dim_hidden": 8, "epochs": 1, "device": "cpu"}
FILES = {
    "parquet": {"entities.parquet", "relations.parquet"},
    "safetensors": {"entities.safetensors", "entities.tsv", "relations.tsv"},
    "npy": {"vectors.npy", "bias.npy", "relations.npy", "entities.tsv", "relations.tsv"},
    "tsv": {"entities.tsv", "relations.tsv"},
}


def train(group: Group, graph: str, run: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train one epoch on this rank; give its rows and biases, and the relations."""
    config = Config().override({**SETTINGS, "graph": graph, "out": run}, "test")
    if group.rank == 0:
        prepare_run_dir(Path(run), config, Graph.open(Path(graph)))
    group.barrier()
    Trainer(config, Graph.open(Path(graph)), Path(run), group, torch.device("cpu")).run()
    learner, _, _ = open_run(Path(run), group, torch.device("cpu"))
    tensors = (learner.table.rows, learner.table.bias, learner.model.relations)
    rows, bias, relations = (tensor.detach().numpy() for tensor in tensors)
    return rows, bias, relations


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """A run of three processes, and what they held in memory: vectors [N, D], bias [N], relations [2R, D]."""
    folder = tmp_path_factory.mktemp("export")
    splits = random_splits(0, num_entities=N, num_relations=R, num_triples=600)
    graph = write_graph(folder / "g", splits, num_entities=N, num_relations=R)
    ranks = run_processes(3, train, str(graph), str(folder / "run"))
    return folder / "run", np.concatenate([r[0] for r in ranks]), np.concatenate([r[1] for r in ranks]), ranks[0][2]


def export(run: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", str(run), *map(str, arguments)])


@pytest.mark.parametrize("format", FILES)
def test_every_format_holds_the_very_numbers(
    format: str,
    trained: tuple[Path, np.ndarray, np.ndarray, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in batches of 5 rows, which end in the middle of the processes' files."""
    run, vectors, bias, relations = trained
    monkeypatch.setattr(export_module, "BATCH_BYTES", 5 * DIM * 4)
    out = tmp_path / "out"
    done = export(run, "--format", format, "--out", out)
    assert done.exit_code == 0, done.output
    assert {file.name for file in out.iterdir()} == FILES[format] | {"model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    labels = [f"e{i}" for i in range(N)]
    if format == "parquet":
        check_parquet(out, vectors, bias, relations)
    elif format == "safetensors":
        with safe_open(out / "entities.safetensors", "numpy") as tensors:
            assert (tensors.get_tensor("vector") == vectors).all()
            assert (tensors.get_tensor("bias") == bias).all()
    elif format == "npy":
        found = {name: np.load(out / f"{name}.npy") for name in ("vectors", "bias", "relations")}
        for name, expected in (("vectors", vectors), ("bias", bias), ("relations", relations)):
            assert found[name].dtype == np.float32
            assert (found[name] == expected).all()
    else:
        rows = [line.split("\t") for line in (out / "entities.tsv").read_text().splitlines()]
        numbers = np.array([row[2:] for row in rows], np.float32)
        assert (numbers[:, 0] == bias).all()
        assert (numbers[:, 1:] == vectors).all()
        rows = [line.split("\t") for line in (out / "relations.tsv").read_text().splitlines()]
        assert (np.array([row[2:] for row in rows], np.float32) == relations).all()
        assert [row[1] for row in rows[:R]] == [f"r{i}" for i in range(R)]
    if "entities.tsv" in FILES[format]:
        lines = [line.split("\t")[:2] for line in (out / "entities.tsv").read_text().splitlines()]
        assert lines == [[str(i), label] for i, label in enumerate(labels)]
    with safe_open(out / "model.safetensors", "numpy") as tensors:
        assert (tensors.get_tensor("relations") == relations).all()
        assert any(name.startswith("encoder.") for name in tensors.keys())  # noqa: SIM118
        assert tomllib.loads(tensors.metadata()["config"])["model"]["dim"] == DIM
        assert tensors.metadata()["epoch"] == "1"


def check_parquet(out: Path, vectors: np.ndarray, bias: np.ndarray, relations: np.ndarray) -> None:
    """Read with pyarrow, pandas and DuckDB."""
    table = pq.read_table(out / "entities.parquet")
    assert str(table.schema.field("vector").type) == f"fixed_size_list<element: float>[{DIM}]"
    frame = pd.read_parquet(out / "entities.parquet")
    ordered = duckdb.sql(f"SELECT * FROM '{out}/entities.parquet' ORDER BY entity_id")
    arrays = duckdb.sql(f"SELECT vector::FLOAT[{DIM}] FROM '{out}/entities.parquet' ORDER BY entity_id").fetchall()
    by_tool = {
        "pyarrow": (table["vector"].to_pylist(), table["bias"].to_pylist(), table["label"].to_pylist()),
        "pandas": (np.stack(frame["vector"].to_list()), frame["bias"].to_list(), frame["label"].to_list()),
        "duckdb": tuple([row[i] for row in ordered.fetchall()] for i in (2, 3, 1)),
        "duckdb arrays": ([row[0] for row in arrays], bias, [f"e{i}" for i in range(N)]),
    }
    for tool, (found, found_bias, labels) in by_tool.items():
        assert (np.array(found, np.float32) == vectors).all(), tool
        assert (np.array(found_bias, np.float32) == bias).all(), tool
        assert list(labels) == [f"e{i}" for i in range(N)], tool
    found = pq.read_table(out / "relations.parquet").to_pydict()
    assert (np.array(found["vector"], np.float32) == relations[:R]).all()
    assert (np.array(found["inverse_vector"], np.float32) == relations[R:]).all()
    nearest = duckdb.sql(
        "SELECT other.entity_id FROM (SELECT * FROM ordered) one, (SELECT * FROM ordered) other "
        "WHERE one.entity_id = 0 AND other.entity_id <> 0 "
        "ORDER BY list_cosine_similarity(one.vector, other.vector) DESC LIMIT 5"
    ).fetchall()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert [row[0] for row in nearest] == np.argsort(-(unit[1:] @ unit[0]))[:5].__add__(1).tolist()


def test_an_export_is_replaced_only_on_demand(
    trained: tuple[Path, np.ndarray, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run, *_ = trained
    out = tmp_path / "out"
    assert export(run, "--format", "npy", "--out", out).exit_code == 0
    refused = export(run, "--out", out)
    assert refused.exit_code == 2
    assert "is there already; choose another --out, or replace it with --force" in refused.stderr
    assert export(run, "--out", out, "--force").exit_code == 0
    assert not (out / "vectors.npy").exists()
    link = tmp_path / "link"
    link.symlink_to(out)
    for _ in range(2):  # what is behind a link is replaced
        assert export(run, "--format", "npy", "--out", link, "--force").exit_code == 0
        assert link.is_symlink()
        assert (out / "vectors.npy").exists()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("years of work")
    refused = export(run, "--out", tmp_path / "own", "--force")
    assert refused.exit_code == 2
    assert "was not written by `sattle export` and would be lost" in refused.stderr
    assert (tmp_path / "own" / "thesis.txt").exists()
    (out / "tokenizer.json").write_text("{}")  # model.safetensors is a name that others use too
    refused = export(run, "--out", out, "--force")
    assert refused.exit_code == 2
    assert "holds tokenizer.json, which is no part of an export and would be lost" in refused.stderr
    assert (out / "tokenizer.json").exists()
    missing = export(tmp_path / "none")
    assert (missing.exit_code, "no run at" in missing.stderr) == (2, True)


def test_a_missing_piece_is_noticed(trained: tuple[Path, np.ndarray, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    from sattle_dist.checkpoint import CheckpointError, latest
    from sattle_dist.stored import StoredTensors

    for file in sorted(latest(trained[0]).glob("*.safetensors"))[1:]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="is damaged"):
        StoredTensors(tmp_path).whole("table.rows")
