"""Write one split: its triples as Parquet and its grouped query index as .npy, in one pass over sorted rows.

In the order of `ingest.sorting` the rows of both directions are the index, the forward rows alone are the sorted
triples, and equal rows are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.background import Background
from ingest.npy import NpyWriter
from ingest.sorting import Rows

ROW_GROUP = 1 << 20
ROWS_PER_FILE = 1 << 27
_TRIPLES = pa.schema([("source", pa.int32()), ("relation", pa.int32()), ("target", pa.int32())])

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass
class SplitCounts:
    """What one split holds; N entities, R relations."""

    triples: int
    queries: int
    as_source: Int32s  # [N] triples with this entity as source
    as_target: Int32s  # [N]
    by_relation: Int64s  # [R] triples
    queries_by_relation: Int64s  # [2R] distinct queries, inverse ones at R and above


def write_split(rows: Iterator[Rows], graph: Path, split: str, num_entities: int, num_relations: int) -> SplitCounts:
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
    written = 0
    with (
        NpyWriter(index / "queries.npy", np.int64) as queries,
        NpyWriter(index / "offsets.npy", np.int64) as offsets,
        NpyWriter(index / "targets.npy", np.int32) as targets,
        TripleFiles(graph / "triples" / f"split={split}") as triples,
        Background() as jobs,
    ):
        for part, begins in _without_repeats(rows):
            keys = part.sources[begins] * (2 * num_relations) + part.relations[begins]
            forward = part.relations < num_relations
            columns = [column[forward].astype(np.int32) for column in (part.sources, part.relations, part.targets)]
            jobs.submit(queries.append, keys)
            jobs.submit(offsets.append, written + np.flatnonzero(begins))
            jobs.submit(targets.append, part.targets.astype(np.int32))
            jobs.submit(triples.write, *columns)
            _add_counts(counts, part, begins, forward)
            written += len(part)
            counts.queries += len(keys)
            counts.triples += len(columns[0])
        jobs.submit(offsets.append, np.array([written]))
    assert written == 2 * counts.triples, "every triple must stand in the index twice"
    return counts


def _without_repeats(rows: Iterator[Rows]) -> Iterator[tuple[Rows, Mask]]:
    """Yield the rows without those equal to the one before, and with each: does it begin a query?"""
    last = (-1, -1, -1)
    for part in rows:
        if not len(part):
            continue
        columns = (part.sources, part.relations, part.targets)
        new_source, new_relation, new_target = (
            np.concatenate(([column[0] != before], column[1:] != column[:-1]))
            for column, before in zip(columns, last, strict=True)
        )
        begins = new_source | new_relation
        new = begins | new_target
        last = (int(part.sources[-1]), int(part.relations[-1]), int(part.targets[-1]))
        if new.all():
            yield part, begins
        else:
            yield Rows(*(column[new] for column in columns)), begins[new]


def _add_counts(counts: SplitCounts, part: Rows, begins: Mask, forward: Mask) -> None:
    """Add up degrees and relation frequencies."""
    if not len(part):
        return
    num_relations = len(counts.by_relation)
    counts.queries_by_relation += np.bincount(part.relations[begins], minlength=2 * num_relations)
    counts.by_relation += np.bincount(part.relations, minlength=2 * num_relations)[:num_relations]
    # Sources are sorted, so these rows touch one range of entities.
    low, high = int(part.sources[0]), int(part.sources[-1]) + 1
    inside = part.sources - low
    as_source = np.bincount(inside[forward], minlength=high - low)
    counts.as_source[low:high] += as_source.astype(np.int32)
    counts.as_target[low:high] += (np.bincount(inside, minlength=high - low) - as_source).astype(np.int32)


class TripleFiles:
    """Parquet files of one split, each of about ROWS_PER_FILE triples; a split without triples has one empty file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._files = 0
        self._rows_in_file = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, sources: Int32s, relations: Int32s, targets: Int32s) -> None:
        self._pending.append(pa.record_batch([sources, relations, targets], schema=_TRIPLES))
        self._pending_rows += len(sources)
        if self._pending_rows >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None or self._rows_in_file >= ROWS_PER_FILE:
            self._open_next()
        assert self._writer is not None
        self._writer.write_table(pa.Table.from_batches(self._pending, _TRIPLES), row_group_size=2 * ROW_GROUP)
        self._rows_in_file += self._pending_rows
        self._pending, self._pending_rows = [], 0

    def _open_next(self) -> None:
        if self._writer:
            self._writer.close()
        path = self._folder / f"part-{self._files:05d}.parquet"
        # Only relations are few enough for a dictionary to pay.
        self._writer = pq.ParquetWriter(path, _TRIPLES, compression="zstd", use_dictionary=["relation"])
        self._files += 1
        self._rows_in_file = 0

    def __enter__(self) -> TripleFiles:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and (self._pending or self._writer is None):
            self._flush()
        if self._writer:
            self._writer.close()
