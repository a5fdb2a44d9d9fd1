"""Turn a block of lines into three columns of labels, byte for byte, and say what is wrong with every other line.

The work is done on whole blocks with numpy; only lines that are out of the ordinary are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.blocks import Block
from ingest.errors import IngestError

COLUMNS = ("source", "relation", "target")
_NEWLINE, _RETURN, _SPACE, _TAB, _QUOTE = 10, 13, 32, 9, 34
_NT_PATTERN = (
    rb"^[ \t]*(?P<source><[^<>\"{}|^`\\ \t]*(?:\\[uU][0-9A-Fa-f]+[^<>\"{}|^`\\ \t]*)*>|_:[^ \t<\"]+)"
    rb"[ \t]*(?P<relation><[^<> \t]*>)"
    rb"[ \t]*(?P<target><[^<> \t]*>|_:[^ \t<\"]+|\"(?:[^\"\\]|\\.)*\"(?:@[A-Za-z0-9-]+|\^\^<[^<> \t]*>)?)"
    rb"[ \t]*\.[ \t]*(?:#.*)?$"
)

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Span = tuple[Positions, Positions]


@dataclass(frozen=True)
class Reject:
    """One line (or row) that is no triple."""

    line: int
    reason: str
    text: bytes


@dataclass
class Parsed:
    """What one block holds: columns of equal length, and everything that is not in them."""

    columns: list[pa.StringArray]
    rejects: list[Reject] = field(default_factory=list)
    blank: int = 0
    comments: int = 0
    blank_edges: int = 0
    """Triples with a label that begins or ends with a blank."""

    @property
    def triples(self) -> int:
        return len(self.columns[0])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the fields lie in a line."""

    delimiter: int  # one byte; ignored for N-Triples
    quoted: bool  # fields may stand in double quotes (CSV)
    ntriples: bool = False
    positions: tuple[int, int, int] = (0, 1, 2)
    num_fields: int = 3
    comment: bytes | None = None
    strip: bool = False
    max_line_bytes: int = 1 << 20


@dataclass
class _Lines:
    """The lines of a block: bytes [starts[i], ends[i]) without their line end; `open` marks those not yet judged."""

    data: bytes
    bytes_: npt.NDArray[np.uint8]
    starts: Positions
    ends: Positions
    open: Mask
    first_line: int

    def text(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]]


def parse_block(block: Block, layout: Layout) -> Parsed:
    """Parse one block of lines."""
    if block.overlong:
        reason = f"longer than {layout.max_line_bytes} bytes"
        return Parsed(_empty_columns(), [Reject(block.first_line, reason, block.data)])
    lines = _find_lines(block)
    parsed = Parsed(_empty_columns())
    _judge_whole_lines(lines, layout, parsed)
    pieces = [_parse_ntriples(lines, parsed)] if layout.ntriples else _parse_delimited(lines, layout, parsed)
    parsed.columns = [pa.concat_arrays([piece[c] for piece in pieces]) for c in range(3)]
    parsed.rejects.sort(key=lambda reject: reject.line)
    return parsed


def _empty_columns() -> list[pa.StringArray]:
    return [pa.array([], pa.string())] * 3


def _find_lines(block: Block) -> _Lines:
    bytes_ = np.frombuffer(block.data, np.uint8)
    newlines = np.flatnonzero(bytes_ == _NEWLINE)
    starts = np.empty_like(newlines)
    starts[:1] = 0
    starts[1:] = newlines[:-1] + 1
    ends = newlines.copy()
    ends -= (ends > starts) & (bytes_[np.maximum(ends - 1, 0)] == _RETURN)
    return _Lines(block.data, bytes_, starts, ends, np.ones(len(starts), bool), block.first_line)


def _reject(lines: _Lines, parsed: Parsed, i: int, reason: str) -> None:
    lines.open[i] = False
    parsed.rejects.append(Reject(lines.first_line + i, reason, lines.text(i)))


def _judge_whole_lines(lines: _Lines, layout: Layout, parsed: Parsed) -> None:
    """Sort out the lines that need no look at their fields: empty, comment, too long, not UTF-8."""
    lengths = lines.ends - lines.starts
    if lengths.size == 0:
        return
    # Only a line of the first byte's kind can be blank or a comment; few lines are looked at one by one.
    first = lines.bytes_[lines.starts]
    suspects = (lengths == 0) | (first == _SPACE) | (first == _TAB) | (first == _RETURN)
    comment = b"#" if layout.ntriples else layout.comment
    if comment:
        suspects |= first == comment[0]
    for i in np.flatnonzero(suspects).tolist():
        text = lines.text(i)
        if not text.strip(b" \r" if layout.delimiter == _TAB and not layout.ntriples else b" \t\r"):
            parsed.blank += 1
            lines.open[i] = False
        elif comment and (text.lstrip(b" \t") if layout.ntriples else text).startswith(comment):
            parsed.comments += 1
            lines.open[i] = False
    for i in np.flatnonzero(lines.open & (lengths > layout.max_line_bytes)).tolist():
        _reject(lines, parsed, i, f"longer than {layout.max_line_bytes} bytes")
    if not lines.data.isascii() and not _is_utf8(lines.data):
        for i in np.flatnonzero(lines.open).tolist():
            if not _is_utf8(lines.text(i)):
                _reject(lines, parsed, i, "invalid UTF-8")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parse_delimited(lines: _Lines, layout: Layout, parsed: Parsed) -> list[list[pa.StringArray]]:
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


def _line_of(lines: _Lines, places: Positions) -> Positions:
    """Give the line every byte position lies in."""
    return np.searchsorted(lines.starts, places, side="right") - 1


def _inner_delimiters(lines: _Lines, layout: Layout, parsed: Parsed) -> list[Positions]:
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
        _reject(lines, parsed, i, f"{counts[i] + 1} fields, expected {layout.num_fields}")
    left = delimiters[lines.open[line_of]]
    return [left[place::wanted] for place in range(wanted)]


def _gather(lines: _Lines, fields: list[Span], parsed: Parsed) -> list[pa.StringArray]:
    """Copy the three fields out of the block, after rejecting lines with an empty one."""
    empty = [low >= high for low, high in fields]
    any_empty = empty[0] | empty[1] | empty[2]
    if any_empty.any():
        numbers = np.flatnonzero(lines.open)
        for row in np.flatnonzero(any_empty).tolist():
            role = next(name for name, column in zip(COLUMNS, empty, strict=True) if column[row])
            _reject(lines, parsed, int(numbers[row]), f"empty {role}")
        fields = [(low[~any_empty], high[~any_empty]) for low, high in fields]
    if not len(fields[0][0]):
        return _empty_columns()
    if b" " in lines.data:
        edges = np.zeros(len(fields[0][0]), bool)
        for low, high in fields:
            edges |= (lines.bytes_[low] == _SPACE) | (lines.bytes_[high - 1] == _SPACE)
        parsed.blank_edges += int(edges.sum())
    return [_copy_spans(lines.data, low, high) for low, high in fields]


def _copy_spans(data: bytes, low: Positions, high: Positions) -> pa.StringArray:
    """Make the strings data[low:high], at least one, of increasing spans.

    The bounds are read as the offsets of 2n - 1 strings that cover the block, of which every second is taken.
    """
    offsets = np.empty((len(low), 2), np.int32)
    offsets[:, 0], offsets[:, 1] = low, high
    whole = pa.Array.from_buffers(pa.string(), 2 * len(low) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(0, 2 * len(low), 2, dtype=np.int32)))


def _strip_line_ends(lines: _Lines) -> None:
    """Move the ends of the lines inwards over blanks."""
    while True:
        last = lines.bytes_[np.maximum(lines.ends - 1, 0)]
        more = (lines.ends > lines.starts) & ((last == _SPACE) | (last == _TAB) | (last == _RETURN))
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
    blank: Mask = (bytes_ == _SPACE) | (bytes_ == _TAB)
    return blank


def _parse_quoted(lines: _Lines, i: int, layout: Layout, parsed: Parsed, rows: list[list[bytes]]) -> None:
    """Judge one CSV line that holds a quote; a good one is added to `rows`."""
    try:
        fields = split_quoted(lines.text(i), layout.delimiter)
    except IngestError as error:
        _reject(lines, parsed, i, str(error))
        return
    if len(fields) != layout.num_fields:
        _reject(lines, parsed, i, f"{len(fields)} fields, expected {layout.num_fields}")
        return
    row = [fields[place].strip(b" \t") if layout.strip else fields[place] for place in layout.positions]
    if b"" in row:
        _reject(lines, parsed, i, f"empty {COLUMNS[row.index(b'')]}")
        return
    parsed.blank_edges += any(label != label.strip(b" ") for label in row)
    lines.open[i] = False
    rows.append(row)


def split_quoted(line: bytes, delimiter: int) -> list[bytes]:
    """Split a CSV line; a field that begins with a quote ends at the next single quote, and "" in it is one quote."""
    fields, place, end = [], 0, len(line)
    separator = bytes([delimiter])
    while True:
        if line[place : place + 1] == b'"':
            close = place + 1
            while True:
                close = line.find(b'"', close)
                if close < 0:
                    raise IngestError("quoted field is not closed on its line")
                if line[close + 1 : close + 2] != b'"':
                    break
                close += 2
            fields.append(line[place + 1 : close].replace(b'""', b'"'))
            place = close + 1
            if place < end and line[place : place + 1] != separator:
                raise IngestError("text after a closing quote")
        else:
            stop = line.find(separator, place)
            stop = end if stop < 0 else stop
            fields.append(line[place:stop])
            place = stop
        if place >= end:
            return fields
        place += 1


def _parse_ntriples(lines: _Lines, parsed: Parsed) -> list[pa.StringArray]:
    """Match the open lines against the grammar of N-Triples; terms are kept as they are written."""
    if not lines.open.any():
        return _empty_columns()
    texts = _copy_spans(lines.data, lines.starts[lines.open], lines.ends[lines.open])
    found = pc.extract_regex(texts.cast(pa.binary()), _NT_PATTERN)
    bad = pc.is_null(found).to_numpy(zero_copy_only=False)
    numbers = np.flatnonzero(lines.open)
    for i in numbers[bad].tolist():
        _reject(lines, parsed, i, "not an N-Triples line (subject predicate object .)")
    good = found.filter(pa.array(~bad))
    return [good.field(name).cast(pa.string()) for name in COLUMNS]


def header_fields(line: bytes, layout: Layout) -> Sequence[str]:
    """Split a header line into column names."""
    line = line.rstrip(b"\r\n")
    parts = split_quoted(line, layout.delimiter) if layout.quoted else line.split(bytes([layout.delimiter]))
    return [part.decode("utf-8", errors="replace").strip() for part in parts]
