"""The scratch DuckDB database of an ingest: labels become ids here, spilling to disk under a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ingest.options import IngestOptions, available_threads, memory_limit
from ingest.places import SplitSql

BATCH_ROWS = 1 << 18
# Buffers of Python, Arrow and the allocator come on top of what DuckDB counts, so it gets a part of the limit.
_DUCKDB_SHARE = 0.7


def quote(text: object) -> str:
    """Write a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


class Scratch:
    """A DuckDB database that lives in memory and in a spill directory for the time of one ingest."""

    def __init__(self, options: IngestOptions, spill: Path) -> None:
        limit = memory_limit(options)
        self.connection = duckdb.connect(":memory:")
        self.run(f"SET memory_limit = '{int(limit * _DUCKDB_SHARE)}B'")
        self.run(f"SET threads = {options.threads or available_threads()}")
        self.run(f"SET temp_directory = {quote(spill)}")
        # The order of rows never matters here: everything that is ordered says so.
        self.run("SET preserve_insertion_order = false")
        self.run("SET enable_progress_bar = false")

    def run(self, sql: str) -> None:
        self.connection.execute(sql)

    def value(self, sql: str) -> Any:
        """Give the only value of a query."""
        ((value,),) = self.connection.execute(sql).fetchall()
        return value

    def insert(self, table: str, batch: pa.RecordBatch) -> None:
        self.connection.register("batch", batch)
        self.run(f"INSERT INTO {table} SELECT * FROM batch")
        self.connection.unregister("batch")

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield the result of a query as Arrow batches, without ever holding all of it."""
        yield from self.connection.sql(sql).to_arrow_reader(BATCH_ROWS)

    def close(self) -> None:
        self.connection.close()


def load_raw(scratch: Scratch, batches: Iterator[pa.RecordBatch]) -> None:
    """Store the labels of all triples as they were read."""
    scratch.run("CREATE TABLE raw (source VARCHAR, relation VARCHAR, target VARCHAR, split UTINYINT)")
    for batch in batches:
        scratch.insert("raw", batch)


def number_labels(scratch: Scratch, old: dict[str, Path]) -> None:
    """Give ids to labels in byte order: tables entities and relations (id, label).

    `old` holds the label files of a graph that grows: its labels keep their ids, new ones follow.
    """
    uses = {
        "entities": "SELECT source AS label FROM raw UNION ALL SELECT target FROM raw",
        "relations": "SELECT relation AS label FROM raw",
    }
    columns = {"entities": "entity_id", "relations": "relation_id"}
    for table, labels in uses.items():
        known = (
            f"SELECT {columns[table]}::INTEGER AS id, label FROM read_parquet({quote(old[table])})"
            if table in old
            else "SELECT 0::INTEGER AS id, ''::VARCHAR AS label WHERE false"
        )
        scratch.run(f"CREATE TABLE {table} AS {known}")
        first = scratch.value(f"SELECT count(*) FROM {table}")
        fresh = f"SELECT DISTINCT label FROM ({labels})"
        if first:
            fresh = f"SELECT label FROM ({fresh}) ANTI JOIN {table} USING (label)"
        scratch.run(
            f"INSERT INTO {table} "
            f"SELECT ({first} + row_number() OVER (ORDER BY label) - 1)::INTEGER, label FROM ({fresh})"
        )


def number_triples(scratch: Scratch, split: SplitSql) -> None:
    """Replace labels by ids: table triples (source, relation, target, split)."""
    roles = (("source", "entities"), ("relation", "relations"), ("target", "entities"))
    joins = " ".join(
        f"JOIN (SELECT id, label, {split.place_of('label', role)} AS place FROM {table}) {role[0]} "
        f"ON raw.{role} = {role[0]}.label"
        for role, table in roles
    )
    scratch.run(
        "CREATE TABLE triples AS SELECT s.id AS source, r.id AS relation, t.id AS target, "
        f"({split.split_of('raw.split', 's.place', 'r.place', 't.place')})::UTINYINT AS split FROM raw {joins}"
    )
    scratch.run("DROP TABLE raw")
