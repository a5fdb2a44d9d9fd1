"""Fixtures of all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sattle_dist import runtime

# The suite shares few cores between many processes; more threads only get in each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test calls in this process use one thread too."""
    monkeypatch.setattr(runtime, "num_cores", lambda: 1)


@pytest.fixture(scope="session")
def families_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`: the built-in graph, made on first use and trained with its own recipe in one process."""
    folder = tmp_path_factory.mktemp("families")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SATTLE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "sattle_dist.cli", "train", "--out", "run", "--threads", "1"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "MRR" in done.stdout
    return folder
