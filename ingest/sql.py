"""`sattle sql`: open a graph in DuckDB, as views with labels, and print what a query gives."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import duckdb

from ingest.database import parquet, quote, quote_path, select_ids
from ingest.errors import IngestError
from ingest.manifest import check_sizes, read_manifest

OUTPUTS = ("table", "csv", "json")
_MAX_WIDTH = 60


def open_views(graph: Path) -> duckdb.DuckDBPyConnection:
    """Open a graph as the views triples, entities and relations (and rejects, where lines were skipped).

    triples: split, source, relation, target as labels, and source_id, relation_id, target_id. The connection can reach
    no file outside the graph; that it writes none in it is for its caller to see to (`only_select`).
    """
    manifest = read_manifest(graph)
    check_sizes(graph, manifest)
    root = graph.resolve()
    connection = duckdb.connect(":memory:")
    connection.execute(f"SET allowed_directories = [{quote(root)}, {quote_path(root)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET enable_progress_bar = false")
    tables = ["entities", "relations", *(["rejects"] if "rejects.parquet" in manifest["files"] else [])]
    for table in tables:
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {parquet(root / f'{table}.parquet')}")
    connection.execute(
        "CREATE VIEW triples AS SELECT x.split AS split, s.label AS source, r.label AS relation, t.label AS target, "
        f"x.source AS source_id, x.relation AS relation_id, x.target AS target_id FROM ({select_ids(root)}) x "
        "JOIN entities s ON s.entity_id = x.source JOIN relations r ON r.relation_id = x.relation "
        "JOIN entities t ON t.entity_id = x.target"
    )
    return connection


def run_query(graph: Path, query: str, output: str, stream: TextIO) -> None:
    """Run a query on a graph's views and print the result as a table, CSV or JSON; raise IngestError in one line."""
    connection = None
    try:
        connection = open_views(graph)
        result = connection.execute(only_select(query))
        names = [column[0] for column in result.description or []]
        printer = {"table": _print_table, "csv": _print_csv, "json": _print_json}[output]
        printer(names, result.fetchall(), stream)
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        raise IngestError(f"the query failed: {text} (views: triples, entities, relations)") from None
    finally:
        if connection:
            connection.close()


def only_select(query: str) -> duckdb.Statement:
    """Give the one statement of a query; raise IngestError where it is none that only reads.

    A pivot is a `MULTI`. An explanation is refused, since EXPLAIN ANALYZE does what it explains.
    """
    statements = duckdb.extract_statements(query)
    if len(statements) != 1:
        raise IngestError(f"the query has {len(statements)} statements; write one SELECT")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI):
        kind = statements[0].type.name.replace("_", " ")
        raise IngestError(f"the query may not {kind}: it can only read the graph; write a SELECT")
    return statements[0]


def _print_table(names: Sequence[str], rows: Sequence[tuple[Any, ...]], stream: TextIO) -> None:
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)]
    for line in [list(names), ["-" * width for width in widths], *cells]:
        text = "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True))
        stream.write(text.rstrip() + "\n")
    stream.write(f"({len(rows)} rows)\n")


def _cell(value: Any) -> str:
    text = "" if value is None else str(_plain(value))
    text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 3] + "..."


def _plain(value: Any) -> Any:
    """Give bytes, as rejected lines are, as text."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _print_csv(names: Sequence[str], rows: Sequence[tuple[Any, ...]], stream: TextIO) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_plain(value) for value in row] for row in rows)


def _print_json(names: Sequence[str], rows: Sequence[tuple[Any, ...]], stream: TextIO) -> None:
    plain = (dict(zip(_distinct(names), map(_jsonable, row), strict=True)) for row in rows)
    records = (json.dumps(record, ensure_ascii=False, default=str, allow_nan=False) for record in plain)
    stream.write("[" + ",\n ".join(records) + "]\n")


def _jsonable(value: Any) -> Any:
    """Give a value as JSON can hold it, which knows no NaN or infinity, and only text as a key."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(_plain(key)): _jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [_jsonable(each) for each in value]
    return _plain(value)


def _distinct(names: Sequence[str]) -> list[str]:
    """Number columns of the same name: label, label_1."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{i}" if i else name for i in itertools.count())
        found.append(next(each for each in numbered if each not in found))
    return found
