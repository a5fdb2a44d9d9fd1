"""Number labels and triples: from the labels of table raw to the tables entities, relations and triples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ingest.background import Background
from ingest.database import Scratch, parquet
from ingest.lookup import BYTES_PER_LABEL, LabelTable, Uint64s
from ingest.places import SplitRule

_TABLES = ("entities", "relations", "entities")
_TRIPLES = pa.schema([("source", pa.int32()), ("relation", pa.int32()), ("target", pa.int32()), ("split", pa.uint8())])


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
            f"SELECT {columns[table]}::INTEGER AS id, label FROM {parquet(old[table])}"
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


def number_triples(scratch: Scratch, rule: SplitRule, memory: int) -> None:
    """Replace labels by ids: table triples (source, relation, target, split), where `rule` says the split.

    Labels are looked up by their hashes where the table of those fits into `memory` bytes, else they are joined.
    """
    tables = _label_tables(scratch, memory)
    if tables is None:
        _number_by_join(scratch, rule)
    else:
        _number_by_lookup(scratch, rule, tables)
    scratch.run("DROP TABLE raw")


def _label_tables(scratch: Scratch, memory: int) -> dict[str, LabelTable] | None:
    """Make the tables of entities and relations, or None where they are too large or two labels have one hash."""
    tables = {}
    for name in ("entities", "relations"):
        count = scratch.value(f"SELECT count(*) FROM {name}")
        memory -= count * BYTES_PER_LABEL
        if memory < 0:
            return None
        (hashes,) = _by_id(scratch, name, "hash(label)", 1)
        table = LabelTable.make(hashes)
        if table is None:
            return None
        tables[name] = table
    return tables


def _by_id(scratch: Scratch, table: str, values: str, num_values: int) -> list[Uint64s]:
    """Fetch 64-bit values of every label, at the place of its id."""
    # Fetched at once, which DuckDB does with all threads, unlike a stream; some tens of bytes a label.
    fetched = scratch.connection.sql(f"SELECT id, {values} FROM {table}").to_arrow_table()
    arrays = [np.empty(len(fetched), np.uint64) for _ in range(num_values)]
    for batch in fetched.to_batches():
        ids = batch.column(0).to_numpy()
        for array, column in zip(arrays, batch.columns[1:], strict=True):
            array[ids] = column.to_numpy()
    return arrays


def _number_by_lookup(scratch: Scratch, rule: SplitRule, tables: dict[str, LabelTable]) -> None:
    words: list[Uint64s] = []
    if rule.by_hash:
        entity_first, entity_last = _by_id(scratch, "entities", rule.words_sql("entity"), 2)
        relation_first, _ = _by_id(scratch, "relations", rule.words_sql("relation"), 2)
        words = [entity_first, relation_first, entity_last]
    scratch.run("CREATE TABLE triples (source INTEGER, relation INTEGER, target INTEGER, split UTINYINT)")
    hashes = "SELECT hash(source), hash(relation), hash(target), split FROM raw"

    def number(batch: pa.RecordBatch) -> None:
        *columns, split = (column.to_numpy() for column in batch.columns)
        ids = [tables[table].find(column) for column, table in zip(columns, _TABLES, strict=True)]
        if rule.by_hash:
            source, relation, target = (word.take(column) for word, column in zip(words, ids, strict=True))
            split = rule.splits(split, source ^ relation ^ target)
        scratch.insert("triples", pa.record_batch([*ids, split], schema=_TRIPLES))

    with Background(scratch.threads) as jobs:
        for batch in scratch.stream(hashes):
            jobs.submit(number, batch)


def _number_by_join(scratch: Scratch, rule: SplitRule) -> None:
    entities = f"(SELECT id, label, {rule.words_sql('entity')} FROM entities)"
    relations = f"(SELECT id, label, {rule.words_sql('relation')} FROM relations)"
    split = rule.split_sql("raw.split", "s.first", "r.first", "t.last")
    scratch.run(
        "CREATE TABLE triples AS "
        f"SELECT s.id AS source, r.id AS relation, t.id AS target, ({split})::UTINYINT AS split "
        f"FROM raw JOIN {entities} s ON raw.source = s.label JOIN {relations} r ON raw.relation = r.label "
        f"JOIN {entities} t ON raw.target = t.label"
    )
