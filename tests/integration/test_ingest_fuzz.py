"""A thousand mutated inputs: each is ingested with its account in order, or refused in one line; never a traceback."""

import bz2
import gzip
import io
import random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest import IngestError, IngestOptions, ingest_triples
from ingest.manifest import read_manifest, verify
from tests.ingest_reference import check_index, labelled

NUM_INPUTS = 1000
SPICE = [b"\t", b"\n", b"\r", b"\r\n", b'"', b'""', b",", b" ", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xc3", b"#", b"<"]
SPICE += [b"\xed\xa0\x80", "é".encode(), b">", b".", b"_:", b"\\", b"'", b"\x1f\x8b", b"PAR1", b"x" * 300]
SPICE += [b"a\tr\tb\n", b""]


def seeds():
    triples = [(f"e{i % 9}", f"r{i % 3}", f"e{(i * 5 + 2) % 11}") for i in range(25)]
    tsv = "".join("\t".join(triple) + "\n" for triple in triples).encode()
    csv = "".join(f'"{s}",{r},"{t}, x"\n' for s, r, t in triples).encode()
    nt = "".join(f'<{s}> <{r}> "{t}"@en .\n' for s, r, t in triples).encode()
    sink = io.BytesIO()
    pq.write_table(pa.table(dict(zip("srt", zip(*triples, strict=True), strict=True))), sink)
    zst = pa.Codec("zstd").compress(tsv, asbytes=True)
    plain = [("t.tsv", tsv), ("t.csv", csv), ("t.nt", nt)]
    packed = [("t.tsv.gz", gzip.compress(tsv, mtime=0)), ("t.tsv.zst", zst), ("t.tsv.bz2", bz2.compress(tsv))]
    return plain * 4 + packed + [("t.parquet", sink.getvalue())]


def mutate(rng, data):
    """Change a few places: flip, insert, delete, repeat or cut off."""
    data = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2, 4, 12])):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place:place] = rng.choice(SPICE)
        elif kind == 2:
            del data[place : place + rng.randrange(1, 10)]
        elif kind == 3:
            data[place:place] = data[place : place + rng.randrange(60)]
        elif kind == 4 and rng.random() < 0.2:
            del data[place:]
        else:
            data[place : place + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def choose_options(rng, out):
    return IngestOptions(
        out=out,
        force=True,
        threads=1,
        memory_limit=256 << 20,
        on_reject=rng.choice(["error", "skip", "skip"]),
        header=rng.random() < 0.1,
        strip=rng.random() < 0.2,
        comment=rng.choice([None, None, "#", "e1"]),
        columns=rng.choice([None, None, None, ("3", "2", "1")]),
        max_line_bytes=rng.choice([1 << 20, 100]),
        valid_fraction=rng.choice([None, None, 0.3]),
        seed=rng.randrange(5),
    )


class Shared:
    """One DuckDB for all runs: closing it drops its tables, because starting one takes longer than a small ingest."""

    def __init__(self):
        self._connection = duckdb.connect(":memory:")

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def close(self):
        for (table,) in self._connection.execute("SELECT table_name FROM duckdb_tables()").fetchall():
            self._connection.execute(f"DROP TABLE {table}")


@pytest.fixture
def fast(monkeypatch):
    """Neither start a database nor wait for the disk a thousand times."""
    shared = Shared()
    monkeypatch.setattr("ingest.database.duckdb.connect", lambda path: shared)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def test_mutated_inputs(tmp_path, fast):
    rng = random.Random(20)
    inputs = seeds()
    made, refused = 0, set()
    for i in range(NUM_INPUTS):
        name, data = rng.choice(inputs)
        file, out = tmp_path / name, tmp_path / "graph"
        data = mutate(rng, data)
        file.write_bytes(data)
        options = choose_options(rng, out)
        before = out.exists()
        try:
            report = ingest_triples([file], options=options)
        except IngestError as error:
            message = str(error)
            assert message, data
            assert "\n" not in message, (message, data)
            assert "ingest stopped" not in message, (message, data)
            assert out.exists() == before
            refused.add(message.removeprefix("cannot read").split(":")[0].split("(")[0][:20])
        else:
            made += 1
            lines = report.manifest["lines"]
            assert lines["read"] == lines["kept"] + lines["duplicates"] + lines["rejected"], data
            if name == "t.tsv" and data[:2] not in (b"\x1f\x8b",):
                total = sum(lines[key] for key in ("read", "blank", "comments", "headers"))
                assert total == data.count(b"\n") + (not data.endswith(b"\n") and data != b""), data
            if i % 10 == 0:
                check_index(out)
                verify(out, read_manifest(out))
                kept = sum(len(part) for part in labelled(out).values())
                assert kept == lines["kept"]
        assert {path.name for path in tmp_path.iterdir()} <= {"graph", *(name for name, _ in inputs)}
    assert made >= NUM_INPUTS // 4
    assert len(refused) >= 4, "the inputs must fail in several ways"
