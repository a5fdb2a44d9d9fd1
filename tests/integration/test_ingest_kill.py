"""kill -9 at 20 random moments: what opens as a graph is complete, and the next run succeeds."""

import random
import shutil
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
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


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


def test_sigterm_leaves_nothing(triples, tmp_path):
    process = start(triples, tmp_path / "graph")
    assert b"reading" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode in (143, 0), "0: it was done before the signal came"
    assert [path.name for path in tmp_path.iterdir()] == (["graph"] if process.returncode == 0 else [])
