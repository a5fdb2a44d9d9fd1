"""Every way to start a run: it trains, or says in one line why it cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sattle_dist import training
from sattle_dist.cli import main
from tests.launching import NUM_ENTITIES, ROOT, SMALL, TORCHRUN, TRAIN, WAYS, running, small_graph, trained

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same_run_and_reports(way: str) -> None:
    code, out, history, test = trained(way)
    assert code == 0
    assert f"; {way[0]} process" in out
    assert f"MRR      {test['mrr']:.4f}" in out
    _, _, expected, expected_test = trained("1 process, torchrun")
    assert [record["loss"] for record in history] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    assert test == pytest.approx(expected_test, rel=5e-3, abs=2e-3)


def test_nproc_that_contradicts_torchrun_is_refused_in_one_line(tmp_path: Path) -> None:
    arguments = [*TORCHRUN, "--nproc-per-node", "2", TRAIN, "--nproc", "3", "--graph", str(small_graph(tmp_path))]
    with running([*arguments, *SMALL], tmp_path) as command:
        code, errors = command.end()
    assert code == 2
    said = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert "--nproc 3 contradicts torchrun, which started 2 processes" in said[0]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        (
            ["--nproc", str(NUM_ENTITIES + 1), "--device", "cpu"],
            0,
            f"{NUM_ENTITIES + 1} processes cannot share {NUM_ENTITIES} entities; use --nproc {NUM_ENTITIES} or fewer",
        ),
        (["--device", "cuda"], 0, "--device cuda: torch finds no GPU on this machine; use --device cpu"),
        (["--device", "cuda", "--nproc", "2"], 0, "--device cuda: torch finds no GPU on this machine"),
        (["--device", "cuda", "--nproc", "4"], 2, "4 processes need a GPU each, this machine has 2; use --nproc 2"),
        (["--device", "auto", "--nproc", "4"], 2, "4 processes need a GPU each, this machine has 2; use --nproc 2"),
    ],
)
def test_more_processes_than_entities_or_gpus_are_refused_in_one_line(
    options: list[str], gpus: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    run = tmp_path / "run"
    result = CliRunner().invoke(main, ["train", "--graph", str(small_graph(tmp_path)), "--out", str(run), *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not run.exists()


def test_one_process_stays_one_where_there_are_more_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that may start its one worker again tells it so: by itself it would start one for each GPU."""
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(training, "run_workers", lambda *given, **more: started.append(given) or 0)
    run = tmp_path / "run"
    options = ["--graph", str(small_graph(tmp_path)), "--out", str(run), "--nproc", "1", "--max-restarts", "2"]
    result = CliRunner().invoke(main, ["train", *options])
    assert result.exit_code == 0
    assert started == [(["train", "--config", str(run / "config.toml"), "--nproc", "1"], 1)]


def test_slurm_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "launchers" / "slurm.sbatch")], check=True, timeout=30)
