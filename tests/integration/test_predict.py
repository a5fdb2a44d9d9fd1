"""`sattle predict` and the Python API on the built-in graph: held-out facts, both directions, files, relations."""

from __future__ import annotations

import heapq
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from sattle_dist import Run, load_run, runtime
from sattle_dist.cli import main
from sattle_dist.config import RunConfig
from sattle_dist.evaluator import encode_block, evaluate
from sattle_dist.graph import SPLITS, Graph

Triple = tuple[str, str, str]


@pytest.fixture(scope="module")
def run(families_run: Path) -> Run:
    return load_run(families_run / "run")


@pytest.fixture(scope="module")
def facts(run: Run) -> dict[str, set[Triple]]:
    """The triples of every split by name, read from the Parquet files."""
    entities, relations = (
        pq.read_table(run.graph.path / f"{t}.parquet")["label"].to_pylist() for t in ("entities", "relations")
    )
    found = {}
    for split in SPLITS:
        columns = pq.read_table(run.graph.path / "triples" / f"split={split}").to_pydict()
        rows = zip(columns["source"], columns["relation"], columns["target"], strict=True)
        found[split] = {(entities[s], relations[r], entities[t]) for s, r, t in rows}
    return found


def predict(families_run: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["predict", str(families_run / "run"), *map(str, arguments)])


def test_answers_for_the_source(run: Run, facts: dict[str, set[Triple]]) -> None:
    """The mother of each child in the test split is the first answer that is not a known fact."""
    held_out = [triple for triple in facts["test"] if triple[1] == "mother_of"]
    right = 0
    for mother, relation, child in held_out:
        answers = run.predict(relation=relation, target=child, top=3)
        assert {p.asked for p in answers} == {"source"}
        assert {p.target for p in answers} == {child}
        right += next(p.source for p in answers if p.known_in != "train") == mother
    assert right / len(held_out) > 0.9


def test_a_file_gives_the_evaluators_positions(
    families_run: Path, run: Run, facts: dict[str, set[Triple]], tmp_path: Path
) -> None:
    """Places among all candidates, without the other known facts before them, are the filtered positions."""
    lines = [f"{s}\t{r}\t?\n?\t{r}\t{t}\n" for s, r, t in sorted(facts["test"])]
    (tmp_path / "queries[1].tsv").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "queries1.tsv").write_text("another file")  # which that name would match, were it a pattern
    out = tmp_path / "answers.parquet"
    done = predict(families_run, "--input", tmp_path / "queries[1].tsv", "--out", out, "--top", 40)
    assert done.exit_code == 0, done.output
    assert f"{2 * len(facts['test']):,} queries answered" in done.stdout

    known = {triple: split for split in SPLITS for triple in facts[split]}
    answers = defaultdict(list)
    for query, place, *triple, known_in, share in duckdb.sql(
        f"SELECT query, place, source, relation, target, known_in, share FROM '{out}' ORDER BY query, place"
    ).fetchall():
        assert known_in == known.get(tuple(triple))
        assert 0 < share < 1
        answers[query].append(tuple(triple))
        assert place == len(answers[query])
    found = []
    for i, triple in enumerate(sorted(facts["test"])):
        for query in (2 * i, 2 * i + 1):
            if triple in answers[query]:
                before = answers[query][: answers[query].index(triple)]
                found.append(1 + sum(other not in known for other in before))
    positions = evaluate(run._learner, run.graph, "test", "optimistic", 0).position
    assert sorted(found) == sorted(positions)[: len(found)]
    assert len(found) > 0.99 * len(positions)


def test_new_only_leaves_out_known_facts_and_nothing_else(run: Run, facts: dict[str, set[Triple]]) -> None:
    everything = run.predict(source="mia_baker", relation="cousin_of", top=run.graph.num_entities)
    assert len(everything) == run.graph.num_entities
    assert sum(p.share for p in everything) == pytest.approx(1, abs=1e-4)
    new = run.predict(source="mia_baker", relation="cousin_of", top=run.graph.num_entities, new_only=True)
    expected = [p for p in everything if (p.source, p.relation, p.target) not in set().union(*facts.values())]
    assert 0 < len(expected) < len(everything)
    assert new == expected


def test_proposals_are_the_best_of_all_sources(
    families_run: Path, run: Run, facts: dict[str, set[Triple]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the softmax of all scores of all sources, written out."""
    entities = pq.read_table(run.graph.path / "entities.parquet")["label"].to_pylist()
    relation = pq.read_table(run.graph.path / "relations.parquet")["label"].to_pylist().index("spouse_of")
    known = {(s, t) for split in SPLITS for s, r, t in facts[split] if r == "spouse_of"}
    sources = sorted({s for s, r, _ in facts["train"] if r == "spouse_of"})
    ids = np.array([entities.index(s) for s in sources])
    query = encode_block(run._learner, ids, np.full(len(ids), relation))[: len(ids)].double()
    table = run._learner.table
    share = (query @ table.rows.detach().double().T + table.bias.detach().double()).softmax(1).numpy()
    triples = [
        (-share[i, j], s, t) for i, s in enumerate(sources) for j, t in enumerate(entities) if (s, t) not in known
    ]
    expected = [(s, t, -minus) for minus, s, t in heapq.nsmallest(5, triples)]
    found = run.propose(relation="spouse_of", top=5)
    assert [(p.source, p.target) for p in found] == [(s, t) for s, t, _ in expected]
    # The filtered softmax leaves the scores of a query free up to a constant too.
    filtered = run.config.override({"loss": "filtered"}, "test")
    monkeypatch.setattr(run._learner, "config", filtered)
    assert run.propose(relation="spouse_of", top=5) == found
    assert [p.share for p in found] == pytest.approx([share for *_, share in expected], rel=1e-3)
    done = predict(families_run, "--relation", "spouse_of", "--all", "--top", 5, "--out", tmp_path / "new.parquet")
    assert done.exit_code == 0, done.output
    assert f"{len(sources)} sources (seen)" in done.stdout
    columns = pq.read_table(tmp_path / "new.parquet").to_pydict()
    assert list(zip(columns["source"], columns["target"], strict=True)) == [(s, t) for s, t, _ in expected]
    assert columns["place"] == [1, 2, 3, 4, 5]


def test_a_parquet_file_of_queries(families_run: Path, tmp_path: Path) -> None:
    table = pa.table(
        {"source": ["iris_baker", None, "nobody"], "relation": ["mother_of"] * 3, "target": [None, "iris_baker", None]}
    )
    pq.write_table(table, tmp_path / "q.parquet")
    request = ("--input", tmp_path / "q.parquet", "--out", tmp_path / "a.parquet", "--top", 1)
    refused = predict(families_run, *request)
    assert refused.exit_code == 2
    assert "q.parquet name what the graph does not hold, first query 3" in refused.stderr
    assert "no entity is called 'nobody'" in refused.stderr
    assert not list(tmp_path.glob(".a*"))
    left = tmp_path / ".a.parquet.ingest-killed"  # by a process that was killed in the middle
    left.mkdir()
    (left / ".lock").touch()
    (left / "scratch.duckdb").touch()
    done = predict(families_run, *request, "--skip-unknown", "--new-only")
    assert done.exit_code == 0, done.output
    assert not left.exists()
    assert "2 queries answered" in done.stdout
    assert "1 with unknown labels left out" in done.stdout
    rows = duckdb.sql(f"SELECT query, asked, source, target, known_in FROM '{tmp_path}/a.parquet'").fetchall()
    assert [row[:2] for row in rows] == [(0, "target"), (1, "source")]
    assert (rows[0][2], rows[1][3]) == ("iris_baker", "iris_baker")
    assert {row[4] for row in rows} == {None}


def test_vectors(run: Run) -> None:
    labels = ["iris_baker", "olga_baker", "iris_baker"]
    vectors = run.vectors(labels)
    ids = [pq.read_table(run.graph.path / "entities.parquet")["label"].to_pylist().index(label) for label in labels]
    rows = run._learner.table.rows.detach().numpy()
    assert (vectors == rows[ids]).all()
    assert (run.vector("olga_baker") == vectors[1]).all()
    both = [run.relation_vector("mother_of", inverse=inverse) for inverse in (False, True)]
    assert [vector.shape for vector in both] == [(run.config.model.dim,)] * 2
    assert (both[0] != both[1]).any()
    before = both[0].copy()
    both[0] *= 100  # the caller's own, not the model's
    assert (run.relation_vector("mother_of") == before).all()
    assert (run.vectors(label for label in labels) == vectors).all()
    assert (run.vectors(pa.array(labels)) == vectors).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--source", "iris_bakr", "--relation", "mother_of"],
            "no entity is called 'iris_bakr'; did you mean 'iris_baker'",
        ),
        (
            ["--source", "iris_baker", "--relation", "mother"],
            "no relation is called 'mother'; did you mean 'mother_of'",
        ),
        (["--source", "IRIS_BAKER", "--relation", "mother_of"], "did you mean 'iris_baker'"),
        (["--source", "zzz", "--relation", "mother_of"], "no entity is called 'zzz'"),
        (["--source", "iris\udcfc", "--relation", "mother_of"], r"'iris\udcfc' is not UTF-8, as all labels are"),
        (["--source", "iris_baker"], "give --relation"),
        (["--relation", "mother_of"], "give --source or --target, and not both"),
        (["--source", "a", "--target", "b", "--relation", "mother_of"], "give --source or --target, and not both"),
        (["--relation", "mother_of", "--all", "--source", "a"], "--source has no meaning with --all"),
        (["--input", "two.tsv"], "--input needs --out"),
        (["--input", "none.tsv", "--out", "a.parquet"], "no file of queries at none.tsv"),
        (["--input", "two.tsv", "--out", "none/a.parquet"], "the folder of none/a.parquet does not exist"),
        (
            ["--input", "both.tsv", "--out", "a.parquet"],
            "both.tsv, query 2: a query needs a relation and either a source",
        ),
        (["--input", "four.tsv", "--out", "a.parquet"], "four.tsv, query 2: more than three fields"),
        (["--input", "latin.tsv", "--out", "a.parquet"], "latin.tsv is not UTF-8; convert it first"),
        (["--input", "two.tsv", "--out", "two.tsv"], "two.tsv is the file of queries and would be lost"),
        (["--input", "bad.parquet", "--out", "a.parquet"], "needs the columns relation and source or target, it has x"),
        (["--input", "text.parquet", "--out", "a.parquet"], "text.parquet cannot be read as Parquet"),
        (["--source", "a", "--relation", "b", "--top", "0"], "0 is not in the range"),
    ],
)
def test_one_clear_line(
    arguments: list[str], message: str, families_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.tsv").write_text("iris_baker\tmother_of\n")
    Path("both.tsv").write_text("iris_baker\tmother_of\t?\niris_baker\tmother_of\tolga_baker\n")
    Path("four.tsv").write_text("\niris_baker\tmother_of\t?\n\na\tb\tc\td\n")
    Path("latin.tsv").write_bytes(b"caf\xe9\tmother_of\t?\n")
    pq.write_table(pa.table({"x": [1]}), "bad.parquet")
    Path("text.parquet").write_text("text")
    done = predict(families_run, *arguments)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not Path("a.parquet").exists()
    assert Path("two.tsv").read_text() == "iris_baker\tmother_of\n"


def test_the_package_alone_is_light() -> None:
    """Importing sattle_dist imports neither torch nor numpy; unknown names are still errors."""
    code = "import sys, sattle_dist; print('torch' in sys.modules, 'numpy' in sys.modules); sattle_dist.nonsense"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "False"]
    assert "has no attribute 'nonsense'" in done.stderr


def test_api_refuses_a_process_group_that_cannot_send_ids(families_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match=r'no backend for cpu tensors \(it has cuda:nccl\).*"cpu:gloo,cuda:nccl"'):
        load_run(families_run / "run")


def test_api_leaves_the_settings_of_torch_as_they_were(families_run: Path) -> None:
    own = {"deterministic": True, "matmul": "high", "bf16_sums": True}
    before = runtime.arithmetic()
    runtime.set_arithmetic(**own)
    try:
        with runtime.joined(RunConfig(device="cpu", threads=1)):
            assert runtime.arithmetic() == {"deterministic": False, "matmul": "highest", "bf16_sums": False}
        load_run(families_run / "run", device="cpu")
        assert runtime.arithmetic() == own
    finally:
        runtime.set_arithmetic(**before)


def test_api_refuses_what_it_cannot_mean(run: Run, families_run: Path) -> None:
    for call, message in (
        (lambda: run.predict(relation="mother_of"), "give a source or a target"),
        (lambda: run.predict(relation="mother_of", source="iris_baker", top=0), "top must be at least 1, got 0"),
        (lambda: run.propose(relation="mother_of", sources="some"), "sources must be one of seen, all, got 'some'"),
        (lambda: run.predict(relation="mother_of", source="iris_baker", top=2.5), "top must be a whole number"),
        (lambda: run.predict(relation="mother_of", source=b"iris_baker"), "a label is a str, got b'iris_baker'"),
        (lambda: run.vectors("iris_baker"), "takes a list of labels"),
        (lambda: run.vectors([3]), "a label is a str, got 3 of type int"),
        (lambda: load_run(families_run / "run", device="cpu:0"), "device must be one of"),
        (lambda: load_run(families_run / "run", checkpoint=None), "checkpoint must be 'best'"),
        (lambda: load_run(families_run / "nothing"), "no run at"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert Graph.open(run.graph.path).checksum == run.graph.checksum
