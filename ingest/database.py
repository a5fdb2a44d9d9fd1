"""The scratch DuckDB database of an ingest: labels become ids here, spilling to disk under a memory limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb
import pyarrow as pa

from ingest.options import SPLITS, IngestOptions, available_threads, memory_limit

BATCH_ROWS = 1 << 18
# Buffers of Python, Arrow and the allocator come on top of what DuckDB counts, so it gets a part of the limit.
_DUCKDB_SHARE = 0.7


def quote(text: object) -> str:
    """Write a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def quote_path(path: Path) -> str:
    """Write a path as an SQL literal that names this very file: DuckDB reads `[`, `*` and `?` as a pattern."""
    return quote(re.sub(r"[*?\[]", r"[\g<0>]", str(path)))


def parquet(*files: Path, options: str = "") -> str:
    """Write files as a table of SQL, to which the names of their folders add no columns."""
    return f"read_parquet([{', '.join(map(quote_path, files))}], hive_partitioning = false{options})"


def select_ids(graph: Path) -> str:
    """Write the query for all triples of a graph as ids: split, source, relation, target."""
    files = {split: sorted((graph / "triples" / f"split={split}").glob("*.parquet")) for split in SPLITS}
    return " UNION ALL ".join(
        f"SELECT '{split}' AS split, * FROM {parquet(*own)}" for split, own in files.items() if own
    )


class Scratch:
    """A DuckDB database that lives in memory and in a spill directory for the time of one ingest."""

    def __init__(self, options: IngestOptions, spill: Path) -> None:
        limit = memory_limit(options)
        self.connection = duckdb.connect(":memory:")
        self.run(f"SET memory_limit = '{int(limit * _DUCKDB_SHARE)}B'")
        self.threads = options.threads or available_threads()
        self.run(f"SET threads = {self.threads}")
        self.run(f"SET temp_directory = {quote(spill)}")
        # The order of rows never matters here: everything that is ordered says so.
        self.run("SET preserve_insertion_order = false")
        self.run("SET enable_progress_bar = false")
        self._inserter = self.connection.cursor()
        self._inserting = Lock()

    def run(self, sql: str) -> None:
        self.connection.execute(sql)

    def value(self, sql: str) -> Any:
        """Give the only value of a query."""
        ((value,),) = self.connection.execute(sql).fetchall()
        return value

    def insert(self, table: str, batch: pa.RecordBatch) -> None:
        """Add rows to a table; any thread may, also while `stream` is under way."""
        with self._inserting:
            self._inserter.register("batch", batch)
            self._inserter.execute(f"INSERT INTO {table} SELECT * FROM batch")
            self._inserter.unregister("batch")

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield the result of a query as Arrow batches, without ever holding all of it."""
        yield from self.connection.sql(sql).to_arrow_reader(BATCH_ROWS)

    def close(self) -> None:
        self._inserter.close()
        self.connection.close()


def load_raw(scratch: Scratch, batches: Iterator[pa.RecordBatch]) -> None:
    """Store the labels of all triples as they were read."""
    scratch.run("CREATE TABLE raw (source VARCHAR, relation VARCHAR, target VARCHAR, split UTINYINT)")
    for batch in batches:
        scratch.insert("raw", batch)
