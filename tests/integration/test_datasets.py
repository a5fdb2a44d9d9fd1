"""Datasets by name: found, downloaded, resumed, verified and cached, against a server of our own."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ingest import IngestError
from ingest.cli import ingest
from ingest.datasets import DATASETS, Dataset, dataset_folder, dataset_graph
from tests.ingest_reference import manifest

FILES = {
    "train.txt": b"".join(b"e%d\tr%d\te%d\n" % (i, i % 3, (7 * i + 1) % 50) for i in range(50)),
    "valid.txt": b"e1\tr0\te2\n",
    "test.txt": b"e2\tr1\te9\n",
}


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Mirror:
    """A server of one archive: whether it knows ranges, and after how many bytes its next answer breaks off."""

    def __init__(self) -> None:
        self.content = archive(FILES)
        self.knows_ranges, self.breaks_after = True, 1 << 20
        self.asked: list[tuple[str, str | None]] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append((self.path, given := self.headers["Range"]))
                start = int(given.removeprefix("bytes=").removesuffix("-")) if given and mirror.knows_ranges else 0
                if start >= len(mirror.content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(mirror.content) - start))
                self.end_headers()
                self.wfile.write(mirror.content[start : start + mirror.breaks_after])

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/pub"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """Serve a tiny WN18RR, with an empty cache and no SATTLE_DATA."""
    sums = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in FILES.items()}
    monkeypatch.setitem(DATASETS, "WN18RR", Dataset(name="WN18RR", files=sums))
    mirror = Mirror()
    monkeypatch.setenv("SATTLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SATTLE_DATA_URL", mirror.address + "/")
    monkeypatch.delenv("SATTLE_DATA", raising=False)
    thread = threading.Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


def holds_the_files(folder: Path) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def run(*arguments: object) -> Result:
    return CliRunner().invoke(ingest, [str(a) for a in arguments])


def test_the_command_downloads_once_and_ingests(mirror: Mirror, tmp_path: Path) -> None:
    first = run("--dataset", "wn18rr", "--out", tmp_path / "first.graph")
    assert first.exit_code == 0, first.output
    assert "downloading bytes" in first.stderr
    assert manifest(tmp_path / "first.graph")["lines"]["kept"] == 52
    assert run("--dataset", "WN18RR", "--out", tmp_path / "second.graph").exit_code == 0
    assert mirror.asked == [("/pub/WN18RR.tar.gz", None)]
    assert sorted(p.name for p in (tmp_path / "cache/datasets").iterdir()) == ["WN18RR", "WN18RR.lock"]


def test_a_broken_download_goes_on_where_it_stopped(mirror: Mirror) -> None:
    mirror.breaks_after = 100
    with pytest.raises(IngestError, match=r"the connection broke .*100 of .* try again to go on"):
        dataset_folder("WN18RR")
    mirror.breaks_after = 1 << 20
    assert holds_the_files(dataset_folder("WN18RR"))
    assert [given for _, given in mirror.asked] == [None, "bytes=100-"]


def test_a_server_without_ranges_sends_all_again(mirror: Mirror) -> None:
    mirror.breaks_after, mirror.knows_ranges = 100, False
    with pytest.raises(IngestError):
        dataset_folder("WN18RR")
    mirror.breaks_after = 1 << 20
    assert holds_the_files(dataset_folder("WN18RR"))


@pytest.mark.parametrize("stale", [b"x" * 100, b"x" * 100_000], ids=["shorter", "longer"])
def test_the_part_of_another_file_is_given_up(mirror: Mirror, tmp_path: Path, stale: bytes) -> None:
    part = tmp_path / "cache/datasets/WN18RR.tar.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(stale)
    assert holds_the_files(dataset_folder("WN18RR"))
    assert [given for _, given in mirror.asked] == [f"bytes={len(stale)}-", None]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({**FILES, "test.txt": b"e2\tr1\te8\n"}, r"test.txt is not the published file: its SHA-256 is [0-9a-f]{64}"),
        ({**FILES, "test.txt": b"a\tb\tc\n"}, "test.txt has 6 bytes, expected 9"),
        ({"train.txt": FILES["train.txt"]}, "the archive lacks valid.txt, test.txt"),
        (None, "the archive cannot be read"),
    ],
)
def test_what_is_not_the_dataset_is_refused(
    mirror: Mirror, tmp_path: Path, files: dict[str, bytes] | None, reason: str
) -> None:
    mirror.content = archive(files) if files else b"<html>not found</html>"
    with pytest.raises(IngestError, match=f"what is there is not the dataset .*{reason}"):
        dataset_folder("WN18RR")
    assert len(mirror.asked) == 1
    assert not (tmp_path / "cache/datasets/WN18RR").exists()


def test_no_path_of_an_archive_is_followed(mirror: Mirror, tmp_path: Path) -> None:
    outside = {f"../../../{tmp_path.name}/{name}": content for name, content in FILES.items()}
    mirror.content = archive({**outside, "other.txt": b"unasked"})
    assert holds_the_files(dataset_folder("WN18RR"))
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://127.0.0.1:x", "nonnumeric port"),
        ("nonsense", "unknown url type"),
    ],
)
def test_offline_says_what_to_do(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, reason: str
) -> None:
    monkeypatch.setenv("SATTLE_DATA_URL", address)
    result = run("--dataset", "WN18RR", "--out", tmp_path / "graph")
    assert result.exit_code == 2
    assert re.search(rf"cannot download WN18RR from \S+/WN18RR.tar.gz: .*{reason}", result.stderr)
    assert "FOLDER/WN18RR and set SATTLE_DATA=FOLDER (or sattle-ingest --data-dir FOLDER)" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_processes_that_want_it_at_once_download_it_once(mirror: Mirror) -> None:
    with ThreadPoolExecutor(4) as pool:
        graphs = set(pool.map(lambda _: dataset_graph("WN18RR"), range(4)))
    assert len(mirror.asked) == 1
    assert [manifest(graph)["name"] for graph in graphs] == ["WN18RR"]


@pytest.mark.parametrize("by_option", [True, False])
def test_a_folder_that_holds_it_is_used_if_it_is_right(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    folder = tmp_path / "data" / "WN18RR"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    if not by_option:
        monkeypatch.setenv("SATTLE_DATA", str(folder.parent))
    option = folder.parent if by_option else None
    assert dataset_folder("WN18RR", option) == folder
    (folder / "valid.txt").write_bytes(b"e1\tr0\te3\n")
    with pytest.raises(IngestError, match=r"(--data-dir|SATTLE_DATA): .*valid.txt is not the published file"):
        dataset_folder("WN18RR", option)
    assert mirror.asked == []


def test_sattle_data_may_hold_other_datasets_only(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SATTLE_DATA", str(tmp_path))
    assert holds_the_files(dataset_folder("WN18RR"))
    with pytest.raises(IngestError, match=r"holds no folder WN18RR with train.txt, valid.txt and test.txt"):
        dataset_folder("WN18RR", tmp_path)


def test_a_damaged_cache_is_noticed(mirror: Mirror) -> None:
    folder = dataset_folder("WN18RR")
    (folder / "train.txt").write_bytes(b"")
    with pytest.raises(IngestError, match=rf"the cache is damaged: .*train.txt .*delete {folder}"):
        dataset_folder("WN18RR")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "WN18RR", "a.tsv"], "not both (--dataset is WN18RR, a file is a.tsv)"),
        (["--data-dir", "x", "a.tsv"], "--data-dir x needs --dataset: name one of FB15k-237, WN18RR"),
        (["--dataset", "FB15k"], "no dataset is called 'FB15k'; known are FB15k-237, WN18RR"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["FB15k-237", "WN18RR"])
def test_the_published_files_have_the_checksums_we_ask_for(name: str) -> None:
    root = os.environ.get("SATTLE_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"SATTLE_DATA names no folder with {name}")
    assert dataset_folder(name) == Path(root) / name
    sizes = {file: (Path(root) / name / file).stat().st_size for file in DATASETS[name].files}
    assert sizes == {file: size for file, (size, _) in DATASETS[name].files.items()}
