"""The report of a run: complete, self-contained, safe with anybody's labels, and drawn by a real browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sattle_dist import charts
from sattle_dist.cli import main
from sattle_dist.config import Config, load_toml, to_toml
from sattle_dist.findings import POSITIONS, read_findings
from sattle_dist.predict import Prediction
from sattle_dist.report import render
from tests.graphs import random_splits, write_graph

VOID = {"meta", "line", "circle", "rect", "polyline"}


class Page(HTMLParser):
    """Collects text and attributes, and checks that every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def page(families_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    done = CliRunner().invoke(main, ["report", str(families_run / "run"), "--out", str(out), "--samples", "4"])
    assert done.exit_code == 0, done.output
    assert list(out.parent.iterdir()) == [out]
    return out


def test_the_page_tells_the_run(page: Path, families_run: Path) -> None:
    html = page.read_text(encoding="utf-8")
    parsed = Page(html)
    text = " ".join(parsed.words)
    test = json.loads((families_run / "run" / "test.json").read_text())
    for shown in (
        f"{test['metrics']['mrr']:.4f}",
        f"{test['by_direction']['source']['mrr']:.3f}",
        "Validation MRR (best",
        "Where the time went",
        "great_grandparent_of",
        "num_heads = 8",
        test["protocol"]["graph_checksum"],
        "training triples of the answer, from",
    ):
        assert shown in text
    assert len(re.findall(r'<svg class="chart"', html)) == 6
    assert text.count("known in") == 4  # a table for each sample
    epochs = len((families_run / "run" / "metrics.jsonl").read_text().splitlines())
    assert html.count("<title>epoch ") >= 3 * epochs  # a point for each epoch in loss, rate and speed


def test_the_page_needs_nothing_else(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    parsed = Page(html)
    assert parsed.links == []
    assert not parsed.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html


def test_positions_are_summed_up_as_by_hand(families_run: Path) -> None:
    results = read_findings(families_run / "run")
    rows = pq.read_table(families_run / "run" / POSITIONS).to_pydict()
    position = rows["position"]
    counts = {b.name: b.count for b in results.by_position}
    assert counts["1"] == sum(p <= 1 for p in position)
    assert counts["2"] == sum(1 < p <= 2 for p in position)
    assert sum(counts.values()) == len(position)
    entities = pq.read_table(results.graph.path / "entities.parquet").to_pydict()
    answers = [
        t if d == "target" else s
        for s, t, d in zip(rows["source_id"], rows["target_id"], rows["direction"], strict=True)
    ]
    degree = [entities["num_train_as_source"][a] + entities["num_train_as_target"][a] for a in answers]
    for found in results.by_degree:
        low, high = map(int, found.name.split("-"))
        inside = [1 / p for p, d in zip(position, degree, strict=True) if low <= d <= high]
        assert (found.count, found.mrr) == (len(inside), pytest.approx(sum(inside) / len(inside)))


def test_labels_of_a_stranger_do_no_harm(families_run: Path) -> None:
    evil = "<script>alert('x')</script>\"&"
    results = read_findings(families_run / "run")
    test = json.loads(json.dumps(results.test))
    test["by_relation"][0]["relation"] = evil
    test["protocol"]["graph"] = evil
    sample = Prediction(source=evil, relation=evil, target=evil, asked="target", score=1.0, share=0.5, known_in="")
    graph = dataclasses.replace(results.graph, name=evil)
    html = render(dataclasses.replace(results, test=test, graph=graph, config_text=evil), [(evil, [sample])])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5
    assert "script" not in Page(html).tags
    assert "<b>" not in charts.bar_chart("<b>", ["<b>"], [1.0], x_name="<b>", y_name="<b>", tips=["<b>"], texts=["<b>"])


def test_a_run_that_still_trains_has_a_page(families_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(families_run / "run", run, ignore=shutil.ignore_patterns("test*", "lock"), symlinks=True)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]) + '{"epoch": 3, "lo')  # the third is being written
    done = CliRunner().invoke(main, ["report", str(run), "--samples", "0"])
    assert done.exit_code == 0, done.output
    text = " ".join(Page((run / "report.html").read_text()).words)
    assert "The test split has not been evaluated yet." in text
    assert "2 epochs" in text
    shutil.rmtree(run / "checkpoints")  # the first epochs, before anything is saved
    early = CliRunner().invoke(main, ["report", str(run)])
    assert early.exit_code == 0, early.output
    (run / "metrics.jsonl").write_text("{}\n")
    odd = CliRunner().invoke(main, ["report", str(run)])
    assert (odd.exit_code, "metrics.jsonl has a line that is no epoch's record" in odd.stderr) == (2, True)
    (run / "test.json").write_text("[")
    broken = CliRunner().invoke(main, ["report", str(run), "--samples", "0"])
    assert (broken.exit_code, broken.stderr.count("\n")) == (2, 1)
    assert "cannot be read" in broken.stderr


def test_another_graph_in_its_place_is_refused(families_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(families_run / "run", run, symlinks=True)
    splits = random_splits(0, num_entities=9, num_relations=2, num_triples=30)
    other = write_graph(tmp_path / "other", splits, num_entities=9, num_relations=2)
    config = load_toml(run / "config.toml", Config()).override({"graph": str(other)}, "test")
    (run / "config.toml").write_text(to_toml(config))
    done = CliRunner().invoke(main, ["report", str(run), "--samples", "0"])
    assert (done.exit_code, "has changed since" in done.stderr) == (2, True)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_it(page: Path, tmp_path: Path) -> None:
    """The screenshot is a picture of the size asked for that shows more than an empty page."""
    image = pytest.importorskip("PIL.Image", reason="Pillow (of matplotlib) is not installed")
    picture = tmp_path / "page.png"
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *quiet, "--disable-component-update", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,1400", f"--screenshot={picture}"]
    subprocess.run([*command, page.as_uri()], capture_output=True, timeout=60, check=False)
    pixels = image.open(picture).convert("RGB")
    assert pixels.size == (1000, 1400)
    colours = {colour: count for count, colour in pixels.getcolors(1 << 24)}
    assert len(colours) > 20
    accents = [colours.get(colour, 0) for colour in ((0x2F, 0x6F, 0xDE), (0x6E, 0xA0, 0xFF))]  # light, dark
    assert max(accents) > 1000  # lines and bars are drawn in their colour
