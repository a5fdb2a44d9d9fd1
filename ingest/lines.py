"""The lines of a block: where they lie, which of them are no triples at all, and what is said of those."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.blocks import Block

COLUMNS = ("source", "relation", "target")
NEWLINE, RETURN, SPACE, TAB = 10, 13, 32, 9

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
class BlockLines:
    """The lines of a block: bytes [starts[i], ends[i]) without their line end; `open` marks those not yet judged."""

    data: bytes
    bytes_: npt.NDArray[np.uint8]
    starts: Positions
    ends: Positions
    open: Mask
    first_line: int

    def text(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]]


def empty_columns() -> list[pa.StringArray]:
    return [pa.array([], pa.string())] * 3


def find_lines(block: Block) -> BlockLines:
    bytes_ = np.frombuffer(block.data, np.uint8)
    newlines = np.flatnonzero(bytes_ == NEWLINE)
    starts = np.empty_like(newlines)
    starts[:1] = 0
    starts[1:] = newlines[:-1] + 1
    ends = newlines.copy()
    ends -= (ends > starts) & (bytes_[np.maximum(ends - 1, 0)] == RETURN)
    return BlockLines(block.data, bytes_, starts, ends, np.ones(len(starts), bool), block.first_line)


def reject_line(lines: BlockLines, parsed: Parsed, i: int, reason: str) -> None:
    lines.open[i] = False
    parsed.rejects.append(Reject(lines.first_line + i, reason, lines.text(i)))


def kind_of(text: bytes, layout: Layout) -> str | None:
    """Say whether a line is "blank", a "comment" or neither; a tab between fields makes a line other than blank."""
    if not text.strip(b" \r" if layout.delimiter == TAB and not layout.ntriples else b" \t\r"):
        return "blank"
    comment = b"#" if layout.ntriples else layout.comment
    if comment and (text.lstrip(b" \t") if layout.ntriples else text).startswith(comment):
        return "comment"
    return None


def judge_whole_lines(lines: BlockLines, layout: Layout, parsed: Parsed) -> None:
    """Sort out the lines that need no look at their fields: empty, comment, too long, not UTF-8."""
    lengths = lines.ends - lines.starts
    if lengths.size == 0:
        return
    # Only a line of the first byte's kind can be blank or a comment; few lines are looked at one by one.
    first = lines.bytes_[lines.starts]
    suspects = (lengths == 0) | (first == SPACE) | (first == TAB) | (first == RETURN)
    comment = b"#" if layout.ntriples else layout.comment
    if comment:
        suspects |= first == comment[0]
    for i in np.flatnonzero(suspects).tolist():
        kind = kind_of(lines.text(i), layout)
        parsed.blank += kind == "blank"
        parsed.comments += kind == "comment"
        lines.open[i] = kind is None
    for i in np.flatnonzero(lines.open & (lengths > layout.max_line_bytes)).tolist():
        reject_line(lines, parsed, i, f"longer than {layout.max_line_bytes} bytes")
    if not lines.data.isascii() and not _is_utf8(lines.data):
        for i in np.flatnonzero(lines.open).tolist():
            if not _is_utf8(lines.text(i)):
                reject_line(lines, parsed, i, "invalid UTF-8")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def copy_spans(data: bytes, low: Positions, high: Positions) -> pa.StringArray:
    """Make the strings data[low:high], at least one, of increasing spans.

    The bounds are read as the offsets of 2n - 1 strings that cover the block, of which every second is taken.
    """
    offsets = np.empty((len(low), 2), np.int32)
    offsets[:, 0], offsets[:, 1] = low, high
    whole = pa.Array.from_buffers(pa.string(), 2 * len(low) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(0, 2 * len(low), 2, dtype=np.int32)))
