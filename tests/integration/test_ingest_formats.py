"""Every kind of input gives the same graph: formats, compressions, standard input, globs, directories, columns."""

import bz2
import gzip
import io
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from ingest import IngestError, IngestOptions, ingest_triples
from ingest.cli import ingest
from ingest.sources import bare_name, format_of, split_of
from tests.ingest_reference import check_degrees, check_index, labelled, manifest

TRIPLES = [("New York", "is in", "the US"), ('"quoted"', "r,s", "é"), ("a", "r", "b"), ("b", "r", "a"), ("a", "r", "a")]
EVERYTHING = {"valid_fraction": 0.0, "test_fraction": 0.0}


def tsv(triples=TRIPLES):
    return "".join("\t".join(triple) + "\n" for triple in triples).encode()


def csv(triples=TRIPLES):
    quoted = [
        ['"' + label.replace('"', '""') + '"' if set(label) & set(',"') else label for label in t] for t in triples
    ]
    return "".join(",".join(triple) + "\n" for triple in quoted).encode()


def parquet(triples=TRIPLES, kind=None, names=("source", "relation", "target")):
    sink = io.BytesIO()
    columns = [
        pa.array([label.encode() for label in column], pa.binary()).cast(kind or pa.string())
        for column in zip(*triples, strict=True)
    ]
    pq.write_table(pa.table(columns, names=list(names)), sink)
    return sink.getvalue()


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


def ingest_one(path, out, **options):
    ingest_triples([path], options=IngestOptions(out=out, **{**EVERYTHING, **options}))
    check_index(out)
    return labelled(out)["train"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.tsv", tsv()),
        ("t.txt", tsv().replace(b"\n", b"\r\n")),
        ("t", b"\xef\xbb\xbf" + tsv()),
        ("t.csv", csv()),
        ("t.tsv.gz", gzip.compress(tsv(), mtime=0)),
        ("t.tsv.gz", gzip.compress(tsv()[:30], mtime=0) + gzip.compress(tsv()[30:], mtime=0)),  # two members
        ("t.tsv.zst", zstd(tsv())),
        ("t.tsv.bz2", bz2.compress(tsv())),
        ("t.csv.gz", gzip.compress(csv(), mtime=0)),
        ("misnamed.tsv", gzip.compress(tsv(), mtime=0)),  # known by its first bytes
        ("t.parquet", parquet()),
        ("t.pq", parquet(kind=pa.large_string(), names=("s", "p", "o"))),
        ("t.parquet", parquet(kind=pa.binary())),
    ],
)
def test_every_format_gives_the_same_triples(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert ingest_one(tmp_path / name, tmp_path / "graph") == set(TRIPLES)
    check_degrees(tmp_path / "graph")


def test_ntriples(tmp_path):
    (tmp_path / "t.nt").write_bytes(b'<a> <p> <b> .\n<b> <p> "x y"@en .\n')
    assert ingest_one(tmp_path / "t.nt", tmp_path / "graph") == {("<a>", "<p>", "<b>"), ("<b>", "<p>", '"x y"@en')}


def test_parquet_of_integers_and_rejected_rows(tmp_path):
    table = pa.table({"o": [1, 2, None], "s": [3, 4, 5], "p": ["r", "", "r"], "more": [0, 0, 0]})
    pq.write_table(table, tmp_path / "t.parquet")
    options = {"columns": ("s", "p", "o"), "on_reject": "skip"}
    assert ingest_one(tmp_path / "t.parquet", tmp_path / "graph", **options) == {("3", "r", "1")}
    rejects = pq.read_table(tmp_path / "graph" / "rejects.parquet").to_pylist()
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [(2, "empty relation"), (3, "empty target")]
    with pytest.raises(IngestError, match=r"has 4 columns .* --columns"):
        ingest_one(tmp_path / "t.parquet", tmp_path / "other")


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (b"h1\th2\th3\nr\tb\ta\n", {"header": True, "columns": ("3", "1", "2")}),
        (b"to,rel,from,year\nb,r,a,1999\n", {"header": True, "columns": ("from", "rel", "to"), "delimiter": ","}),
        (b"a|r|b\n", {"delimiter": "|"}),
        (b"a r b\n", {"delimiter": " "}),
        (b"b\tr\ta\textra\n", {"columns": ("3", "2", "1")}),
        (b"# note\n\na\tr\tb\n", {"comment": "#"}),
        (
            b"# note\n\nto\trel\tfrom\tyear\n#x\nb\tr\ta\t1\n",
            {"comment": "#", "header": True, "columns": ("from", "rel", "to")},
        ),
        (b"\n# a note\nb\tr\ta\tx\n", {"comment": "#", "columns": ("3", "2", "1")}),
        (b"a \tr \tb\t\n", {"strip": True}),
    ],
)
def test_columns_header_delimiter_comment_strip(data, options, tmp_path):
    (tmp_path / "t.tsv").write_bytes(data)
    assert ingest_one(tmp_path / "t.tsv", tmp_path / "graph", **options) == {("a", "r", "b")}


def test_standard_input(tmp_path):
    command = [sys.executable, "-m", "ingest.cli", "-", "--out", str(tmp_path / "graph"), "--quiet"]
    for data in (tsv(), zstd(tsv())):
        subprocess.run([*command, "--force"], input=data, check=True, timeout=60)
        assert set.union(*labelled(tmp_path / "graph").values()) == set(TRIPLES)
    done = subprocess.run([sys.executable, "-m", "ingest.cli", "-"], input=b"", capture_output=True, timeout=60)
    assert (done.returncode, b"--out" in done.stderr) == (2, True)


def test_several_files_and_globs(tmp_path):
    for i, triple in enumerate(TRIPLES):
        (tmp_path / f"part-{i}.tsv").write_bytes(tsv([triple, TRIPLES[0]]))
    assert ingest_one(tmp_path / "part-*.tsv", tmp_path / "graph") == set(TRIPLES)
    lines = manifest(tmp_path / "graph")["lines"]
    assert (lines["read"], lines["kept"], lines["duplicates"]) == (10, 5, 5)
    files = sorted(tmp_path.glob("part-*.tsv"))
    ingest_triples(files, options=IngestOptions(out=tmp_path / "other", **EVERYTHING))
    assert manifest(tmp_path / "other")["checksum"] == manifest(tmp_path / "graph")["checksum"]


@pytest.mark.parametrize(
    ("names", "formats"),
    [
        (("train.txt", "valid.txt", "test.txt"), (tsv, tsv, tsv)),
        (("wn18-train.csv", "wn18-dev.tsv", "wn18-test.parquet"), (csv, tsv, parquet)),
        (("Train.tsv", "validation.txt", "testing.txt"), (tsv, tsv, tsv)),
    ],
)
def test_a_directory_of_splits(names, formats, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("about the training set")
    parts = (TRIPLES[:3], TRIPLES[3:4], TRIPLES[4:])
    for name, form, part in zip(names, formats, parts, strict=True):
        (folder / name).write_bytes(form(part))
    ingest_triples([folder], options=IngestOptions(out=tmp_path / "graph"))
    found = labelled(tmp_path / "graph")
    assert [found[split] for split in ("train", "valid", "test")] == [set(part) for part in parts]


def test_names():
    assert [format_of(name) for name in ("a.csv.gz", "a.NT", "a", "a.pq", "x.y.tsv.zst")] == [
        "csv",
        "nt",
        "tsv",
        "parquet",
        "tsv",
    ]
    splits = [
        split_of(name) for name in ("train.txt", "a-valid2.tsv", "dev.txt", "x_test.nt.gz", "constrain.txt", "x.txt")
    ]
    assert splits == ["train", "valid", "valid", "test", None, None]
    assert split_of("train-test.txt") is None, "two splits in a name are none"
    assert bare_name("dir/triples.v2.tsv.gz") == "triples.v2"


def test_graph_is_named_after_its_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wiki.tsv.gz").write_bytes(gzip.compress(tsv(), mtime=0))
    result = CliRunner().invoke(ingest, ["wiki.tsv.gz"])
    assert result.exit_code == 0, result.output
    assert manifest(tmp_path / "wiki.graph")["name"] == "wiki"
    assert "lines: 5 read = 5 kept + 0 duplicates + 0 rejected" in result.stdout
