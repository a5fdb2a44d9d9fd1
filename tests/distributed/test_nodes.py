"""Two "nodes" of two processes each, as two torchrun agents that meet on this machine."""

from __future__ import annotations

import socket
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launching import SMALL, TORCHRUN, TRAIN, results, running, small_graph, trained

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")


def test_two_nodes_train_the_run_of_four_processes_and_of_one(tmp_path: Path) -> None:
    run, graph = tmp_path / "run", small_graph(tmp_path)
    meeting = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", uuid.uuid4().hex]
    meeting += ["--rdzv-endpoint", f"localhost:{free_port()}", "--local-addr", "localhost"]
    options = [*SMALL, "--graph", str(graph), "--epochs", "2", "--out", str(run)]
    with ExitStack() as stack:
        nodes = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            nodes.append(stack.enter_context(running([*TORCHRUN, *meeting, TRAIN, *options], tmp_path / name)))
        ends = [node.end() for node in nodes]
        assert [code for code, _ in ends] == [0, 0], ends
        said = [node.out.read_text() for node in nodes]
    assert sorted("; 4 processes on cpu" in text for text in said) == [False, True], "rank 0 alone reports"

    history, test = results(run)
    for way in ("4 processes, torchrun", "1 process, torchrun"):
        _, _, expected, expected_test = trained(way)
        assert [record["loss"] for record in history] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
        assert test == pytest.approx(expected_test, rel=5e-3, abs=2e-3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
