"""Answer a file of queries into a Parquet file, in memory bounded whatever their length.

DuckDB turns labels into ids before, and ids into labels after; it spills beside the output.

In: TSV (no header) or Parquet with source, relation, target; the one that is asked for is `?`, empty or absent.
Out: query (its number in the input, from 0; an empty line is none), source, relation, target, asked ('target' or
'source'), place (from 1), entity_id of the answer, score, share, known_in (the split that holds the fact, or NULL).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.database import parquet, quote, quote_path
from ingest.errors import IngestError
from ingest.place import working_directory
from sattle_dist.config import ConfigError, UserError
from sattle_dist.files import is_written_through, replacing, require_writable
from sattle_dist.graph import SPLITS, Graph
from sattle_dist.labels import Labels, labels_sql
from sattle_dist.learner import Learner
from sattle_dist.predict import Prediction, known_facts, splits_holding
from sattle_dist.progress import Progress
from sattle_dist.topk import best_candidates, blocks

MEMORY_LIMIT = "1GB"  # for DuckDB; what does not fit goes to the scratch folder
ROWS_AT_ONCE = 1 << 16

ANSWERS = pa.schema(
    {
        "query": pa.int64(),
        "place": pa.int32(),
        "entity_id": pa.int64(),
        "score": pa.float32(),
        "share": pa.float32(),
        "split": pa.int8(),
    }
)


@dataclass(frozen=True, kw_only=True)
class BulkReport:
    num_queries: int
    num_skipped: int


def predict_file(
    learner: Learner,
    graph: Graph,
    queries: Path,
    out: Path,
    *,
    top: int = 10,
    new_only: bool = False,
    skip_unknown: bool = False,
    progress: bool = False,
) -> BulkReport:
    """Answer every query of a file. Every rank must call it; ranks on other machines must see the folder of `out`."""
    group = learner.group
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Path, BulkReport, str]:
            try:
                check_place(out)
                if out.exists() and queries.exists() and out.samefile(queries):
                    raise ConfigError(f"{out} is the file of queries and would be lost; name another for the answers")
                scratch = stack.enter_context(working_directory(out.absolute()))
                return scratch, read_queries(graph, queries, scratch, skip_unknown=skip_unknown), ""
            except (UserError, IngestError, OSError) as error:
                return Path(), BulkReport(num_queries=0, num_skipped=0), str(error)

        report: BulkReport
        scratch, report, problem = group.share(group.on_first(begin))
        if problem:
            raise ConfigError(problem)
        bar = Progress(total_queries=report.num_queries, done_queries=0, shown=progress and group.rank == 0)
        answer(learner, graph, scratch, top=top, new_only=new_only, progress=bar)
        group.on_first(lambda: write_answers(graph, scratch, out))
    return report


def check_place(out: Path) -> None:
    """Refuse a place that cannot be written before any work is done."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {out} does not exist; make it first")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name a Parquet file")
    if is_written_through(out):
        raise ConfigError(f"{out} is a link or no file; name a Parquet file that may be replaced")
    require_writable(out, "--out")


@contextlib.contextmanager
def database(scratch: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB database that keeps in the scratch folder what does not fit its memory."""
    connection = duckdb.connect(str(scratch / "scratch.duckdb"))
    try:
        for setting in (f"memory_limit = '{MEMORY_LIMIT}'", f"temp_directory = {quote(scratch)}"):
            connection.execute(f"SET {setting}")
        connection.execute("SET enable_progress_bar = false")
        yield connection
    except duckdb.Error as error:
        raise ConfigError(" ".join(str(error).split())) from None
    finally:
        connection.close()


def read_queries(graph: Graph, file: Path, scratch: Path, *, skip_unknown: bool) -> BulkReport:
    """Turn the labels of a file into ids: scratch/queries.parquet with query, entity_id, relation_id, in order."""
    if not file.is_file():
        raise ConfigError(f"no file of queries at {file}")
    with database(scratch) as connection:
        try:
            connection.execute(
                f"CREATE TABLE asked AS SELECT row_number() OVER () - 1 AS query, * FROM {read_sql(file)}"
            )
        except duckdb.InvalidInputException as error:
            if "utf-8" not in str(error).lower():
                raise
            raise ConfigError(f"{file} is not UTF-8; convert it first, such as with iconv -f LATIN1 -t UTF-8") from None
        check_form(connection, file)
        connection.execute(
            "CREATE TABLE found AS SELECT query, coalesce(source, target) AS label, relation, "
            "source IS NULL AS inverse, e.id AS entity_id, r.id AS relation_id FROM asked "
            f"LEFT JOIN {labels_sql(graph, 'entities')} e ON e.label = coalesce(source, target) "
            f"LEFT JOIN {labels_sql(graph, 'relations')} r ON r.label = relation"
        )
        unknown = "entity_id IS NULL OR relation_id IS NULL"
        (total, skipped), *_ = connection.execute(f"SELECT count(*), count_if({unknown}) FROM found").fetchall()
        if not total:
            raise ConfigError(f"{file} holds no queries; give one a line: source, relation, target, one of them ?")
        if skipped and not skip_unknown:
            first = connection.execute(f"SELECT * FROM found WHERE {unknown} ORDER BY query LIMIT 1").fetchall()[0]
            raise ConfigError(describe_unknown(graph, file, first, skipped, total))
        connection.execute(
            f"COPY (SELECT query, entity_id, relation_id + inverse::INT * {graph.num_relations} AS relation_id "
            f"FROM found WHERE NOT ({unknown}) ORDER BY query) "
            f"TO {quote(scratch / 'queries.parquet')} (FORMAT parquet)"
        )
    return BulkReport(num_queries=total - skipped, num_skipped=skipped)


def read_sql(file: Path) -> str:
    """Write the SQL that reads source, relation and target, NULL where a column is absent, empty or `?`."""
    file_has_lines = file.suffix.lower() not in (".parquet", ".pq")
    if not file_has_lines:
        try:
            columns = set(pq.read_schema(file).names)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {error}") from None
        if "relation" not in columns or not columns & {"source", "target"}:
            raise ConfigError(
                f"{file} needs the columns relation and source or target, it has {', '.join(sorted(columns))}"
            )
        table = parquet(file)
    else:
        columns = {"source", "relation", "target"}
        kinds = "{'source': 'VARCHAR', 'relation': 'VARCHAR', 'target': 'VARCHAR', 'more': 'VARCHAR'}"
        # No sign but the tab and the line end means anything, as in sattle-ingest.
        table = (
            f"read_csv({quote_path(file)}, columns = {kinds}, delim = '\t', quote = '', escape = '', header = false, "
        )
        table += "auto_detect = false, null_padding = true, strict_mode = false, hive_partitioning = false)"
    fields = [
        f"nullif(nullif({name}::VARCHAR, '?'), '') AS {name}" if name in columns else f"NULL::VARCHAR AS {name}"
        for name in ("source", "relation", "target")
    ]
    more = "more" if file_has_lines else "NULL"
    return f"(SELECT {', '.join(fields)}, {more} AS more FROM {table})"


def check_form(connection: duckdb.DuckDBPyConnection, file: Path) -> None:
    """Raise ConfigError with the first row that is no query."""
    if rows := connection.execute("SELECT query FROM asked WHERE more IS NOT NULL ORDER BY query LIMIT 1").fetchall():
        raise ConfigError(f"{file}, query {rows[0][0] + 1}: more than three fields; a line is source, relation, target")
    wrong = "relation IS NULL OR (source IS NULL) = (target IS NULL)"
    if rows := connection.execute(f"SELECT * FROM asked WHERE {wrong} ORDER BY query LIMIT 1").fetchall():
        query, *fields = rows[0]
        raise ConfigError(
            f"{file}, query {query + 1}: a query needs a relation and either a source or a target, the other one `?` "
            f"or empty; got source {fields[0]!r}, relation {fields[1]!r}, target {fields[2]!r}"
        )


def describe_unknown(graph: Graph, file: Path, first: tuple[object, ...], skipped: int, total: int) -> str:
    """Say how many queries name what the graph does not hold, and the first of them with near labels."""
    query, label, relation, _, entity_id, _ = first
    unknown, table = (str(label), "entities") if entity_id is None else (str(relation), "relations")
    assert isinstance(query, int)
    return (
        f"{skipped:,} of {total:,} queries in {file} name what the graph does not hold, first query {query + 1}: "
        f"{Labels(graph).unknown(unknown, table)} (mend them, or leave them out with --skip-unknown)"
    )


def answer(learner: Learner, graph: Graph, scratch: Path, *, top: int, new_only: bool, progress: Progress) -> None:
    """Answer scratch/queries.parquet block by block; rank 0 writes scratch/answers.parquet."""
    strike = known_facts(graph) if new_only else ()
    writer = pq.ParquetWriter(scratch / "answers.parquet", ANSWERS) if learner.group.rank == 0 else None
    with contextlib.closing(writer) if writer else contextlib.nullcontext():
        for batch in pq.ParquetFile(scratch / "queries.parquet").iter_batches(ROWS_AT_ONCE):
            columns = {name: batch[name].to_numpy() for name in ("query", "entity_id", "relation_id")}
            for block in blocks(len(batch), top):
                query, entity, relation = (column[block].astype(np.int64) for column in columns.values())
                best = best_candidates(learner, entity, relation, top, strike)
                if writer:
                    there = best.score > -np.inf  # [G, K]
                    place = np.broadcast_to(np.arange(1, there.shape[1] + 1, dtype=np.int32), there.shape)
                    split = splits_holding(graph, entity, relation, best).astype(np.int8)
                    values = [np.repeat(query, there.sum(1)), place[there], best.entity_id[there]]
                    values += [best.score[there], best.share[there], split[there]]
                    writer.write_table(pa.table(values, schema=ANSWERS))
                progress.advance(len(query), "predict", None)


def write_answers(graph: Graph, scratch: Path, out: Path) -> None:
    """Put the labels back and write the answers in the order of the queries: beside their place, then renamed."""
    splits = ", ".join(quote(split) for split in SPLITS)
    with database(scratch) as connection:
        connection.execute(
            "COPY (SELECT query, CASE WHEN inverse THEN e.label ELSE f.label END AS source, f.relation, "
            "CASE WHEN inverse THEN f.label ELSE e.label END AS target, "
            "CASE WHEN inverse THEN 'source' ELSE 'target' END AS asked, "
            f"place, a.entity_id, score, share, [{splits}][split + 1] AS known_in "
            f"FROM {parquet(scratch / 'answers.parquet')} a JOIN found f USING (query) "
            f"JOIN {labels_sql(graph, 'entities')} e ON e.id = a.entity_id ORDER BY query, place) "
            f"TO {quote(scratch / 'whole.parquet')} (FORMAT parquet)"
        )
    os.replace(scratch / "whole.parquet", out)


def write_predictions(predictions: list[Prediction], out: Path) -> None:
    """Write predictions with their place to a Parquet file: beside its place, then renamed."""
    columns: dict[str, list[object]] = {"place": list(range(1, len(predictions) + 1))}
    for name in ("source", "relation", "target", "score", "share"):
        columns[name] = [getattr(p, name) for p in predictions]
    kinds = {"place": pa.int32(), "score": pa.float32(), "share": pa.float32()}
    table = pa.table({name: pa.array(values, kinds.get(name, pa.string())) for name, values in columns.items()})
    with replacing(out) as draft:
        pq.write_table(table, draft)
