"""Ids by looking up hashes are those of joining labels and those of sorting labels."""

import random

import numpy as np
import pytest

from ingest import IngestOptions, ingest_triples
from ingest.lookup import LabelTable
from tests.ingest_reference import check_index, labels, manifest


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 1024])
def test_label_table_finds_every_hash(count):
    rng = np.random.default_rng(count)
    # Few high bits and equal low bits, so that many hashes want the same slot; 0 is a hash like others.
    hashes = np.unique(rng.integers(0, 2**20, 3 * count + 5, dtype=np.uint64) << np.uint64(8))
    hashes = rng.permutation(np.concatenate([hashes[:count], rng.integers(2**40, 2**64, count, dtype=np.uint64)]))
    table = LabelTable.make(hashes)
    asked = rng.integers(0, max(len(hashes), 1), 5 * count)
    assert table.find(hashes[asked]).tolist() == asked.tolist()


def test_label_table_refuses_equal_hashes():
    assert LabelTable.make(np.array([5, 7, 5], np.uint64)) is None


@pytest.mark.parametrize("given", [False, True])
def test_lookup_and_join_give_the_same_graph(given, tmp_path, monkeypatch):
    rng = random.Random(4)
    names = ["".join(rng.choices("abé \x00", k=rng.randrange(1, 20))) for _ in range(300)]
    text = "".join(f"{rng.choice(names)}\t{rng.choice(names[:9])}\t{rng.choice(names)}\n" for _ in range(3000))
    (tmp_path / "t.tsv").write_bytes(text.encode())
    inputs = {"train": [tmp_path / "t.tsv"]} if given else {"inputs": [tmp_path / "t.tsv"]}
    ingest_triples(**inputs, options=IngestOptions(out=tmp_path / "lookup"))
    # As if two labels had one hash.
    monkeypatch.setattr(LabelTable, "make", lambda hashes: None)
    ingest_triples(**inputs, options=IngestOptions(out=tmp_path / "join"))
    assert manifest(tmp_path / "lookup")["checksum"] == manifest(tmp_path / "join")["checksum"]
    lines = [line.split("\t") for line in text.split("\n")[:-1]]
    entities = sorted({line[place] for line in lines for place in (0, 2)}, key=str.encode)
    assert labels(tmp_path / "join", "entities") == entities
    check_index(tmp_path / "lookup")
