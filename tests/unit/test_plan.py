"""The planner: units, the smallest number of devices, remedies, the memory there is, the command and its document."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks import scale_docs
from ingest.families import ensure_family_graph
from sattle_dist import costs, memory
from sattle_dist.calibrate import Speed
from sattle_dist.commands.plan import plan
from sattle_dist.config import Config, ConfigError
from sattle_dist.costs import Workload
from sattle_dist.memory import Devices, container_memory, fits, smallest, smallest_number
from sattle_dist.plan import make_plan
from sattle_dist.units import COUNTS, SIZES, parse_count, parse_number, size_text, time_text

GIB = 2**30
COUNTED = ["--entities", "90M", "--relations", "1300", "--triples", "600M"]
GPU = ["--device-memory", "80GB", "--device-flops", "19.5T", "--bandwidth", "25GB"]


def make_work(**settings: Any) -> Workload:
    return Workload(
        config=Config().override(settings, "test"),
        num_entities=10_000_000,
        num_relations=100,
        num_triples=10**7,
        num_queries=10**7,
        world_size=1,
    )


@pytest.mark.parametrize(
    ("text", "value"), [("14541", 14541), ("90M", 90_000_000), ("1.3k", 1300), ("2g", 2 * 10**9), ("1,000", 1000)]
)
def test_counts_are_read(text: str, value: int) -> None:
    assert parse_count(text, "--entities") == value


@pytest.mark.parametrize("text", ["", "M", "-5", "1.5", "90X", "9e99", "nan", "0", "1 2"])
def test_bad_counts_are_refused_with_the_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--entities must be"):
        parse_count(text, "--entities")


def test_sizes_are_read_and_written() -> None:
    assert parse_number("80GB", SIZES, "x", "") == 80e9
    assert parse_number("24 GiB", SIZES, "x", "") == 24 * GIB
    assert parse_number("19.5T", COUNTS, "x", "") == 19.5e12
    assert [size_text(n) for n in (12, 1536, 5 * GIB, 3 * 2**40)] == ["12 bytes", "1.5 KiB", "5.0 GiB", "3.0 TiB"]
    assert [time_text(s) for s in (0.0123, 5, 600, 8000, 1e6)] == [
        "12.3 ms",
        "5.0 s",
        "10.0 minutes",
        "2.2 hours",
        "11.6 days",
    ]


@pytest.mark.parametrize("first", [1, 2, 3, 5, 64, 100])
def test_smallest_finds_the_first(first: int) -> None:
    assert smallest(lambda n: n >= first, 100) == first
    assert smallest(lambda n: False, 100) is None


def test_smallest_number_of_devices_is_the_first_that_fits() -> None:
    work, device = make_work(), Devices(memory=4 * GIB, shared=False, name="")
    found = smallest_number(work, device.memory)
    assert found is not None
    assert found > 2
    tried = [fits(replace(work, world_size=n), device) for n in range(1, found + 1)]
    assert tried == [False] * (found - 1) + [True]
    together = Devices(memory=4 * GIB, shared=True, name="")
    assert not fits(replace(work, world_size=found), together)  # on one machine more processes need no less


def test_seconds_are_counts_over_rates() -> None:
    work = replace(make_work(loss="bce", dim=32, batch_size=1024), world_size=4)
    speed = Speed(encoder=2e9, score=1e10, memory=1e9, link=1e6, latency=0.01)
    made = make_plan(work, Devices(memory=GIB, shared=False, name=""), speed, [])
    assert made.step["scoring"] == 6 * 2_500_000 * 1024 * 32 / 1e10
    assert made.step["optimizer"] == pytest.approx(32 * 2_500_000 * 33 / 1e9, rel=0.02)
    sent = sum(costs.bytes_sent(work).values())
    assert made.step["exchange"] == pytest.approx(sent / 1e6 + (4 + 2 + 6) * 0.01)
    assert made.epoch_seconds == made.step_seconds * -(-(10**7) // 1024)


def find_problem(free: float, monkeypatch: pytest.MonkeyPatch, num_local: int = 1, **settings: Any) -> str:
    monkeypatch.setattr(memory, "available_memory", lambda: int(free))
    work = replace(make_work(**settings), world_size=num_local)
    return memory.find_problem(work, num_local, torch.device("cpu"))


def test_a_run_that_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    need = memory.certain_bytes(make_work(), device="cpu")
    assert need > 16 * 10_000_000 * 101
    assert find_problem(need, monkeypatch) == ""
    problem = find_problem(need - 1, monkeypatch)
    assert f"needs at least {size_text(need)}" in problem
    assert "use at least 2 machines like this one" in problem
    assert "--saving blocking" in problem
    assert "--dim 50" in problem
    assert "--batch-size" not in problem  # no smaller batch would help
    assert find_problem(need - 1, monkeypatch, dim=50) == ""
    assert "2 processes of" in find_problem(need - 1, monkeypatch, num_local=2)


def test_a_model_that_no_number_of_processes_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tucker's core of 3000 x 3000 x 3000 is replicated: 27 billion numbers on each."""
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * GIB)
    work = replace(make_work(decoder="tucker", dim=3000), num_entities=812)
    problem = memory.find_problem(work, 1, torch.device("cpu"))
    assert problem.endswith("20.0 GiB are free; use --dim 750")
    assert smallest_number(work, 20 * GIB) is None


def test_what_is_certain_is_less_than_what_is_planned() -> None:
    for settings in ({}, {"decoder": "tucker", "batch_size": 4096}, {"loss": "bce", "dim": 1}):
        work = make_work(**settings)
        assert memory.certain_bytes(work, device="cpu") < max(memory.memory_peaks(work).values())


def test_container_limits_are_seen(tmp_path: Path) -> None:
    own = tmp_path / "two" / "jobs" / "mine"
    own.mkdir(parents=True)
    for folder, limit in ((own, "max"), (own.parent, "1000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("700")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 50\nactive_file 5\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/jobs/mine\n")
    assert min(container_memory(tmp_path / "two", membership)) == 1000 - 700 + 55

    first = tmp_path / "one" / "memory"  # version 1, and the container sees its own group as the root
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("5000")
    (first / "memory.usage_in_bytes").write_text("4500")
    (first / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    membership.write_text("4:memory:/elsewhere/outside\n")
    assert min(container_memory(tmp_path / "one", membership)) == 600
    assert min(container_memory(tmp_path / "none", membership)) == 1 << 62


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments))


def test_the_command_plans_from_figures() -> None:
    result = invoke(*COUNTED, *GPU, "--devices", "16", "--heads", "8", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["parameters"]["efp"] == (90_000_000 + 2600) * 100
    assert found["workload"]["num_heads"] == 8
    assert found["memory"]["parts"]["entity rows and biases"] == 4 * 101 * 90_000_000 // 16
    assert found["fits"]
    assert found["smallest_devices"] == 2
    assert found["epoch_seconds"] > 86400
    assert any("impractical" in text and "more than 1" in text for text in found["warnings"])
    assert any("as many queries as triples" in text for text in found["assumptions"])


def test_the_command_says_what_does_not_fit() -> None:
    result = invoke(*COUNTED, "--device-memory", "8GB", "--device-flops", "19.5T", "--devices", "4")
    assert "4 processes on devices with 7.5 GiB each: DOES NOT FIT" in result.output
    assert "warning: it does not fit into 7.5 GiB; use at least" in result.output


def test_the_score_buffer_is_among_the_remedies() -> None:
    """On devices with 1 GB the buffer of 1 GiB alone does not fit, whatever the graph."""
    small = ["--entities", "40", "--relations", "2", "--triples", "100"]
    described = [*small, "--device-memory", "1GB", "--device-flops", "1T"]
    said = invoke(*described).output
    (value,) = re.findall(r"DOES NOT FIT(?s:.*)--score-memory (\d+)", said)
    assert "DOES NOT FIT" not in invoke(*described, "--score-memory", value).output
    assert "DOES NOT FIT" in invoke(*described, "--score-memory", str(2 * int(value))).output


def test_the_graph_may_stand_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"[run]\ngraph = '{ensure_family_graph()}'\n")
    assert "812 entities" in invoke("--config", str(tmp_path / "c.toml"), *GPU).output


@pytest.mark.parametrize("sizes", [[str(ensure_family_graph())], COUNTED], ids=["graph", "counts"])
def test_teachers_are_planned_by_the_command_that_is_told(sizes: list[str]) -> None:
    said = invoke(*sizes, *GPU, "--recipe", "fb15k237-twomult-64-fast").output
    commands = re.findall(r"`sattle plan (.*)` plans that", said)
    assert len(commands) == 2
    for command in commands:
        assert invoke(*shlex.split(command), *GPU).exit_code == 0


def test_the_smallest_graph_is_planned() -> None:
    result = invoke("--entities", "1", "--relations", "1", "--triples", "1", "--threads", "1", "--dim", "8")
    assert result.exit_code == 0, result.output


def test_rounded_scores_are_counted_on_a_gpu() -> None:
    """A block's scores are copied once more, in two bytes each instead of four."""
    sizes = {
        precision: costs.score_bytes(replace(make_work(precision=precision, batch_size=1000), cuda=True))
        for precision in ("float32", "bf16")
    }
    assert sizes["float32"] == pytest.approx(2**30, rel=1e-3)
    assert sizes["bf16"] == pytest.approx(1.5 * 2**30, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--entities is missing; give a graph, or"),
        (["--entities", "90M", "--relations", "5"], "--triples is missing"),
        (["--entities", "9x", "--relations", "5", "--triples", "1M"], "--entities must be a number such as"),
        ([*COUNTED, "--queries", "2G"], "--queries must be at most two per triple (1,200,000,000)"),
        ([*COUNTED, "--device-memory", "80"], "--device-memory must be a number such as 80GB"),
        ([*COUNTED, *GPU, "--dim", "0"], "dim must be at least 1, got 0"),
        ([*COUNTED, "--memory-bandwidth", "2TB"], "--memory-bandwidth is given without --device-flops"),
        ([*COUNTED, "--bandwidth", "2GB"], "--bandwidth is given, but processes here are timed"),
        ([*COUNTED, *GPU, "--teacher", "families", "--loss", "bce"], "--teacher goes with --loss softmax or filtered"),
        ([*COUNTED, *GPU, "--devices", "0"], "Invalid value for '--devices'"),
        (["--entities", "5", "--relations", "1", "--triples", "9", "--devices", "6"], "at most the number of entities"),
        (["/nowhere", "--entities", "5"], "--entities is given with the graph /nowhere"),
        (["/nowhere"], "no graph at /nowhere"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_command_times_this_machine() -> None:
    began = time.monotonic()
    result = invoke(str(ensure_family_graph()), "--dim", "16", "--batch-size", "32", "--threads", "1", "--json")
    waited = time.monotonic() - began
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["fits"]
    assert 0 < found["step_seconds"]["total"] < waited  # it has taken several such steps
    assert found["bytes_sent_per_step"]["total"] == 0


def test_the_document_shows_what_the_planner_says() -> None:
    """Mended by `python -m benchmarks.scale_docs`."""
    document = scale_docs.DOC.read_text()
    assert scale_docs.fill(document, scale_docs.blocks()) == document
