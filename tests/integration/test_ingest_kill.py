"""Killed at random moments, an ingest leaves only complete graphs; told to end, it leaves nothing and says so."""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ingest import IngestOptions, ingest_triples
from ingest.manifest import MANIFEST, read_manifest, verify


@pytest.fixture(scope="module")
def triples(tmp_path_factory):
    rng = random.Random(1)
    file = tmp_path_factory.mktemp("kill") / "triples.tsv"
    lines = (f"e{rng.randrange(20000)}\tr{rng.randrange(20)}\te{rng.randrange(20000)}\n" for _ in range(60_000))
    file.write_text("".join(lines))
    return file


def start(triples, out):
    command = [sys.executable, "-m", "ingest.cli", str(triples), "--out", str(out), "--force"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=heed_sighup)


def heed_sighup():
    """The tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def check_everything_that_opens(folder):
    """Verify every directory with a manifest, hidden ones included; give their number."""
    manifests = list(folder.rglob(MANIFEST))
    for path in manifests:
        verify(path.parent, read_manifest(path.parent))
    return len(manifests)


def test_kill_at_any_moment(triples, tmp_path):
    """Every kill falls into a random stage, and there at a random moment."""
    out = tmp_path / "graph"
    expected = ingest_triples([triples], options=IngestOptions(out=out)).manifest["checksum"]
    rng, killed, left = random.Random(2), 0, 0
    for attempt in range(20):
        if attempt >= 10:
            shutil.rmtree(out)
        process = start(triples, out)
        # A stage is printed when it has ended; 0 lines is the start of the program and the reading.
        stages = attempt % 10
        for _ in range(stages):
            process.stderr.readline()
        time.sleep(rng.uniform(0, 0.05 if stages else 1))
        process.kill()
        process.communicate()
        killed += process.returncode == -9
        left += len(list(tmp_path.glob(".graph.ingest-*")))
        opened = check_everything_that_opens(tmp_path)
        assert attempt >= 10 or opened, "a graph that is being replaced is there at every moment"
        report = ingest_triples([triples], options=IngestOptions(out=out, force=True))
        assert report.manifest["checksum"] == expected
        assert list(tmp_path.iterdir()) == [out], "what the killed process left has been removed"
    assert killed >= 10, "most runs must have been killed before they ended"
    assert left >= 5, "some must have been killed at work"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_told_to_end_it_leaves_nothing(triples, tmp_path, number, code):
    """In any stage: most of them sit in a DuckDB call, which turns the handler's exception into an error of its own."""
    rng, ended = random.Random(3), 0
    for stages in range(1, 7):
        process = start(triples, tmp_path / "graph")
        for _ in range(stages):
            process.stderr.readline()
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].decode()
        assert process.returncode in (code, 0), said  # 0: it was done before the signal came
        assert "Traceback" not in said
        assert "Error" not in said
        assert [path.name for path in tmp_path.iterdir()] == (["graph"] if process.returncode == 0 else [])
        ended += process.returncode == code
        shutil.rmtree(tmp_path / "graph", ignore_errors=True)
    assert ended, "no signal came in time"
