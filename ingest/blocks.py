"""Cut a stream of bytes into blocks of whole lines, with bounded memory whatever the lines are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK_BYTES = 8 << 20
_KEPT_OF_OVERLONG = 1000


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Block:
    """Whole lines of a file; every line ends with a newline, also the last."""

    data: bytes
    first_line: int
    """Number of the first line, from 1."""
    overlong: bool = False
    """The block is the beginning of one line that is too long; the rest of it was passed over."""


def read_blocks(stream: Readable, max_line_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the stream as blocks; a byte order mark at its start is dropped."""
    rest, line, first = b"", 1, True
    while True:
        piece = stream.read(block_bytes)
        ended = not piece
        if first:
            piece = piece.removeprefix(b"\xef\xbb\xbf")
            first = False
        data = rest + piece
        if ended and data:
            data += b"\n"
        cut = data.rfind(b"\n") + 1
        if cut:
            yield Block(data[:cut], line)
            line += int(np.count_nonzero(np.frombuffer(data, np.uint8, cut) == 10))
        rest = data[cut:]
        if ended:
            return
        if len(rest) > max_line_bytes:
            yield Block(rest[:_KEPT_OF_OVERLONG], line, overlong=True)
            rest = _pass_over_line(stream, block_bytes)
            line += 1


def _pass_over_line(stream: Readable, block_bytes: int) -> bytes:
    """Read up to the next newline and give what follows it."""
    while piece := stream.read(block_bytes):
        place = piece.find(b"\n")
        if place >= 0:
            return piece[place + 1 :]
    return b""
