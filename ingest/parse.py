"""Turn a block of lines into three columns of labels, byte for byte, and say what is wrong with every other line.

The work is done on whole blocks with numpy; only lines that are out of the ordinary are looked at one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.blocks import Block
from ingest.errors import IngestError
from ingest.lines import (
    COLUMNS,
    RETURN,
    SPACE,
    TAB,
    BlockLines,
    Layout,
    Mask,
    Parsed,
    Positions,
    Reject,
    copy_spans,
    empty_columns,
    find_lines,
    judge_whole_lines,
    reject_line,
)
from ingest.ntriples import parse_ntriples
from ingest.quoted import split_quoted

_QUOTE = 34
Span = tuple[Positions, Positions]


def parse_block(block: Block, layout: Layout) -> Parsed:
    """Parse one block of lines."""
    if block.overlong:
        reason = f"longer than {layout.max_line_bytes} bytes"
        return Parsed(empty_columns(), [Reject(block.first_line, reason, block.data)])
    lines = find_lines(block)
    parsed = Parsed(empty_columns())
    judge_whole_lines(lines, layout, parsed)
    pieces = [parse_ntriples(lines, parsed)] if layout.ntriples else _parse_delimited(lines, layout, parsed)
    parsed.columns = [pa.concat_arrays([piece[c] for piece in pieces]) for c in range(3)]
    parsed.rejects.sort(key=lambda reject: reject.line)
    return parsed


def _parse_delimited(lines: BlockLines, layout: Layout, parsed: Parsed) -> list[list[pa.StringArray]]:
    """Split the open lines at their delimiters; lines with quotes (CSV only) go through `split_quoted`."""
    if layout.strip:
        _strip_line_ends(lines)
    quoted_rows: list[list[bytes]] = []
    if layout.quoted:
        quotes = np.flatnonzero(lines.bytes_ == _QUOTE)
        for i in np.unique(_line_of(lines, quotes)).tolist():
            if lines.open[i]:
                _parse_quoted(lines, i, layout, parsed, quoted_rows)
    inner = _inner_delimiters(lines, layout, parsed)
    starts, ends = lines.starts, lines.ends
    if not lines.open.all():
        starts, ends = starts[lines.open], ends[lines.open]
    lows = [starts, *(column + 1 for column in inner)]
    highs = [*inner, ends]
    fields = [(lows[place], highs[place]) for place in layout.positions]
    if layout.strip:
        fields = [_strip_field(lines.bytes_, low, high) for low, high in fields]
    plain = _gather(lines, fields, parsed)
    if not quoted_rows:
        return [plain]
    return [plain, [pa.array(column, pa.binary()).cast(pa.string()) for column in zip(*quoted_rows, strict=True)]]


def _line_of(lines: BlockLines, places: Positions) -> Positions:
    """Give the line every byte position lies in."""
    return np.searchsorted(lines.starts, places, side="right") - 1


def _inner_delimiters(lines: BlockLines, layout: Layout, parsed: Parsed) -> list[Positions]:
    """Give the places of the first, second, ... delimiter of the open lines; lines with another number are rejected."""
    delimiters = np.flatnonzero(lines.bytes_ == layout.delimiter)
    wanted = layout.num_fields - 1
    if lines.open.all() and len(delimiters) == wanted * len(lines.starts):
        columns = [delimiters[place::wanted] for place in range(wanted)]
        # Sorted places, as many as wanted: where the first and last of each line lie in it, so do all.
        if (columns[0] >= lines.starts).all() and (columns[-1] < lines.ends).all():
            return columns
    line_of = _line_of(lines, delimiters)
    inside = delimiters < lines.ends[line_of]
    delimiters, line_of = delimiters[inside], line_of[inside]
    counts = np.bincount(line_of, minlength=len(lines.starts))
    for i in np.flatnonzero(lines.open & (counts != wanted)).tolist():
        reject_line(lines, parsed, i, f"{counts[i] + 1} fields, expected {layout.num_fields}")
    left = delimiters[lines.open[line_of]]
    return [left[place::wanted] for place in range(wanted)]


def _gather(lines: BlockLines, fields: list[Span], parsed: Parsed) -> list[pa.StringArray]:
    """Copy the three fields out of the block, after rejecting lines with an empty one."""
    empty = [low >= high for low, high in fields]
    any_empty = empty[0] | empty[1] | empty[2]
    if any_empty.any():
        numbers = np.flatnonzero(lines.open)
        for row in np.flatnonzero(any_empty).tolist():
            role = next(name for name, column in zip(COLUMNS, empty, strict=True) if column[row])
            reject_line(lines, parsed, int(numbers[row]), f"empty {role}")
        fields = [(low[~any_empty], high[~any_empty]) for low, high in fields]
    if not len(fields[0][0]):
        return empty_columns()
    if b" " in lines.data:
        edges = np.zeros(len(fields[0][0]), bool)
        for low, high in fields:
            edges |= (lines.bytes_[low] == SPACE) | (lines.bytes_[high - 1] == SPACE)
        parsed.blank_edges += int(edges.sum())
    return [copy_spans(lines.data, low, high) for low, high in fields]


def _strip_line_ends(lines: BlockLines) -> None:
    """Move the ends of the lines inwards over blanks."""
    while True:
        last = lines.bytes_[np.maximum(lines.ends - 1, 0)]
        more = (lines.ends > lines.starts) & ((last == SPACE) | (last == TAB) | (last == RETURN))
        if not more.any():
            return
        lines.ends -= more


def _strip_field(bytes_: npt.NDArray[np.uint8], low: Positions, high: Positions) -> Span:
    """Move the bounds of fields inwards over blanks."""
    while (more := (low < high) & _is_blank(bytes_[low])).any():
        low = low + more
    while (more := (low < high) & _is_blank(bytes_[high - 1])).any():
        high = high - more
    return low, high


def _is_blank(bytes_: npt.NDArray[np.uint8]) -> Mask:
    blank: Mask = (bytes_ == SPACE) | (bytes_ == TAB)
    return blank


def _parse_quoted(lines: BlockLines, i: int, layout: Layout, parsed: Parsed, rows: list[list[bytes]]) -> None:
    """Judge one CSV line that holds a quote; a good one is added to `rows`."""
    try:
        fields = split_quoted(lines.text(i), layout.delimiter)
    except IngestError as error:
        reject_line(lines, parsed, i, str(error))
        return
    if len(fields) != layout.num_fields:
        reject_line(lines, parsed, i, f"{len(fields)} fields, expected {layout.num_fields}")
        return
    row = [fields[place].strip(b" \t") if layout.strip else fields[place] for place in layout.positions]
    if b"" in row:
        reject_line(lines, parsed, i, f"empty {COLUMNS[row.index(b'')]}")
        return
    parsed.blank_edges += any(label != label.strip(b" ") for label in row)
    lines.open[i] = False
    rows.append(row)
