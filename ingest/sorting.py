"""Sort the triples of a split in both directions, in memory where they fit and range by range where they do not.

Every triple (s, r, t) becomes two rows (source, relation, target): (s, r, t) and (t, r + R, s). A row is packed into
one integer, so sorting is numpy's sort of integers. Where ids are too large for that, DuckDB sorts the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingest.database import Scratch

YIELD_ROWS = 1 << 20
_CELLS = 1 << 14

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """How a row lies in the bits of an integer: source, relation (both directions), target, from the top."""

    num_entities: int
    num_relations: int

    @property
    def target_bits(self) -> int:
        return max(self.num_entities - 1, 1).bit_length()

    @property
    def relation_bits(self) -> int:
        return (2 * self.num_relations - 1).bit_length()

    @property
    def fits(self) -> bool:
        return 2 * self.target_bits + self.relation_bits <= 63

    def sql(self, source: str, relation: str, target: str) -> str:
        """Write the packed row as SQL."""
        bits = self.target_bits
        return f"(({source}::BIGINT << {self.relation_bits + bits}) | (({relation})::BIGINT << {bits}) | {target})"


@dataclass(frozen=True)
class Rows:
    """Sorted rows, cut anywhere."""

    sources: Int64s
    relations: Int64s  # in [0, 2R)
    targets: Int64s

    def __len__(self) -> int:
        return len(self.sources)


def sorted_rows(scratch: Scratch, split: int, num_entities: int, num_relations: int, max_rows: int) -> Iterator[Rows]:
    """Yield the rows of a split in increasing order, repeated ones included, holding about `max_rows` at a time."""
    packing = Packing(num_entities, num_relations)
    if not packing.fits:
        yield from _sorted_by_duckdb(scratch, split, num_relations)
        return
    bits, mask = packing.target_bits, (1 << packing.target_bits) - 1
    relation_mask = (1 << packing.relation_bits) - 1
    for low, high, count in _ranges(scratch, split, num_entities, max_rows):
        packed = _fetch(scratch, split, packing, low, high, count)
        packed.sort()
        for start in range(0, count, YIELD_ROWS):
            piece = packed[start : start + YIELD_ROWS]
            query = piece >> bits
            yield Rows(query >> packing.relation_bits, query & relation_mask, piece & mask)


def _ranges(scratch: Scratch, split: int, num_entities: int, max_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of sources [low, high) with the number of their rows, at most `max_rows` where a cell allows it."""
    total = 2 * scratch.value(f"SELECT count(*) FROM triples WHERE split = {split}")
    if total <= max_rows:
        yield 0, num_entities, total
        return
    width = -(-num_entities // _CELLS)
    cells = np.zeros(_CELLS, np.int64)
    for column in ("source", "target"):
        query = f"SELECT {column} // {width}, count(*) FROM triples WHERE split = {split} GROUP BY 1"
        for cell, count in scratch.connection.execute(query).fetchall():
            cells[cell] += count
    low, rows = 0, 0
    for cell, count in enumerate(cells.tolist()):
        if rows and rows + count > max_rows:
            yield low, cell * width, rows
            low, rows = cell * width, 0
        rows += count
    yield low, num_entities, rows


def _fetch(scratch: Scratch, split: int, packing: Packing, low: int, high: int, count: int) -> Int64s:
    """Fetch the packed rows with a source in [low, high)."""
    packed = np.empty(count, np.int64)
    filled = 0
    forward = packing.sql("source", "relation", "target")
    inverse = packing.sql("target", f"relation + {packing.num_relations}", "source")
    for row, column in ((forward, "source"), (inverse, "target")):
        within = f"{column} >= {low} AND {column} < {high}" if (low, high) != (0, packing.num_entities) else "true"
        for batch in scratch.stream(f"SELECT {row} FROM triples WHERE split = {split} AND {within}"):
            packed[filled : filled + len(batch)] = batch.column(0).to_numpy()
            filled += len(batch)
    assert filled == count, (filled, count)
    return packed


def _sorted_by_duckdb(scratch: Scratch, split: int, num_relations: int) -> Iterator[Rows]:
    query = (
        f"SELECT source, relation, target FROM triples WHERE split = {split} UNION ALL "
        f"SELECT target, relation + {num_relations}, source FROM triples WHERE split = {split}"
    )
    for batch in scratch.stream(f"SELECT * FROM ({query}) ORDER BY ALL"):
        yield Rows(*(column.to_numpy().astype(np.int64) for column in batch.columns))
