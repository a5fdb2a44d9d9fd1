"""A directory comes into its place whole or not at all."""

import os
import subprocess
import sys

import pytest

from ingest.errors import IngestError
from ingest.place import check_place, exchange, put_in_place, working_directory


def make(path, text):
    path.mkdir()
    (path / "manifest.json").write_text(text)
    return path


def test_working_directory_is_removed_also_after_an_error(tmp_path):
    def fail():
        with working_directory(tmp_path / "graph") as work:
            (work / "file").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_dead_processes_are_swept_and_of_living_ones_kept(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from ingest.place import working_directory\n"
        "with working_directory(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "graph")], check=False, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1, "a killed process leaves its directory"
    with working_directory(tmp_path / "graph") as first:
        assert list(tmp_path.iterdir()) == [first], "the next one removes it"
        with working_directory(tmp_path / "graph") as second, working_directory(tmp_path / "other"):
            assert {first, second} <= set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_exchange", [True, False])
def test_replacing_keeps_the_old_one_aside(tmp_path, monkeypatch, has_exchange):
    new, old = make(tmp_path / "new", "new"), make(tmp_path / "old", "old")
    if not has_exchange:
        monkeypatch.setattr("ingest.place.ctypes.CDLL", lambda *args, **kwargs: object())
    exchange(new, old)
    assert (old / "manifest.json").read_text() == "new"
    assert (new / "manifest.json").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


def test_a_replaced_graph_stops_being_one_before_its_files_go(tmp_path, monkeypatch):
    """As if the process were killed while it removes the old graph."""
    out = make(tmp_path / "graph", "old")
    (out / "entities.parquet").write_text("")
    monkeypatch.setattr("ingest.place.shutil.rmtree", lambda path, ignore_errors: None)
    with working_directory(out) as work:
        put_in_place(make(work / "graph", "new"), out, replace=True)
        assert (work / "graph" / "manifest.json").read_text() == "old"
    assert (work / "graph" / "entities.parquet").exists()
    assert list(tmp_path.rglob("manifest.json")) == [out / "manifest.json"]


def test_the_lock_is_removed_last(tmp_path, monkeypatch):
    with working_directory(tmp_path / "graph") as work:
        (work / "graph").mkdir()
        removed = []
        monkeypatch.setattr("ingest.place.shutil.rmtree", lambda path, ignore_errors: removed.append(path))
    assert removed == [work / "graph", work]


def test_put_in_place(tmp_path):
    put_in_place(make(tmp_path / "a", "1"), tmp_path / "graph", replace=False)
    with pytest.raises(IngestError, match="--force"):
        put_in_place(make(tmp_path / "b", "2"), tmp_path / "graph", replace=False)
    put_in_place(tmp_path / "b", tmp_path / "graph", replace=True)
    assert (tmp_path / "graph" / "manifest.json").read_text() == "2"
    (tmp_path / "empty").mkdir()
    put_in_place(make(tmp_path / "c", "3"), tmp_path / "empty", replace=False)
    assert (tmp_path / "empty" / "manifest.json").read_text() == "3"


def test_check_place_refuses_what_is_no_graph(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IngestError, match="not a directory"):
        check_place(tmp_path / "file", replace=True)
