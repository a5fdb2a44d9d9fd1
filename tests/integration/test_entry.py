"""The installed commands where their output cannot be written, is not there, or Ctrl-C comes early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import SMALL, results, small_graph

SATTLE = "from sattle_dist.entry import sattle; sattle()"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(code: str, *arguments: object, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python code with these arguments, under a shell that redirects its output."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    (folder / "x.tsv").write_text("".join(f"e{i}\tr\te{i + 1}\n" for i in range(40)))
    made = run("from sattle_dist.entry import sattle_ingest; sattle_ingest()", folder / "x.tsv", "--out", folder / "g")
    assert made.returncode == 0, made.stderr
    return folder / "g"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("command", [["info"], ["sql", "SELECT * FROM triples"]])
def test_a_full_disk_is_one_line(command: list[str], graph: Path) -> None:
    name, *query = command
    done = run(SATTLE, name, graph, *query, shell=">/dev/full")
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_result_that_cannot_be_written_is_an_error(families_run: Path) -> None:
    done = run(SATTLE, "eval", families_run / "run", "--json", "-", "--threads", 1, shell=">/dev/full")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.splitlines()[-1]


def test_closed_streams_are_no_error(graph: Path) -> None:
    done = run(SATTLE, "sql", graph, "SELECT 1", shell=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("from sattle_dist.entry import sattle_ingest; sattle_ingest()", "-", "--out", graph / "x", shell="<&-")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_a_command_is_loaded() -> None:
    code = "from sattle_dist import entry\ndef load(): raise KeyboardInterrupt\nentry.run(load)"
    done = run(code)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("shell", [">/dev/full 2>/dev/full", "| true", ">&- 2>&-"])
def test_a_training_goes_on_without_its_log(shell: str, tmp_path: Path) -> None:
    arguments = [*SMALL, "--graph", small_graph(tmp_path), "--epochs", "2", "--out", tmp_path / "run"]
    run(SATTLE, "train", *arguments, shell=shell)
    history, test = results(tmp_path / "run")
    assert [record["epoch"] for record in history] == [1, 2]
    assert test["count"] > 0
