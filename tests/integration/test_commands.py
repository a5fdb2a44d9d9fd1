"""The commands as a user types them: the built-in graph end to end, and one clear line for what a user gets wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
import torch
from click.testing import CliRunner

from sattle_dist.cli import main
from sattle_dist.config import Config, load_toml
from sattle_dist.graph import Graph, GraphError
from sattle_dist.run import HEAD, lock_run_dir
from tests.graphs import random_splits, write_graph

ROOT = Path(__file__).parent.parent.parent
TINY = [
    *("--dim", "8", "--num-heads", "2", "--dim-key", "4", "--dim-value", "4", "--dim-hidden", "8"),
    *("--epochs", "2", "--threads", "1"),
]


def sattle(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SATTLE_CACHE": str(cwd / "cache"), **environment}
    command = [sys.executable, "-m", "sattle_dist.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_builtin_graph_is_nearly_solved(families_run: Path) -> None:
    test = json.loads((families_run / "run" / "test.json").read_text())["metrics"]
    assert test["mrr"] >= 0.9
    assert 0 <= test["hits@1"] <= test["hits@3"] <= test["hits@10"] <= 1
    epochs = [json.loads(line) for line in (families_run / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in epochs] == list(range(1, len(epochs) + 1))
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 3
    assert "valid" in epochs[-1]


def test_eval_of_a_run_gives_the_metrics_of_its_training(families_run: Path) -> None:
    """In this process alone: positions, JSON and table agree with each other and with what training wrote."""
    run, file = families_run / "run", families_run / "positions.parquet"
    files = ["--json", str(families_run / "test.json"), "--positions", str(file)]
    done = CliRunner().invoke(main, ["eval", str(run), *files, "--bootstrap", "9", "--threads", "1"])
    assert done.exit_code == 0, done.output
    expected, found = (json.loads((folder / "test.json").read_text()) for folder in (run, families_run))
    assert found["metrics"] == expected["metrics"]
    assert found["by_relation"] == expected["by_relation"]
    assert found["protocol"] == expected["protocol"]
    low, high = found["bootstrap"]["intervals"]["mrr"]
    assert low <= found["metrics"]["mrr"] <= high
    assert f"{found['metrics']['mrr']:.4f}" in done.stdout
    query = f"SELECT direction, avg(1 / position), count(*) FROM '{file}' GROUP BY 1"
    for direction, mrr, count in duckdb.sql(query).fetchall():
        assert found["by_direction"][direction]["mrr"] == pytest.approx(mrr)
        assert found["by_direction"][direction]["count"] == count
    assert file.read_bytes() == (run / "test_positions.parquet").read_bytes()


def test_eval_in_two_processes_under_torchrun(families_run: Path) -> None:
    """The whole command in real processes, with other rules than the run's own."""
    rules = ["--split", "valid", "--ties", "mean", "--raw"]
    script = [sys.executable, ROOT / "launchers" / "torchrun.py", "--nproc-per-node", "2", ROOT / "launchers/eval.py"]
    command = [*script, "run", *rules, "--json", "two.json", "--threads", "1", "--device", "cpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    two = subprocess.run(
        command, cwd=families_run, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert two.returncode == 0, two.stderr
    one = CliRunner().invoke(
        main, ["eval", str(families_run / "run"), *rules, "--json", str(families_run / "one.json"), "--threads", "1"]
    )
    assert one.exit_code == 0, one.output
    results = [json.loads((families_run / f"{name}.json").read_text()) for name in ("one", "two")]
    assert results[0]["protocol"] == results[1]["protocol"]
    assert results[0]["protocol"]["filter"] == []
    assert results[1]["metrics"] == pytest.approx(results[0]["metrics"], rel=1e-6)
    assert two.stdout.count("MRR") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run at nowhere; train one with `sattle train --out nowhere`"),
        (["{run}", "--json", "no/such/f.json"], "--json no/such/f.json cannot be written (No such file or directory)"),
        (["{run}", "--positions", "{run}"], "--positions {run} cannot be written (it is a directory)"),
        (["{empty}"], "has no test triples; use --split train"),
        (["{changed}"], "has changed since {changed} was trained on it"),
        (["{gone}"], "{gone} needs the graph that it was trained on: no graph at"),
        (["{run}", "--checkpoint", "epoch-7"], "holds no checkpoint 'epoch-7'; it holds epoch-00"),
        (["{run}", "--nproc", "100000", "--device", "cpu"], "100000 processes cannot share"),
    ],
    ids=["no run", "no folder", "a folder", "empty split", "changed", "gone", "no checkpoint", "too many processes"],
)
def test_eval_refuses_in_one_line(
    arguments: list[str], message: str, families_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is ranked."""
    run = families_run / "run"
    graph = write_graph(tmp_path / "g", {"train": [(0, 0, 1)]}, num_entities=2, num_relations=1)
    other = write_graph(tmp_path / "other", {"train": [(0, 0, 1)]}, num_entities=2, num_relations=1)
    known = Graph.open(Path(load_toml(run / "config.toml", Config()).run.graph)).checksum
    manifest = json.loads((graph / "manifest.json").read_text())
    (graph / "manifest.json").write_text(json.dumps({**manifest, "checksum": known}))  # as if it were the run's own
    text = (run / "config.toml").read_text()
    for copy, place in (("empty", graph), ("changed", other), ("gone", tmp_path / "gone.graph")):
        shutil.copytree(run, tmp_path / copy)
        (tmp_path / copy / "config.toml").write_text(re.sub("graph = .*", f'graph = "{place}"', text))
    monkeypatch.setattr("sattle_dist.run.open_run", None)
    words = {"run": str(run), **{name: str(tmp_path / name) for name in ("empty", "changed", "gone")}}
    done = CliRunner().invoke(main, ["eval", *(argument.format(**words) for argument in arguments)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message.format(**words) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_predicts_a_held_out_fact(families_run: Path) -> None:
    done = sattle("predict", "run", "--source", "iris_baker", "--relation", "mother_of", "--top", "3", cwd=families_run)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert {row[1] for row in rows} == {"olga_baker", "vera_baker", "elena_baker"}
    assert [row[4] for row in rows if row[1] == "elena_baker"] == ["test"]
    scores = [float(row[2]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_near_names_are_suggested(families_run: Path) -> None:
    done = sattle("predict", "run", "--source", "iris_bakr", "--relation", "mother_of", cwd=families_run)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no entity is called 'iris_bakr'; did you mean 'iris_baker'")
    done = sattle("predict", "run", "--source", "iris_baker", "--relation", "mother", cwd=families_run)
    assert done.returncode == 2
    assert "no relation is called 'mother'; did you mean 'mother_of'" in done.stderr


def test_finished_run_is_reported_again(families_run: Path) -> None:
    """The same command on a finished run trains nothing more and shows its metrics."""
    before = (families_run / "run" / "metrics.jsonl").read_text()
    done = sattle("train", "--out", "run", "--threads", "1", cwd=families_run)
    assert done.returncode == 0, done.stderr
    assert "resuming after epoch 40 of 40" in done.stdout
    assert (families_run / "run" / "metrics.jsonl").read_text() == before
    other = sattle("train", "--out", "run", "--dim", "32", cwd=families_run)
    assert other.returncode == 2
    assert "dim was 64, is 32" in other.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    splits = random_splits(0, num_entities=20, num_relations=2, num_triples=60)
    write_graph(folder / "g", splits, num_entities=20, num_relations=2)
    (folder / "bad.toml").write_text("[model]\ndimm = 3\n")
    (folder / "empty").mkdir()
    (folder / "newer").mkdir()
    (folder / "newer" / "manifest.json").write_text('{"format": "sattle-graph", "format_version": 99}')
    (folder / "damaged").mkdir()
    (folder / "damaged" / "manifest.json").write_text('{"format": "sattle-graph", "format_version": 1}')
    (folder / "file").write_text("")
    (folder / "flat.toml").write_text("epochs = 3\n")
    (folder / "graph.toml").write_text("[run]\ngraph = 'g'\n")
    write_graph(folder / "no-valid", {**splits, "valid": []}, num_entities=20, num_relations=2)
    (folder / "own").mkdir()
    (folder / "own" / "config.toml").write_text("[model]\ndim = 3\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--graph", "none"], "no graph at"),
        (["train", "--graph", "empty"], "is not a graph directory (it has no manifest.json)"),
        (["train", "--graph", "newer"], "has format version 99, this release reads 1"),
        (["train", "--graph", "damaged"], "manifest.json is damaged"),
        (["train", "--config", "bad.toml"], "bad.toml: unknown setting 'dimm'"),
        (["train", "--config", "none.toml"], "none.toml"),
        (["train", "--graph", "g", "--dim", "0"], "dim must be at least 1, got 0"),
        (["train", "--graph", "g", "--dropout-input", "1.5"], "dropout_input must be at most 0.99, got 1.5"),
        (["train", "--graph", "g", "--seed", str(2**64)], "seed must be at most"),
        (["train", "--graph", "g", "--epochs", "9" * 400], "epochs must be at most"),
        (["train", "--graph", "x" * 300], "File name too long"),
        (["train", "--graph", "g", "--out", "x" * 300], "File name too long"),
        (
            ["train", "--graph", "g", "--teacher", "none," * 60 + "none"],
            "none, and no recipe 'none'",
        ),
        (["train", "--graph", "g", "--out", "own"], "was not written by a run and would be overwritten"),
        (["train", "--graph", "g", "--patience", "2", "--eval-every", "0"], "--eval-every must be at least 1"),
        (
            ["train", "--graph", "g", "--settled-discount", "1"],
            "--settled-discount 1 goes with a --teacher and --loss filtered, got 'softmax' without a teacher",
        ),
        (
            ["train", "--graph", "g", "--resume", "latest", "--out", "empty"],
            "empty holds no checkpoint; leave --resume",
        ),
        (["train", "--graph", "g", "--grow-from", "none", "--out", "grown"], "no run at"),
        (["train", "--graph", "g", "--teacher", "none", "--out", "taught"], "no run at"),
        (["train", "--graph", "g", "--teacher", "none", "--loss", "bce", "--out", "bce"], "--teacher goes with"),
        (["plan", "g", "--devices", "20"], "--devices 20 would start as many processes here"),
        (["plan", "g", "--teacher", "none"], "none is no run: it has no readable config.toml"),
        (["plan", "g", "--teacher", "families,"], "has a comma without a run or recipe on both sides of it"),
        (["train", "--graph", "g", "--nproc", "21"], "21 processes cannot share 20 entities; use --nproc 20"),
        (["train", "--graph", "g", "--out", "file/run"], "Not a directory"),
        (["train", "--graph", "g", "--device", "cuda"], "--device cuda"),
        (["train", "--graph", "g", "--dim", "abc"], "'abc' is not a valid integer"),
        (["train", "--recipe", "nonsense"], "'nonsense' is not"),
        (["train", "--graf", "g"], "No such option"),
        (["train", "--graph", "g", "--teacher-weight", "2"], "--teacher-weight 2 would have no effect: it goes with a"),
        (["train", "--graph", "g", "--decay-until", "3"], "--decay-until 3 would have no effect: it goes with --sched"),
        (
            ["train", "--graph", "g", "--loss", "kvsall", "--weight-power", "0.5"],
            "goes with another --loss than kvsall",
        ),
        (["train", "--config", "graph.toml", "--dataset", "WN18RR"], "give either --graph or --dataset, not both"),
        (["train", "--config", "flat.toml"], "flat.toml: epochs belongs in the section [train]"),
        (["train", "--graph", ""], "--graph is empty; name a directory, or leave it away"),
        (["train", "--graph", "g", "--out", ""], "--out is empty"),
        (["train", "--graph", "g", "--out", "file"], "file is a file; choose another --out"),
        (["train", "--graph", "no-valid", "--patience", "2"], "--patience 2 needs valid triples"),
        (["eval", "g"], "g is a graph, not a run"),
        (["eval", "file"], "file is a file, not the directory of a run"),
        (["report", "file"], "file is a file, not the directory of a run"),
        (["report", "none"], "no run at none"),
        (["eval", "empty", "--score-memory", "-5"], "score_memory must be at least 0, got -5"),
        (["predict", "none", "--source", "a", "--relation", "b"], "no run at none"),
        (["predict", "empty", "--source", "a", "--relation", "b"], "holds no checkpoint yet"),
    ],
)
def test_one_clear_line(arguments: list[str], message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    done = CliRunner().invoke(main, arguments)
    assert isinstance(done.exception, SystemExit), done.exception  # anything else would be a traceback
    assert done.exit_code == 2
    said = done.stderr.splitlines()
    if said[0].startswith("Usage:"):  # click's own: the usage, a hint to --help, then the error
        said = said[-1:]
    assert len(said) == 1
    assert message in said[0]


def test_diverging_training_stops_with_the_step(tiny: Path) -> None:
    done = sattle("train", "--graph", "g", "--out", "diverged", "--learning-rate", "1e30", *TINY, cwd=tiny)
    assert done.returncode == 4
    assert re.search(r"a gradient was not finite at epoch \d, step 1; no checkpoint had been written", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_run_directory_in_use_is_left_as_it_is(tiny: Path) -> None:
    """Another command with the same --out must not overwrite the settings of the run that trains there."""
    for nproc in ("1", "2"):
        run = tiny / f"busy-{nproc}"
        run.mkdir()
        (run / "config.toml").write_text(HEAD + "[train]\nseed = 5\n")
        (run / "metrics.jsonl").write_text("{}\n")
        with lock_run_dir(run):  # type: ignore[attr-defined]
            done = sattle("train", "--graph", "g", "--out", run, "--nproc", nproc, *TINY, cwd=tiny)
        assert done.returncode == 2
        assert "another process is training in" in done.stderr
        assert (run / "config.toml").read_text() == HEAD + "[train]\nseed = 5\n"
        assert (run / "metrics.jsonl").exists()


def test_files_of_another_hand_are_not_replaced(tiny: Path) -> None:
    for name in ("metrics.jsonl", "test.json", "test_positions.parquet"):
        folder = tiny / f"own-{name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        done = sattle("train", "--graph", "g", "--out", folder, *TINY, cwd=tiny)
        assert done.returncode == 2
        assert f"{folder / name} was not written by a run and would be lost; choose another --out" in done.stderr
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


def test_a_graph_and_a_dataset_are_refused(tiny: Path) -> None:
    done = sattle("train", "--graph", "g", "--dataset", "FB15k-237", *TINY, cwd=tiny)
    assert done.returncode == 2
    assert "give either --graph or --dataset, not both (got g and FB15k-237)" in done.stderr


def test_counts_that_are_not_the_graphs_are_refused(tmp_path: Path) -> None:
    splits = random_splits(0, num_entities=9, num_relations=2, num_triples=30)
    graph = write_graph(tmp_path / "g", splits, num_entities=9, num_relations=2)
    manifest = json.loads((graph / "manifest.json").read_text())
    for name, table in (("num_entities", "entities"), ("num_relations", "relations")):
        (graph / "manifest.json").write_text(json.dumps({**manifest, name: 50}))
        with pytest.raises(GraphError, match=rf"{table}.parquet has {manifest[name]} rows, its manifest says 50"):
            Graph.open(graph)
    (graph / "manifest.json").write_text(json.dumps(manifest))
    (graph / "index" / "split=train" / "offsets.npy").write_bytes(b"")
    with pytest.raises(GraphError, match="cannot be read"):
        Graph.open(graph).index("train")


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock_run_dir(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} cannot be locked ([Errno {errno.ENOSYS}] Function not implemented); see to it")


def test_help_teaches(tiny: Path) -> None:
    text = sattle("train", "--help", cwd=tiny).stdout
    for word in ("--learning-rate", "[default: 0.003]", "resumed", "twomult|twomult-source|tucker"):
        assert word in text


def test_bf16_trains_or_falls_back(tiny: Path) -> None:
    done = sattle("train", "--graph", "g", "--out", "bf16", "--precision", "bf16", *TINY, cwd=tiny)
    assert done.returncode == 0, done.stderr
    assert "MRR" in done.stdout
    used = "float32" if "going on in float32" in done.stderr else "bf16"
    assert f'precision = "{used}"' in (tiny / "bf16" / "config.toml").read_text()


def test_a_killed_probe_means_float32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A product that kills its process (SIGILL here) is found out in a child, and the run goes on in float32."""
    from sattle_dist import precision

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(precision, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert precision.usable_precision("bf16", "cpu") == "float32"
    assert "killed by signal 4" in capsys.readouterr().err


def test_a_cpu_without_bf16_means_float32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By what the CPU says it has, never by a clock; where it has it, and it works, it is used."""
    from sattle_dist import precision

    monkeypatch.setattr(precision, "_PROBE", "")
    for has_it, used in ((False, "float32"), (True, "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has_it=has_it: {"avx2": True, "avx512_bf16": has_it})
        assert precision.usable_precision("bf16", "cpu") == used
    assert capsys.readouterr().err.count("no instructions for it") == 1


def test_a_gpu_that_only_emulates_bf16_means_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from sattle_dist import precision

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert precision.usable_precision("bf16", "cuda") == "float32"
