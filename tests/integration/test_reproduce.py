"""The record of the reproduction: run, resumed, collected and shown, with runs written by hand where that is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import reproduce, reproduction_page
from benchmarks.reproduce import JOBS, Job, Sittings, collect
from sattle_dist.config import load_recipe, to_toml
from sattle_dist.teacher import names, with_absolute_paths
from tests.graphs import random_splits, write_graph
from tests.launching import ROOT

TEST = {"mrr": 0.3611, "hits@1": 0.2681, "hits@3": 0.3969, "hits@10": 0.5451}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the repository's own record out of it."""
    monkeypatch.setattr(reproduce, "RESULT", tmp_path / "reproduction.json")
    for name in ("PAGE", "PLOT", "TUNING", "AUTHORS"):
        place = tmp_path / f"{name.lower()}{'.png' if name == 'PLOT' else ''}"
        monkeypatch.setattr(reproduction_page, name, place)


def write_run(run_dir: Path, job: Job, epochs: int, *, tested: bool, changed: dict[str, Any] | None = None) -> None:
    """Write a run directory as a training would leave it: valid MRR 0.01 times the epoch, at every tenth."""
    run_dir.mkdir(parents=True)
    config = job.config().override(changed or {}, "test")
    (run_dir / "config.toml").write_text(to_toml(config.override(with_absolute_paths(config), "test")))
    lines = []
    for epoch in range(1, epochs + 1):
        valid = {"valid": {"mrr": epoch / 100}} if epoch % 10 == 0 else {}
        lines.append(json.dumps({"epoch": epoch, "loss": 1.0, "seconds": 2.0, **valid}))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if tested:
        content = {"protocol": {"epoch": epochs - 1}, "metrics": TEST}
        (run_dir / "test.json").write_text(json.dumps(content))


def shown(runs: Path, *arguments: str) -> str:
    result = CliRunner().invoke(reproduce.main, ["--runs", str(runs), *arguments])
    assert result.exit_code == 0, result.output
    return reproduction_page.PAGE.read_text()


def line(page: str, start: str) -> str:
    return next(text for text in page.splitlines() if text.startswith(start))


def test_what_was_run_is_shown_and_the_rest_says_so(tmp_path: Path) -> None:
    fast = JOBS["fb15k237-twomult-100-fast"]
    write_run(tmp_path / "runs/fb15k237-twomult-100-fast", fast, fast.config().train.epochs, tested=True)
    write_run(tmp_path / "runs/wn18rr-tucker-32-fast", JOBS["wn18rr-tucker-32-fast"], 25, tested=False)
    page = shown(tmp_path / "runs")
    row = line(page, "| FB15k-237 | TwoMult | 100 | 0.360 (0.268 / 0.396 / 0.545) |")
    assert "**0.361** (0.268 / 0.397 / 0.545)" in row
    assert "time not measured" in row
    assert row.endswith("| not run yet |")
    assert "unfinished: epoch 25 of" in line(page, "| WN18RR | Tucker | 32")
    assert "valid MRR 0.200 at 20" in line(page, "| WN18RR | Tucker | 32")
    assert line(page, "| WN18RR | TwoMult").count("not run yet") == 2
    assert (
        line(page, "| ours, TwoMult | 100 |")
        == "| ours, TwoMult | 100 | 1.5 / 4.1 | 1.48 / 1.12 | **0.361** | not run yet |"
    )
    assert line(page, "| 64 | 1.50 M") == "| 64 | 1.50 M | 1,484,085 | 0.360 | not run yet |"
    assert line(page, "| 16 | 0.70 M").endswith("| 0.355 | not run yet |")


def test_the_record_outlives_the_runs(tmp_path: Path) -> None:
    job = JOBS["heads-4"]
    write_run(tmp_path / "runs/heads-4", job, job.config().train.epochs, tested=True)
    before = shown(tmp_path / "runs")
    assert line(before, "| 4 | 0.50 M").endswith("| 0.361 |")
    assert shown(tmp_path / "nowhere") == before
    recorded = json.loads((tmp_path / "reproduction.json").read_text())["heads-4"]
    assert recorded["command"] == "sattle train --recipe fb15k237-twomult-100-teacher --num-heads 4"
    assert recorded["test"] == TEST
    assert recorded["seed"] == 0
    assert recorded["epoch_tested"] == job.config().train.epochs - 1


def test_a_run_that_has_begun_does_not_take_the_place_of_a_result(tmp_path: Path) -> None:
    job = JOBS["heads-4"]
    write_run(tmp_path / "begun/heads-4", job, 20, tested=False)
    assert line(shown(tmp_path / "begun"), "| 4 | 0.50 M").endswith("| epoch 20 of 60, valid MRR 0.200 at 20 |")
    write_run(tmp_path / "done/heads-4", job, job.config().train.epochs, tested=True)
    assert line(shown(tmp_path / "done"), "| 4 | 0.50 M").endswith("| 0.350 | 0.361 |")
    assert line(shown(tmp_path / "begun"), "| 4 | 0.50 M").endswith("| 0.350 | 0.361 |")


def test_a_curve_is_the_beginning_of_the_papers_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/fb15k237-twomult-32", JOBS["fb15k237-twomult-32"], 70, tested=False)
    page = shown(tmp_path / "runs")
    missing = "0.331 / not run yet"
    assert line(page, "| 60 | 0.295") == f"| 60 | 0.295 / 0.600 | 0.324 / not run yet |{f' {missing} |' * 4}"
    assert "unfinished: epoch 70 of 1,500, valid MRR 0.700 at 70" in line(page, "| FB15k-237 | TwoMult | 32")
    assert reproduction_page.PLOT.exists()
    assert json.loads((tmp_path / "reproduction.json").read_text())["curve-32"]["epochs"] == 60


def test_the_authors_code_has_a_column(tmp_path: Path) -> None:
    reproduction_page.AUTHORS.write_text(json.dumps({"valid": {"20": 0.2}}))
    assert line(shown(tmp_path / "runs"), "| 20 | 0.073").endswith("| 0.189 / not run yet | 0.189 / 0.200 |")


@pytest.mark.parametrize(
    ("name", "module", "cells"),
    [
        ("triples", "triples", "| 0.189 / not run yet | 0.189 / 0.200 | 0.189 / not run yet | 0.189 / not run yet |"),
        (
            "file-order",
            "file_order",
            "| 0.189 / not run yet | 0.189 / not run yet | 0.189 / 0.200 | 0.189 / not run yet |",
        ),
    ],
)
def test_a_curve_of_single_triples_has_a_column(name: str, module: str, cells: str, tmp_path: Path) -> None:
    job = JOBS[f"curve-100-{name}"]
    write_run(tmp_path / f"runs/curve-100-{name}", job, job.config().train.epochs, tested=True)
    page = shown(tmp_path / "runs")
    assert line(page, "| 20 | 0.073").endswith(cells)
    recorded = json.loads((tmp_path / "reproduction.json").read_text())[f"curve-100-{name}"]
    assert recorded["command"].startswith(f"python -m benchmarks.{module} train --recipe fb15k237-twomult-100 ")


def test_single_triples_train_as_their_queries_do_where_nothing_is_dropped(tmp_path: Path) -> None:
    """With one batch an epoch and without dropout, both are the same training."""
    splits = random_splits(3, num_entities=20, num_relations=2, num_triples=150)
    graph = write_graph(tmp_path / "graph", splits, num_entities=20, num_relations=2)
    settings = ["--dim 8 --num-heads 2 --dim-key 4 --dim-value 4 --dim-hidden 8 --epochs 3 --batch-size 1000"]
    settings += [f"--dropout-{site} 0" for site in ("input", "attention", "output", "hidden")]
    losses = []
    for module in ("sattle_dist.cli", "benchmarks.triples"):
        out = tmp_path / module
        arguments = f"train --graph {graph} --out {out} --loss bce --threads 1 {' '.join(settings)}".split()
        done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(text)["loss"] for text in (out / "metrics.jsonl").read_text().splitlines()])
        num_queries = 2 * len(splits["train"]) if module == "benchmarks.triples" else None
        assert num_queries is None or f"training triples in {num_queries} queries" in done.stdout
    assert losses[0][0] > losses[0][2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("changed", [{"num_heads": 8}, {"seed": 1}, {"epochs": 7}, {"teacher": "x"}])
def test_a_run_of_other_settings_is_not_taken_for_the_recipes(tmp_path: Path, changed: dict[str, Any]) -> None:
    job = JOBS["wn18rr-tucker-64-fast"]
    write_run(tmp_path / "run", job, 5, tested=True, changed=changed)
    assert collect(job, tmp_path / "run") is None


def test_times_are_summed_over_resumes_unless_somebody_shared_the_machine(tmp_path: Path) -> None:
    path, sign = tmp_path / "sittings.json", tmp_path / "metrics.jsonl"
    sign.touch()
    log = Sittings(path)
    log.begin(False, sign)  # killed: no end is noted
    os.utime(sign, (log.items[0]["begin"] + 100, log.items[0]["begin"] + 100))
    assert Sittings(path).seconds() is None
    log = Sittings(path)
    log.begin(False, sign)
    log.end()
    assert Sittings(path).seconds() == pytest.approx(100, abs=5)
    log.begin(True, sign)
    log.end()
    assert Sittings(path).seconds() is None


@pytest.mark.parametrize(("shared", "minutes"), [(False, "3 min"), (True, "time not measured")])
def test_the_time_of_a_teacher_counts(tmp_path: Path, shared: bool, minutes: str) -> None:
    """Also where it was trained as a job of its own: 2 minutes, and 1 after it."""
    name = "fb15k237-twomult-100-fast"
    job, run_dir = JOBS[name], tmp_path / "runs" / name
    epochs = job.config().train.epochs
    write_run(run_dir, job, epochs, tested=True)
    teacher = JOBS["heads-64"]
    write_run(run_dir / "teacher-1", teacher, teacher.config().train.epochs, tested=True)
    for place, seconds in [(run_dir, 60), (run_dir / "teacher-1", 120)]:
        log = Sittings(place / "sittings.json")
        log.begin(shared and place != run_dir, place / "metrics.jsonl")
        log.items[0]["begin"] -= seconds
        log.end()
    page = shown(tmp_path / "runs")
    before = " + ".join(str(load_recipe(name).train.epochs) for name in names(job.config()))
    assert f"| {before} + {epochs}, {minutes} |" in line(page, "| FB15k-237 | TwoMult | 100 |")
    assert line(page, "| 64 |").endswith("| 0.361 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fb15k"], "no job is called 'fb15k'; --list shows them"),
        (["heads-4", "--", "--learning-rate", "1"], "--learning-rate would be another experiment; allowed are --data"),
        (["heads-4", "--", "--out", "x"], "--out would be another experiment"),
        (["heads-4", "--", "--teacher", "x"], "--teacher would be another experiment"),
    ],
)
def test_what_would_spoil_the_record_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(reproduce.main, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_told_to_end_it_tells_the_training() -> None:
    training = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    )
    script = (
        f"import sys; from benchmarks.reproduce import attend; sys.exit(attend([sys.executable, '-c', {training!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == 7
        assert process.stdout.read() == ""  # at its end once nobody holds it: the training has ended too


def test_a_job_is_trained_collected_and_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"dim": 8, "num_heads": 2, "dim_key": 4, "dim_value": 4, "dim_hidden": 8, "epochs": 2, "eval_every": 1}
    monkeypatch.setitem(JOBS, "tiny", Job("families", tiny))
    monkeypatch.setenv("SATTLE_CACHE", str(tmp_path / "cache"))
    shown(tmp_path / "runs", "tiny", "--", "--threads", "1")
    recorded = json.loads((tmp_path / "reproduction.json").read_text())["tiny"]
    assert (recorded["epochs"], recorded["of"], list(recorded["valid"])) == (2, 2, ["1", "2"])
    assert 0 < recorded["test"]["mrr"] < 1
    assert recorded["seconds"] > 0
    assert recorded["stamp"]["versions"]["torch"]
    before = (tmp_path / "runs/tiny/sittings.json").read_text()
    shown(tmp_path / "runs", "tiny")
    assert (tmp_path / "runs/tiny/sittings.json").read_text() == before
