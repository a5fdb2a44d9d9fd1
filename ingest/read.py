"""Read all sources as batches of labels and account for every line of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ingest.blocks import read_blocks
from ingest.errors import IngestError
from ingest.heads import plain_layout, read_head
from ingest.lines import COLUMNS, Layout, Parsed, Reject
from ingest.options import SPLITS, IngestOptions
from ingest.parquet_input import read_parquet
from ingest.parse import parse_block
from ingest.places import UNSPLIT
from ingest.sources import Source, open_bytes

RAW_SCHEMA = pa.schema([*((name, pa.string()) for name in COLUMNS), ("split", pa.uint8())])
_REJECT_SCHEMA = pa.schema(
    [("file", pa.string()), ("line", pa.int64()), ("reason", pa.string()), ("text", pa.binary())]
)
_NAMED_REJECTS = 5
T = TypeVar("T")


@dataclass
class Lines:
    """The account: read = kept + duplicates + rejected, and every line of a file is read, blank, comment or header."""

    read: int = 0
    kept: int = 0
    duplicates: int = 0
    rejected: int = 0
    blank: int = 0
    comments: int = 0
    headers: int = 0

    def plus(self, before: dict[str, int]) -> Lines:
        """Add the account of an earlier ingest."""
        return Lines(**{key: value + before.get(key, 0) for key, value in asdict(self).items()})

    def check(self) -> None:
        assert self.read == self.kept + self.duplicates + self.rejected, self


@dataclass
class Reader:
    """Reads sources one after the other; `lines` and `warnings` are complete when `batches` is exhausted."""

    sources: list[Source]
    options: IngestOptions
    rejects_path: Path
    old_rejects: Path | None = None
    """Rejects of an earlier ingest, to be kept."""
    lines: Lines = field(default_factory=Lines)
    warnings: list[str] = field(default_factory=list)
    on_lines: Callable[[int], None] = lambda count: None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the triples of all sources (RAW_SCHEMA); raise IngestError at malformed lines unless skipped."""
        blank_edges = 0
        writer = self._keep_old_rejects()
        try:
            for source in self.sources:
                split = pa.scalar(SPLITS.index(source.split) if source.split else UNSPLIT, pa.uint8())
                for parsed in self._parsed(source):
                    blank_edges += parsed.blank_edges
                    if parsed.rejects:
                        self._refuse_rejects(source, parsed.rejects)
                        writer = writer or _reject_writer(self.rejects_path)
                        writer.write_batch(_reject_batch(source, parsed.rejects))
                    self._count(parsed)
                    if parsed.triples:
                        column = pa.repeat(split, parsed.triples)
                        yield pa.record_batch([*parsed.columns, column], schema=RAW_SCHEMA)
        finally:
            if writer:
                writer.close()
        if blank_edges:
            self.warnings.append(
                f"{blank_edges:,} triples have a label that begins or ends with a blank; it was kept as part of the "
                "label (--strip cuts such blanks)"
            )

    def _keep_old_rejects(self) -> pq.ParquetWriter | None:
        if self.old_rejects is None:
            return None
        writer = _reject_writer(self.rejects_path)
        with pq.ParquetFile(self.old_rejects) as old:
            for batch in old.iter_batches():
                writer.write_batch(batch)
        return writer

    def _count(self, parsed: Parsed) -> None:
        self.lines.read += parsed.triples + len(parsed.rejects)
        self.lines.rejected += len(parsed.rejects)
        self.lines.blank += parsed.blank
        self.lines.comments += parsed.comments
        self.on_lines(self.lines.read)

    def _refuse_rejects(self, source: Source, rejects: list[Reject]) -> None:
        """Stop at malformed lines unless the user wants them skipped."""
        if self.options.on_reject == "skip":
            return
        shown = [f"{source.path}:{reject.line}: {reject.reason}" for reject in rejects[:_NAMED_REJECTS]]
        more = "" if len(rejects) <= _NAMED_REJECTS else ", and more"
        raise IngestError(
            f"malformed lines: {'; '.join(shown)}{more} ({_advice(rejects[0].reason)}mend them, or put such lines "
            "aside with --on-reject skip)"
        )

    def _parsed(self, source: Source) -> Iterator[Parsed]:
        """Parse one source, with decoding and decompression errors turned into words."""
        try:
            if source.format == "parquet":
                yield from read_parquet(source.path, self.options.columns)
            else:
                yield from self._parsed_text(source)
        except (OSError, EOFError, pa.ArrowException) as error:
            raise IngestError(f"cannot read {source.path}: {_first_line(error)}") from None

    def _parsed_text(self, source: Source) -> Iterator[Parsed]:
        layout: Layout | None = None
        with open_bytes(source.path) as stream:
            for block in read_blocks(stream, self.options.max_line_bytes):
                pieces = [block]
                if layout is None:
                    head = read_head(source, self.options, block)
                    pieces, layout = head.blocks, head.layout
                    self.lines.headers += head.headers
                    self.warnings += head.warnings
                for piece in pieces:
                    yield parse_block(piece, layout or plain_layout(source, self.options))


def _reject_writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, _REJECT_SCHEMA, compression="zstd")


def _reject_batch(source: Source, rejects: list[Reject]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([source.path] * len(rejects)),
            pa.array([reject.line for reject in rejects], pa.int64()),
            pa.array([reject.reason for reject in rejects]),
            pa.array([reject.text for reject in rejects], pa.binary()),
        ],
        schema=_REJECT_SCHEMA,
    )


def _advice(reason: str) -> str:
    """Say which option helps where all lines have another number of fields than three."""
    fields = re.match(r"(\d+) fields, expected 3", reason)
    if not fields:
        return ""
    if int(fields[1]) < 3:
        return "say what stands between the fields with --delimiter, or --format csv; "
    return "say which three to take with --columns; "


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Draw from `items` in another thread, so that reading goes on while what was read is worked on."""
    queue: Queue[tuple[T | None, BaseException | None]] = Queue(depth)
    stop = threading.Event()

    def draw() -> None:
        try:
            for item in items:
                queue.put((item, None))
                if stop.is_set():
                    return
            queue.put((None, None))
        except BaseException as error:  # handed to the consumer, which raises it
            queue.put((None, error))

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if error:
                raise error
            if item is None:
                return
            yield item
    finally:
        stop.set()
        while thread.is_alive():
            if not queue.empty():
                queue.get()
            thread.join(0.001)
