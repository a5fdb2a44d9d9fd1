"""What a user can do wrong ends in one line that says so, exit code 2, and nothing left behind."""

import gzip
import os
import shutil
import subprocess
import sys

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from ingest import IngestError, IngestOptions, ingest_triples
from ingest.build import _explain
from ingest.cli import ingest
from ingest.sources import find_sources
from tests.ingest_reference import check_index, labelled, manifest

GOOD = b"a\tr\tb\nb\tr\ta\n"


def run(*arguments):
    return CliRunner().invoke(ingest, [str(argument) for argument in arguments])


def refuse(*arguments):
    """Run a command that must fail; give its one line of error."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), "no traceback"
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.tsv").write_bytes(GOOD)
    return tmp_path


def test_malformed_lines_stop_and_leave_nothing(folder):
    (folder / "bad.tsv").write_bytes(GOOD + b"a\tr\n" + b"a\t\tb\n\xff\tr\tb\n")
    line = refuse(folder / "bad.tsv", "--out", folder / "graph")
    for part in (
        "bad.tsv:3: 2 fields, expected 3",
        "bad.tsv:4: empty relation",
        "bad.tsv:5: invalid UTF-8",
        "--on-reject",
    ):
        assert part in line
    assert sorted(path.name for path in folder.iterdir()) == ["bad.tsv", "good.tsv"]


def test_rejects_are_put_aside_with_their_bytes(folder):
    (folder / "bad.tsv").write_bytes(GOOD + b"a\tr\n" + GOOD + b"\xff\tr\tb\n")
    result = run(folder / "bad.tsv", "--out", folder / "graph", "--on-reject", "skip")
    assert result.exit_code == 0
    assert "6 read = 2 kept + 2 duplicates + 2 rejected" in result.stdout
    rejects = pq.read_table(folder / "graph" / "rejects.parquet").to_pylist()
    file = str(folder / "bad.tsv")
    assert rejects == [
        {"file": file, "line": 3, "reason": "2 fields, expected 3", "text": b"a\tr"},
        {"file": file, "line": 6, "reason": "invalid UTF-8", "text": b"\xff\tr\tb"},
    ]
    check_index(folder / "graph")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "there are no triples in"),
        (b"\n\n", "nothing but empty, comment and header lines"),
        (
            b"a,r,b\nb,r,a\n",
            "(say what stands between the fields with --delimiter, or --format csv; mend them",
        ),
        (b"a\tr\tb\t1\n", "4 fields, expected 3 (say which three to take with --columns; mend them, or"),
        (b"\xff\xfea\x00", "is UTF-16"),
        (gzip.compress(GOOD * 1000, mtime=0)[:-20], "cannot read"),
    ],
)
def test_unreadable_inputs(data, message, folder):
    (folder / "x.tsv").write_bytes(data)
    assert message in refuse(folder / "x.tsv", "--out", folder / "graph")
    assert not (folder / "graph").exists()


def test_a_first_line_that_is_too_long_is_no_header(folder):
    (folder / "x.tsv").write_bytes(b"h" * 9_000_000 + b"\n" + GOOD)
    assert "the first line is longer than" in refuse(folder / "x.tsv", "--header", "--out", folder / "graph")
    result = run(folder / "x.tsv", "--on-reject", "skip", "--out", folder / "graph")
    assert "3 read = 2 kept + 0 duplicates + 1 rejected" in result.stdout


def test_damaged_parquet(folder):
    (folder / "x.parquet").write_bytes(b"PAR1 this is none")
    assert "cannot read" in refuse(folder / "x.parquet")


def test_parquet_columns_that_are_one(folder):
    columns = [pa.array(["a"])] * 4
    pq.write_table(pa.table(columns, ["source", "relation", "target", "source"]), folder / "twice.parquet")
    assert "twice.parquet has several columns called source" in refuse(folder / "twice.parquet")
    pq.write_table(pa.table(columns, ["s", "r", "t", "u"]), folder / "x.parquet")
    assert "s and 1 are one column of" in refuse(folder / "x.parquet", "--columns", "s,1,t")
    pq.write_table(pa.table(columns, ["s", "r", "t", "u"]).slice(0, 0), folder / "none.parquet")
    assert "it is empty" in refuse(folder / "none.parquet", "--columns", "s,r,t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to ingest"),
        (("missing.tsv",), "no such file: missing.tsv"),
        (("no-*.tsv",), "no file matches 'no-*.tsv'"),
        (("{}/good.tsv", "{}/good.tsv"), "is named twice"),
        (("{}/good.tsv", "--train", "{}/good.tsv"), "not both"),
        (("--valid", "{}/good.tsv"), "--valid needs --train"),
        (("{}",), "holds no file named like train.txt"),
        (("{}/good.tsv", "{}"), "is a directory"),
        (("{}/good.tsv", "--delimiter", "ab"), "--delimiter must be one ASCII character"),
        (("{}/good.tsv", "--columns", "1,2,4"), "the first line of"),
        (("{}/good.tsv", "--columns", "a,b,c"), "a name needs --header"),
        (("{}/good.tsv", "--columns", "x,y,z", "--header"), "has the columns a, r, b"),
        (("{}/good.tsv", "--columns", "1,2"), "must name three columns"),
        (("{}/good.tsv", "--columns", "a,1,b", "--header"), "--columns a,1,b: a and 1 are one column of"),
        (("{}/good.tsv", "--columns", "1,01,3"), "1 and 01 are one column of"),
        (
            ("--train", "{}/good.tsv", "--valid-fraction", "0.1"),
            "--valid-fraction 0.1 splits an input that has none",
        ),
        (("--train", "{}/good.tsv", "--seed", "9"), "--seed 9 chooses a split; these files have theirs"),
        (("{}/good.nt", "--header"), "--header would have no effect on nt input; leave it away"),
        (("{}/good.nt", "{}/good.parquet", "--comment", "%"), "--comment would have no effect on nt and parquet input"),
        (("{}/good.parquet", "--max-line-bytes", "99"), "--max-line-bytes would have no effect on parquet input"),
        (("{}/good.tsv", "--memory-limit", "1MB"), "--memory-limit must be at least 128MiB"),
        (("{}/good.tsv", "--memory-limit", "lots"), "is not a size"),
        (("{}/good.tsv", "--threads", "0"), "--threads must be from 1"),
        (("{}/good.tsv", "--seed", "-1"), "--seed must be from 0"),
        (("{}/good.tsv", "--valid-fraction", "1.5"), "nearest possible"),
        (("{}/good.tsv", "--append-to", "{}/nothing"), "no graph at"),
        (("{}/good.tsv", "--out", "{}/good.tsv/graph"), "cannot write to"),
        (("{}/good.tsv", "--out", "{}/good.tsv"), "is not a directory"),
    ],
)
def test_impossible_requests(arguments, message, folder):
    for name in ("good.nt", "good.parquet"):  # options are checked before anything is read
        (folder / name).touch()
    assert message in refuse(*(argument.format(folder) for argument in arguments))


def test_names_that_no_manifest_can_hold(folder):
    name = os.fsdecode(b"caf\xe9.tsv")
    (folder / name).write_bytes(GOOD)
    assert "caf\\xe9.tsv is not UTF-8" in refuse(folder / name, "--out", folder / "graph")
    assert "caf\\xe9.tsv is not UTF-8" in refuse(folder / "good.tsv", "--out", folder / name)


@pytest.mark.parametrize("other", ["test_negatives.txt", "hard-test.txt"])
def test_files_of_one_split_that_are_no_parts_are_ambiguous(other, folder):
    for name in ("train.txt", "test.txt", other):
        (folder / name).write_bytes(GOOD)
    first, second = sorted(["test.txt", other])
    assert f"holds both {first} and {second}; say which one with --test" in refuse(folder, "--out", folder / "graph")


def test_parts_of_one_split_are_taken_together(folder):
    for name in ("train-00001-of-00002.tsv", "train-00002-of-00002.tsv", "test.tsv", "test2.tsv", "valid.part-0.tsv"):
        (folder / name).write_bytes(GOOD)
    sources = find_sources([str(folder)], {}, "auto")
    assert [source.split for source in sources] == ["train", "train", "valid", "test", "test"]


def test_two_files_of_one_name_are_ambiguous(folder):
    for name in ("train.tsv", "train.tsv.gz"):
        (folder / name).write_bytes(GOOD)
    assert "holds both train.tsv and train.tsv.gz" in refuse(folder, "--out", folder / "graph")


def test_an_existing_graph_is_kept_unless_forced(folder):
    assert run(folder / "good.tsv", "--out", folder / "graph").exit_code == 0
    before = manifest(folder / "graph")
    (folder / "other.tsv").write_bytes(b"x\tr\ty\n")
    assert "--force replaces it" in refuse(folder / "other.tsv", "--out", folder / "graph")
    assert manifest(folder / "graph") == before
    (folder / "broken.tsv").write_bytes(b"x\n")
    assert "malformed" in refuse(folder / "broken.tsv", "--out", folder / "graph", "--force")
    assert manifest(folder / "graph") == before, "a failed --force keeps the old graph"
    assert run(folder / "other.tsv", "--out", folder / "graph", "--force").exit_code == 0
    assert labelled(folder / "graph")["train"] == {("x", "r", "y")}
    assert sorted(path.name for path in folder.iterdir()) == ["broken.tsv", "good.tsv", "graph", "other.tsv"]


def test_a_folder_that_is_no_graph_is_never_replaced(folder):
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.txt").write_text("...")
    assert "is not a graph" in refuse(folder / "good.tsv", "--out", folder / "precious", "--force")
    assert (folder / "precious" / "thesis.txt").exists()


def test_spill_directory_is_emptied(folder):
    (folder / "spill").mkdir()
    ingest_triples([folder / "good.tsv"], options=IngestOptions(out=folder / "g", temp_dir=folder / "spill"))
    assert list((folder / "spill").iterdir()) == []


def test_full_disk(tmp_path):
    """A file system of 1 MB, where the kernel lets us have one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace (unshare -Urm)")
    (tmp_path / "t.tsv").write_bytes(b"".join(b"e%d\tr\te%d\n" % (i, i * 7919 % 60000) for i in range(60000)))
    (tmp_path / "disk").mkdir()
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/disk || exit 77; "
        f"{sys.executable} -m ingest.cli {tmp_path}/t.tsv --out {tmp_path}/disk/graph --quiet; "
        f"code=$?; ls -A {tmp_path}/disk; exit $code"
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip("mounting a tmpfs is not allowed here")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: the disk is full")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == "", "nothing is left on the disk"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "the disk is full"),
        (duckdb.OutOfMemoryException("failed to offload data block of size 256.0 KiB"), "the disk is full"),
        (duckdb.OutOfMemoryException("could not allocate block"), "give more with --memory-limit"),
        (MemoryError(), "give more with --memory-limit"),
    ],
)
def test_resource_errors_are_explained(error, message, tmp_path):
    explained = _explain(error, IngestOptions(), tmp_path / "graph")
    assert isinstance(explained, IngestError)
    assert message in str(explained)
    assert "\n" not in str(explained)


def test_unreadable_file(folder):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / "good.tsv").chmod(0)
    assert "cannot read" in refuse(folder / "good.tsv", "--out", folder / "graph")
