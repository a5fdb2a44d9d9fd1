"""The generator of scale tests: deterministic, of the size asked for, every entity used, degrees of a power law."""

from collections import Counter

import pytest
from click.testing import CliRunner

from benchmarks import make_graph
from benchmarks.make_graph import generate, main


def triples(**options):
    options = {"entities": 500, "triples": 5000, "relations": 20, "seed": 1, "skew": 0.6} | options
    return [line.split("\t") for line in b"".join(generate(**options)).decode().splitlines()]


def test_size_and_coverage():
    found = triples()
    assert len(found) == 5000
    assert all(len(line) == 3 for line in found)
    assert {line[0] for line in found} | {line[2] for line in found} == {f"Q{i}" for i in range(500)}
    assert {line[1] for line in found} == {f"P{i}" for i in range(20)}


def test_the_file_is_a_function_of_the_options(monkeypatch):
    assert triples() == triples()
    assert triples() != triples(seed=2)
    monkeypatch.setattr(make_graph, "CHUNK", 1000)
    found = triples()
    assert len(found) == 5000
    assert {line[0] for line in found} == {f"Q{i}" for i in range(500)}


def test_degrees_follow_a_power_law():
    """With skew s the share of the first k of n entities is (k / n) ** (1 - s)."""
    targets = Counter(line[2] for line in triples(triples=50_000, skew=0.5))
    ranked = [count for _, count in targets.most_common()]
    assert sum(ranked[:5]) / 50_000 == pytest.approx((5 / 500) ** 0.5, rel=0.1)
    assert sum(ranked[:125]) / 50_000 == pytest.approx((125 / 500) ** 0.5, rel=0.1)


def test_command(tmp_path):
    out = tmp_path / "t.tsv"
    result = CliRunner().invoke(main, ["--entities", "1e2", "--triples", "1e3", "--out", str(out)])
    assert result.exit_code == 0
    assert len(out.read_text().splitlines()) == 1000
    result = CliRunner().invoke(main, ["--entities", "many", "--triples", "1e3"])
    assert result.exit_code == 2
    assert "'many' is not a number" in result.stderr
