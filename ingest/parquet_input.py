"""Read triples from a Parquet file: three columns, one triple a row."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingest.errors import IngestError
from ingest.heads import require_different
from ingest.lines import COLUMNS, Parsed, Reject

_BATCH_ROWS = 1 << 18


def read_parquet(path: str, columns: tuple[str, str, str] | None) -> Iterator[Parsed]:
    """Yield the rows of a Parquet file; a row with a null, empty or undecodable label is a reject."""
    # Parquet is read from its end, so standard input has to be taken in whole.
    source = pa.BufferReader(sys.stdin.buffer.read()) if path == "-" else path
    with pq.ParquetFile(source) as file:
        names = _choose(path, file.schema_arrow, columns)
        if twice := [name for name in names if file.schema_arrow.names.count(name) > 1]:
            raise IngestError(f"{path} has several columns called {twice[0]}; give them names of their own")
        row = 1
        for batch in file.iter_batches(_BATCH_ROWS, columns=names):
            yield _parse_batch([_as_binary(batch.column(name), path, name) for name in names], row)
            row += len(batch)


def _choose(path: str, schema: pa.Schema, columns: tuple[str, str, str] | None) -> list[str]:
    """Choose the columns by name or position; by default those named source, relation, target, or the only three."""
    names = schema.names
    if columns is None:
        if set(COLUMNS) <= set(names):
            return list(COLUMNS)
        if len(names) == 3:
            return list(names)
        raise IngestError(
            f"{path} has {len(names)} columns ({', '.join(names[:20])}); say which three with --columns, "
            "such as --columns subject,predicate,object"
        )
    chosen = []
    for column in columns:
        if column in names:
            chosen.append(column)
        elif column.isdecimal() and 1 <= int(column) <= len(names):
            chosen.append(names[int(column) - 1])
        else:
            raise IngestError(f"--columns {column}: {path} has the columns {', '.join(names[:20])}")
    require_different(chosen, columns, path)
    return chosen


def _as_binary(column: pa.Array, path: str, name: str) -> pa.Array:
    """Give the column's values as bytes: text as it is, integers in decimal."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_integer(kind):
        column = column.cast(pa.string())
    elif not (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        raise IngestError(f"{path}: column {name} is {kind}; labels must be text, binary or integers")
    return column.cast(pa.binary())


def _parse_batch(columns: list[pa.Array], first_row: int) -> Parsed:
    bad: dict[int, str] = {}
    for name, column in reversed(list(zip(COLUMNS, columns, strict=True))):
        missing = pc.or_kleene(pc.is_null(column), pc.equal(pc.binary_length(column), 0))
        for i in pc.indices_nonzero(pc.fill_null(missing, True)).to_pylist():
            bad[i] = f"empty {name}"
        for i in _undecodable(column):
            bad[i] = "invalid UTF-8"
    rejects = [
        Reject(first_row + i, bad[i], b"\t".join(column[i].as_py() or b"" for column in columns)) for i in sorted(bad)
    ]
    if bad:
        keep = pa.array([i not in bad for i in range(len(columns[0]))])
        columns = [column.filter(keep) for column in columns]
    return Parsed([column.cast(pa.string()) for column in columns], rejects)


def _undecodable(column: pa.Array) -> list[int]:
    """Give the rows that are not UTF-8; one look at the whole column is enough when there are none."""
    try:
        column.cast(pa.string())
        return []
    except pa.ArrowInvalid:
        found = []
        for i, value in enumerate(column.to_pylist()):
            try:
                (value or b"").decode("utf-8")
            except UnicodeDecodeError:
                found.append(i)
        return found
