"""Labels of a graph and their ids, looked up in its Parquet files by DuckDB: never all of them in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from ingest.database import parquet
from sattle_dist.config import UserError
from sattle_dist.graph import Graph, GraphError, Int64s

MOST_SUGGESTIONS = 3
NEAR = 0.8  # of 1, by Jaro and Winkler


class UnknownLabel(UserError):
    """A label the graph does not hold."""


def labels_sql(graph: Graph, table: str) -> str:
    """Write the SQL of (id, label) of `entities` or `relations`: every row stands at the place of its id."""
    file = parquet(graph.path / f"{table}.parquet", options=", file_row_number = true")
    return f"(SELECT file_row_number AS id, label FROM {file})"


class Labels:
    """Finds labels and ids; a query reads through the file, which takes about a second for ten million labels."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.connection = duckdb.connect(":memory:")
        self.connection.execute("SET enable_progress_bar = false")

    def find(self, label: str, table: str) -> int:
        """Give the id of a label of `entities` or `relations`, or raise UnknownLabel with the nearest labels."""
        return int(self.find_all([label], table)[0])

    def find_all(self, wanted: Sequence[str], table: str) -> Int64s:
        """Give the id of each label, or raise UnknownLabel for the first that is none."""
        if odd := [label for label in wanted if not isinstance(label, str)]:
            raise UnknownLabel(f"a label is a str, got {odd[0]!r} of type {type(odd[0]).__name__}")
        try:
            self.connection.register("wanted", pa.table({"label": pa.array(wanted, pa.string())}))
        except UnicodeEncodeError as error:
            raise UnknownLabel(f"{error.object!r} is not UTF-8, as all labels are") from None
        rows = self._rows(f"SELECT label, id FROM wanted JOIN {labels_sql(self.graph, table)} USING (label)", [])
        self.connection.unregister("wanted")
        ids = dict(rows)
        if missing := [label for label in wanted if label not in ids]:
            raise UnknownLabel(self.unknown(missing[0], table))
        return np.array([ids[label] for label in wanted], np.int64)

    def unknown(self, label: str, table: str) -> str:
        """Say that there is no such label, and which ones are near."""
        near = self.near(label, table)
        kind = {"entities": "entity", "relations": "relation"}[table]
        return f"no {kind} is called {label!r}" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")

    def near(self, label: str, table: str) -> list[str]:
        """List the labels that look most like this one: mistyped, cut short, or in other letters."""
        rows = self._rows(
            f"""SELECT label FROM (
                SELECT label, greatest(jaro_winkler_similarity(lower(label), lower($1)),
                    CASE WHEN length($1) >= 3 AND contains(lower(label), lower($1)) THEN 0.9 ELSE 0 END) AS likeness
                FROM {labels_sql(self.graph, table)})
            WHERE likeness >= {NEAR} ORDER BY likeness DESC, length(label), label LIMIT {MOST_SUGGESTIONS}""",
            [label],
        )
        return [row[0] for row in rows]

    def of(self, ids: Int64s | Sequence[int], table: str) -> list[str]:
        """Give the label of each id."""
        wanted = np.asarray(ids, np.int64)
        distinct, place = np.unique(wanted, return_inverse=True)
        self.connection.register("wanted", pa.table({"id": distinct}))
        sql = f"SELECT label FROM wanted JOIN {labels_sql(self.graph, table)} USING (id) ORDER BY id"
        found = [row[0] for row in self._rows(sql, [])]
        self.connection.unregister("wanted")
        if len(found) != len(distinct):
            raise GraphError(f"{self.graph.path}/{table}.parquet lacks labels; ingest the graph again")
        return [found[i] for i in place]

    def _rows(self, sql: str, parameters: list[object]) -> list[tuple[Any, ...]]:
        try:
            rows: list[tuple[Any, ...]] = self.connection.execute(sql, parameters).fetchall()
        except duckdb.Error as error:
            reason = " ".join(str(error).split())
            raise GraphError(f"the labels of {self.graph.path} cannot be read ({reason})") from None
        return rows
