"""Write one split: its triples as Parquet and its grouped query index as .npy, in one pass over sorted rows.

Every triple (s, r, t) is sorted as two rows (source, relation, target): (s, r, t) and (t, r + R, s). In that order the rows
are the index, the forward rows alone are the sorted triples, and equal rows are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.database import Scratch
from ingest.npy import NpyWriter

ROW_GROUP = 1 << 20
ROWS_PER_FILE = 1 << 27
_TRIPLES = pa.schema([("source", pa.int32()), ("relation", pa.int32()), ("target", pa.int32())])

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass
class SplitCounts:
    """What one split holds; N entities, R relations."""

    triples: int
    queries: int
    as_source: Int32s  # [N] triples with this entity as source
    as_target: Int32s  # [N]
    by_relation: Int64s  # [R] triples
    queries_by_relation: Int64s  # [2R] distinct queries, inverse ones at R and above


def sorted_rows(scratch: Scratch, split: int, num_relations: int) -> Iterator[tuple[Int64s, Int32s]]:
    """Yield query keys and targets of a split, both directions, in increasing order; repeated rows stay in."""
    both = 2 * num_relations
    query = (
        f"SELECT source::BIGINT * {both} + relation AS key, target FROM triples WHERE split = {split} UNION ALL "
        f"SELECT target::BIGINT * {both} + relation + {num_relations}, source FROM triples WHERE split = {split}"
    )
    for batch in scratch.stream(f"SELECT key, target FROM ({query}) ORDER BY key, target"):
        yield batch.column(0).to_numpy(), batch.column(1).to_numpy()


def write_split(
    rows: Iterator[tuple[Int64s, Int32s]], graph: Path, split: str, num_entities: int, num_relations: int
) -> SplitCounts:
    """Write triples/split=NAME and index/split=NAME from sorted rows, dropping repeated ones; give the counts."""
    index = graph / "index" / f"split={split}"
    index.mkdir(parents=True)
    counts = SplitCounts(
        0,
        0,
        np.zeros(num_entities, np.int32),
        np.zeros(num_entities, np.int32),
        np.zeros(num_relations, np.int64),
        np.zeros(2 * num_relations, np.int64),
    )
    with (
        NpyWriter(index / "queries.npy", np.int64) as queries,
        NpyWriter(index / "offsets.npy", np.int64) as offsets,
        NpyWriter(index / "targets.npy", np.int32) as targets,
        _TripleFiles(graph / "triples" / f"split={split}") as triples,
    ):
        for keys, ends, starts_query in _without_repeats(rows):
            queries.append(keys[starts_query])
            offsets.append(targets.length + np.flatnonzero(starts_query))
            targets.append(ends)
            _write_forward(keys, ends, starts_query, num_relations, triples, counts)
        offsets.append(np.array([targets.length]))
        counts.triples, counts.queries = triples.rows, queries.length
        assert targets.length == 2 * triples.rows, "every triple must stand in the index twice"
    return counts


def _without_repeats(
    rows: Iterator[tuple[Int64s, Int32s]],
) -> Iterator[tuple[Int64s, Int32s, npt.NDArray[np.bool_]]]:
    """Yield (keys, targets, does this row begin a query) without rows equal to the one before."""
    last_key, last_target = -1, -1
    for keys, ends in rows:
        if not len(keys):
            continue
        new_key = np.empty(len(keys), bool)
        new_key[0] = keys[0] != last_key
        np.not_equal(keys[1:], keys[:-1], out=new_key[1:])
        new = np.empty(len(keys), bool)
        new[0] = ends[0] != last_target
        np.not_equal(ends[1:], ends[:-1], out=new[1:])
        new |= new_key
        last_key, last_target = keys[-1], ends[-1]
        if new.all():
            yield keys, ends, new_key
        else:
            yield keys[new], ends[new], new_key[new]


def _write_forward(
    keys: Int64s,
    ends: Int32s,
    starts_query: npt.NDArray[np.bool_],
    num_relations: int,
    triples: _TripleFiles,
    counts: SplitCounts,
) -> None:
    """Write the forward rows as triples and add up the degrees."""
    if not len(keys):
        return
    sources = keys // (2 * num_relations)
    relations = keys - sources * (2 * num_relations)
    forward = relations < num_relations
    counts.queries_by_relation += np.bincount(relations[starts_query], minlength=2 * num_relations)
    counts.by_relation += np.bincount(relations[forward], minlength=num_relations)
    # Sources are sorted, so a batch touches one range of entities.
    low, high = int(sources[0]), int(sources[-1]) + 1
    inside = (sources - low).astype(np.int32)
    as_source = np.bincount(inside[forward], minlength=high - low)
    counts.as_source[low:high] += as_source.astype(np.int32)
    counts.as_target[low:high] += (np.bincount(inside, minlength=high - low) - as_source).astype(np.int32)
    triples.write(sources[forward].astype(np.int32), relations[forward].astype(np.int32), ends[forward])


class _TripleFiles:
    """Parquet files of one split, each of at most ROWS_PER_FILE triples; a split without triples has one empty file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._files = 0
        self._rows_in_file = 0
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def write(self, sources: Int32s, relations: Int32s, targets: Int32s) -> None:
        self._pending.append(pa.record_batch([sources, relations, targets], schema=_TRIPLES))
        self._pending_rows += len(sources)
        self.rows += len(sources)
        if self._pending_rows >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None or self._rows_in_file >= ROWS_PER_FILE:
            self._open_next()
        assert self._writer is not None
        table = pa.Table.from_batches(self._pending, _TRIPLES)
        self._writer.write_table(table, row_group_size=2 * ROW_GROUP)
        self._rows_in_file += len(table)
        self._pending, self._pending_rows = [], 0

    def _open_next(self) -> None:
        if self._writer:
            self._writer.close()
        path = self._folder / f"part-{self._files:05d}.parquet"
        # Sorted integers: delta encoding would be smaller still, but plain dictionary + zstd is read by every tool.
        self._writer = pq.ParquetWriter(path, _TRIPLES, compression="zstd")
        self._files += 1
        self._rows_in_file = 0

    def __enter__(self) -> _TripleFiles:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and (self._pending or self._writer is None):
            self._flush()
        if self._writer:
            self._writer.close()
