"""`sattle info` and `sattle sql` on graphs small enough to count by hand."""

import csv
import hashlib
import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from ingest import IngestOptions, ingest_triples
from ingest.cli import info, sql
from ingest.manifest import content_checksum
from tests.ingest_reference import labels, manifest

TRAIN = [
    ("a", "likes", "b"),
    ("b", "liked by", "a"),
    ("c", "likes", "d"),
    ("d", "liked by", "c"),
    ("a", "adores", "b"),
    ("c", "adores", "d"),
    ("e", "likes", "a"),
    ("a", "married", "b"),
    ("b", "married", "a"),
]
VALID = [("b", "likes", "a"), ("e", "adores", "a"), ("d", "adores", "a")]
TEST = [("a", "likes", "b"), ("x", "likes", "a")]


@pytest.fixture
def graph(tmp_path):
    files = {}
    for split, triples in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        files[split] = [tmp_path / f"{split}.tsv"]
        files[split][0].write_text("".join("\t".join(triple) + "\n" for triple in triples))
    ingest_triples(**files, options=IngestOptions(out=tmp_path / "small.graph"))
    return tmp_path / "small.graph"


def run(command, *arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def facts(graph):
    result = run(info, graph, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_counts_by_hand(graph):
    found = facts(graph)
    assert found["name"] == "small"
    assert (found["num_entities"], found["num_relations"]) == (6, 4)
    assert found["unseen_in_train"] == {"entities": 1, "triples": {"valid": 0, "test": 1}}
    # Degrees in train: a 6, b 5, c 3, d 3, e 1, x 0.
    assert found["degrees"]["mean"] == pytest.approx(18 / 6)
    assert (found["degrees"]["quantiles"]["0.0"], found["degrees"]["quantiles"]["1.0"]) == (0, 6)
    assert [(r["label"], r["num_train"]) for r in found["relations"]] == [
        ("likes", 3),
        ("adores", 2),
        ("liked by", 2),
        ("married", 2),
    ]
    assert found["cardinalities"] == {"1-1": {"relations": 4, "num_train": 9}}


def test_leakage_by_hand(graph):
    found = facts(graph)
    # valid: (b, likes, a) is (a, *, b) the other way round and (b, liked by, a) under another relation;
    # (e, adores, a) is (e, likes, a) under another relation; (d, adores, a) is new.
    assert found["leakage"]["valid"] == {"same": 0, "inverse": 1, "duplicate": 2, "any": 2}
    # test: (a, likes, b) is itself in train, inverse and under other relations; (x, likes, a) is new.
    assert found["leakage"]["test"] == {"same": 1, "inverse": 1, "duplicate": 1, "any": 1}
    pairs = {(p["kind"], p["first"], p["second"]): (p["pairs"], p["overlap"]) for p in found["relation_pairs"]}
    assert pairs == {
        ("inverse", "adores", "liked by"): (2, 1.0),
        ("inverse", "liked by", "likes"): (2, 1.0),
        ("inverse", "married", "married"): (2, 1.0),
        ("duplicate", "adores", "likes"): (2, 1.0),
    }


def test_text_says_the_same(graph):
    result = run(info, graph, "--verify")
    assert result.exit_code == 0
    for part in (
        "small: 6 entities, 4 relations",
        "14 read = 14 kept",
        "all files verified",
        "valid 2 of 3",
        "married is symmetric",
        "inverse: adores | liked by",
    ):
        assert part in result.stdout
    assert "leakage" not in run(info, graph, "--no-leakage").stdout


def damage(path, place=-20):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    ["entities.parquet", "index/split=train/targets.npy", "index/split=test/queries.npy", "triples/split=valid"],
)
def test_verify_finds_one_changed_bit(graph, name):
    path = graph / name
    path = path if path.is_file() else next(path.iterdir())
    damage(path)
    result = run(info, graph, "--verify")
    assert result.exit_code == 2
    assert f"damaged: the checksum of {path.relative_to(graph).as_posix()} differs" in result.stderr


def test_verify_compares_the_counts(graph):
    said = manifest(graph)
    train = {**said["splits"]["train"], "triples": 1}
    for change, message in (
        ({"num_entities": 5}, "entities.parquet holds 6, its manifest says 5"),
        ({"num_relations": 9}, "relations.parquet holds 4, its manifest says 9"),
        ({"splits": {**said["splits"], "train": train}}, "index/split=train/targets.npy holds"),
        ({"files": {}}, "its manifest does not know entities.parquet"),
    ):
        (graph / "manifest.json").write_text(json.dumps({**said, **change}))
        result = run(info, graph, "--verify", "--no-leakage")
        assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_damaged_graphs_are_named(graph):
    targets = graph / "index/split=train/targets.npy"
    targets.write_bytes(targets.read_bytes()[:-4])
    assert "damaged: index/split=train/targets.npy has" in run(info, graph).stderr
    said = manifest(graph)
    for change, message in (
        ({"format_version": 2}, "has format version 2, this release reads 1: upgrade"),
        ({"format": "something"}, "does not describe a sattle-graph"),
        ({"splits": {}}, "is damaged"),
        ({"files": []}, "is damaged"),
        ({"lines": {}}, "is damaged (KeyError('read'))"),
        ({"split": "x"}, "is damaged"),
        ({"num_entities": "6"}, "'6' is no count"),
        ({"num_relations": -4}, "-4 is no count"),
    ):
        (graph / "manifest.json").write_text(json.dumps({**said, **change}))
        result = run(info, graph)
        assert result.exit_code == 2
        assert message in result.stderr
    (graph / "manifest.json").write_text("{ torn")
    assert "is damaged" in run(sql, graph, "SELECT 1").stderr
    (graph / "manifest.json").unlink()
    assert "is not a graph directory" in run(info, graph).stderr
    assert "no graph at" in run(info, graph / "nowhere").stderr


def test_content_checksum_is_the_documented_one(graph):
    """Compute it as docs/graph-format.md says, from the labels and arrays themselves."""

    def sha(data):
        return hashlib.sha256(data).hexdigest()

    text = ""
    for table in ("entities", "relations"):
        names = [label.encode() for label in labels(graph, table)]
        lengths = b"".join(len(name).to_bytes(8, "little") for name in names)
        text += f"{table} {len(names)} {sha(lengths)} {sha(b''.join(names))}\n"
    for split in ("train", "valid", "test"):
        for array, kind in (("queries", "<i8"), ("offsets", "<i8"), ("targets", "<i4")):
            values = np.load(graph / "index" / f"split={split}" / f"{array}.npy").astype(kind)
            text += f"{split}/{array} {len(values)} {sha(values.tobytes())}\n"
    assert manifest(graph)["checksum"] == "sha256:" + sha(text.encode())


def test_array_headers_are_read_by_one_thread(graph, monkeypatch):
    """Numpy parses them with ast, whose recursion counter is shared by all threads of Python 3.11 (gh-106905)."""
    readers = set()
    read = np.lib.format.read_array_header_1_0

    def read_and_note(file):
        readers.add(threading.get_ident())
        return read(file)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", read_and_note)
    assert content_checksum(graph) == manifest(graph)["checksum"]
    assert readers == {threading.get_ident()}


def test_content_checksum_survives_another_parquet_layout(graph):
    """The checksum names labels and index; the layout of Parquet files is not part of it."""
    table = pq.read_table(graph / "entities.parquet")
    pq.write_table(table, graph / "entities.parquet", compression="none", row_group_size=2)
    assert content_checksum(graph) == manifest(graph)["checksum"]
    pq.write_table(table.set_column(1, "label", [["a", "b", "c", "d", "e", "y"]]), graph / "entities.parquet")
    assert content_checksum(graph) != manifest(graph)["checksum"]


def test_sql_as_table_csv_and_json(graph):
    query = "SELECT split, source, relation, target, source_id FROM triples WHERE split = 'test' ORDER BY ALL"
    rows = [["test", "a", "likes", "b", 0], ["test", "x", "likes", "a", 5]]
    assert [list(row.values()) for row in json.loads(run(sql, graph, query, "--format", "json").stdout)] == rows
    read = list(csv.reader(io.StringIO(run(sql, graph, query, "--format", "csv").stdout)))
    assert read[1:] == [[str(cell) for cell in row] for row in rows]
    table = run(sql, graph, query).stdout.splitlines()
    assert table[0].split() == ["split", "source", "relation", "target", "source_id"]
    assert table[2].split() == ["test", "a", "likes", "b", "0"]
    counts = run(
        sql, graph, "SELECT (SELECT count(*) FROM entities), (SELECT count(*) FROM relations)", "--format", "csv"
    )
    assert counts.stdout.splitlines()[1] == "6,4"


def test_sql_pivots_and_writes_what_csv_and_json_can_hold(graph):
    pivot = "PIVOT (SELECT split, relation FROM triples) ON split USING count(*) ORDER BY relation"
    assert run(sql, graph, pivot, "--format", "csv").stdout.splitlines()[0] == "relation,test,train,valid"
    values = "SELECT 'ab'::BLOB AS bytes, 'nan'::DOUBLE AS number"
    assert run(sql, graph, values, "--format", "csv").stdout.splitlines()[1] == "ab,nan"
    assert json.loads(run(sql, graph, values, "--format", "json").stdout) == [{"bytes": "ab", "number": None}]
    odd = "SELECT 1 AS a, 2 AS a, 3 AS a_1, ['inf'::DOUBLE, 1] AS b, MAP {DATE '2020-01-02': 'nan'::FLOAT} AS c"
    (row,) = json.loads(run(sql, graph, odd, "--format", "json").stdout, parse_constant=pytest.fail)
    assert row == {"a": 1, "a_1": 2, "a_1_1": 3, "b": [None, 1.0], "c": {"2020-01-02": None}}


@pytest.mark.parametrize("folder", ["a[1]*?", "source=7", "it's"])
def test_graphs_in_odd_folders_are_read(graph, folder, tmp_path):
    """Also beside one that such a name would match, were it a pattern."""
    for name in (folder, "a1xy"):
        (tmp_path / name).mkdir()
    (tmp_path / "a1xy" / "one.tsv").write_text("z\tr\tz\n")
    ingest_triples([tmp_path / "a1xy" / "one.tsv"], options=IngestOptions(out=tmp_path / "a1xy" / "graph"))
    moved = graph.rename(tmp_path / folder / "graph")
    query = "SELECT count(*), min(source), max(split) FROM triples"
    assert run(sql, moved, query, "--format", "csv").stdout.splitlines()[1] == f"{facts_count(moved)},a,valid"


def facts_count(graph):
    """Count the triples by what `sattle info` says of each split."""
    return sum(said["triples"] for said in facts(graph)["splits"].values())


def test_sql_on_a_damaged_file_is_one_line(graph):
    path = graph / "entities.parquet"
    path.write_bytes(bytes(path.stat().st_size))
    result = run(sql, graph, "SELECT 1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "entities.parquet" in result.stderr


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM nothing", "nothing"),
        ("COPY (SELECT 1) TO '/tmp/sattle-sql-test.csv'", "may not COPY"),
        ("COPY (SELECT 1) TO '{graph}/entities.parquet'", "may not COPY: it can only read the graph; write a SELECT"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{graph}/x.csv'", "may not EXPLAIN"),
        ("ATTACH '{graph}/x.db'", "may not ATTACH"),
        ("EXPORT DATABASE '{graph}/x'", "may not EXPORT"),
        ("CREATE TABLE x (a INT)", "may not CREATE"),
        ("SELECT 1; SELECT 2", "the query has 2 statements; write one SELECT"),
        ("SELECT * FROM read_csv('/etc/passwd')", "Permission Error"),
        ("", "the query has 0 statements"),
    ],
)
def test_sql_errors_are_one_line(graph, query, message):
    before = {path: path.read_bytes() for path in graph.rglob("*") if path.is_file()}
    result = run(sql, graph, query.replace("{graph}", str(graph)))
    assert {path: path.read_bytes() for path in graph.rglob("*") if path.is_file()} == before
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not Path("/tmp/sattle-sql-test.csv").exists()


def test_known_facts_of_published_graphs(tmp_path):
    """36 entities of FB15k-237 never occur in train, and it was made so that no valid or test pair is in train."""
    root = os.environ.get("SATTLE_DATA")
    if not root or not (Path(root) / "FB15k-237").is_dir():
        pytest.skip("SATTLE_DATA names no folder with FB15k-237")
    ingest_triples([Path(root) / "FB15k-237"], options=IngestOptions(out=tmp_path / "fb"))
    found = facts(tmp_path / "fb")
    assert found["unseen_in_train"]["entities"] == 36
    assert found["leakage"]["test"]["any"] == 0
