"""Sorting packed rows equals sorting tuples, in one piece, in ranges, and where DuckDB has to do it."""

import random

import numpy as np
import pytest

from ingest.database import Scratch
from ingest.options import IngestOptions
from ingest.sorting import Packing, sorted_rows


@pytest.fixture
def scratch(tmp_path):
    scratch = Scratch(IngestOptions(threads=1), tmp_path)
    yield scratch
    scratch.close()


def fill(scratch, rows):
    scratch.run("CREATE TABLE triples (source INTEGER, relation INTEGER, target INTEGER, split UTINYINT)")
    scratch.connection.executemany("INSERT INTO triples VALUES (?, ?, ?, ?)", rows)


def collect(rows):
    return [
        row
        for part in rows
        for row in zip(part.sources.tolist(), part.relations.tolist(), part.targets.tolist(), strict=True)
    ]


@pytest.mark.parametrize("max_rows", [10**6, 50, 1])
@pytest.mark.parametrize("num_entities", [31, 40_000, 2**31 - 1])
def test_sorted_rows(scratch, num_entities, max_rows):
    rng = random.Random(num_entities)
    relations = 7
    rows = [
        (
            rng.choice([0, num_entities - 1, rng.randrange(num_entities)]),
            rng.randrange(relations),
            rng.randrange(31),
            i % 2,
        )
        for i in range(200)
    ]
    rows += rows[:20]
    fill(scratch, rows)
    for split in (0, 1, 2):
        mine = [(s, r, t) for s, r, t, where in rows if where == split]
        expected = sorted(mine + [(t, r + relations, s) for s, r, t in mine])
        assert collect(sorted_rows(scratch, split, num_entities, relations, max_rows)) == expected


def test_rows_that_do_not_fit_into_an_integer_are_sorted_by_duckdb():
    assert Packing(2**26, 1000).fits is True  # 26 + 26 + 11 bits
    assert Packing(2**26 + 1, 1000).fits is False
    assert Packing(1, 1).fits is True


def test_duckdb_path_gives_the_same(scratch, monkeypatch):
    rng = np.random.default_rng(0)
    rows = [(int(s), int(r), int(t), 0) for s, r, t in rng.integers(0, (50, 3, 50), (300, 3))]
    fill(scratch, rows)
    packed = collect(sorted_rows(scratch, 0, 50, 3, 10**6))
    monkeypatch.setattr(Packing, "fits", property(lambda self: False))
    assert collect(sorted_rows(scratch, 0, 50, 3, 10**6)) == packed
