"""Learn from the first line of a file how its lines are laid out, and take a header off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ingest.blocks import Block
from ingest.errors import IngestError
from ingest.lines import Layout, kind_of
from ingest.options import IngestOptions
from ingest.quoted import split_quoted
from ingest.sources import Source

_HEADER_WORDS = {"source", "subject", "head", "relation", "predicate", "target", "object", "tail", "subj", "obj", "rel"}


@dataclass(frozen=True)
class Head:
    """What the first block of a file says."""

    blocks: list[Block]
    """The block, without its header."""
    layout: Layout | None = None
    """None: nothing but empty and comment lines so far."""
    headers: int = 0
    warnings: list[str] = field(default_factory=list)


def plain_layout(source: Source, options: IngestOptions) -> Layout:
    """Give the layout of a file's lines as far as the options say it."""
    return Layout(
        delimiter=ord(options.delimiter or ("," if source.format == "csv" else "\t")),
        quoted=source.format == "csv",
        ntriples=source.format == "nt",
        comment=options.comment.encode() if options.comment else None,
        strip=options.strip,
        max_line_bytes=options.max_line_bytes,
    )


def read_head(source: Source, options: IngestOptions, block: Block) -> Head:
    """Look at the first line that is neither empty nor a comment: the header, or the first triple."""
    layout = plain_layout(source, options)
    if layout.ntriples:
        return Head([block], layout)
    if block.overlong:
        if options.header or options.columns:
            raise IngestError(
                f"{source.path}:{block.first_line}: the first line is longer than {options.max_line_bytes} bytes; "
                "see --max-line-bytes"
            )
        return Head([block], layout)
    start, passed = 0, 0
    while start < len(block.data):
        end = block.data.index(b"\n", start)
        line = block.data[start:end].removesuffix(b"\r")
        if kind_of(line, layout) is None:
            break
        start, passed = end + 1, passed + 1
    else:
        return Head([block])
    if options.columns:
        layout = _with_columns(layout, line, source, options)
    if options.header:
        before = Block(block.data[:start], block.first_line)
        after = Block(block.data[end + 1 :], block.first_line + passed + 1)
        return Head([before, after], layout, headers=1)
    return Head([block], layout, warnings=_suspect_header(line, layout, source))


def _suspect_header(line: bytes, layout: Layout, source: Source) -> list[str]:
    try:
        names = {name.lower() for name in header_fields(line[:1000], layout)}
    except IngestError:
        return []
    if len(names & _HEADER_WORDS) < 2:
        return []
    return [f"the first line of {source.path} looks like a header but was taken as a triple (--header passes over it)"]


def _with_columns(layout: Layout, line: bytes, source: Source, options: IngestOptions) -> Layout:
    """Find the chosen columns among the fields of the first line."""
    assert options.columns is not None
    try:
        names = list(header_fields(line, layout))
    except IngestError as error:
        raise IngestError(f"{source.path}: first line: {error}") from None
    first, second, third = (_place(column, names, source.path, options.header) for column in options.columns)
    require_different((first, second, third), options.columns, source.path)
    return replace(layout, positions=(first, second, third), num_fields=len(names))


def require_different(found: Sequence[object], columns: Sequence[str], path: str) -> None:
    """Raise IngestError where two of the chosen columns, each by its name or its position, are the same one."""
    for i, j in ((0, 1), (0, 2), (1, 2)):
        if found[i] == found[j]:
            raise IngestError(f"--columns {','.join(columns)}: {columns[i]} and {columns[j]} are one column of {path}")


def _place(column: str, names: list[str], path: str, header: bool) -> int:
    """Find a column by its name in the header or by its position from 1."""
    if header and column in names:
        return names.index(column)
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    if column.isdecimal():
        raise IngestError(f"--columns {column}: the first line of {path} has {len(names)} fields")
    if not header:
        raise IngestError(f"--columns {column}: a name needs --header; without one use positions such as 1,2,3")
    raise IngestError(f"--columns {column}: the header of {path} has the columns {', '.join(names[:20])}")


def header_fields(line: bytes, layout: Layout) -> Sequence[str]:
    """Split a header line into column names."""
    parts = split_quoted(line, layout.delimiter) if layout.quoted else line.split(bytes([layout.delimiter]))
    return [part.decode("utf-8", errors="replace").strip() for part in parts]
