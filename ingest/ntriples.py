"""Parse lines of N-Triples; terms are kept as they are written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.lines import COLUMNS, BlockLines, Parsed, copy_spans, empty_columns, reject_line

_PATTERN = (
    rb"^[ \t]*(?P<source><[^<>\"{}|^`\\ \t]*(?:\\[uU][0-9A-Fa-f]+[^<>\"{}|^`\\ \t]*)*>|_:[^ \t<\"]+)"
    rb"[ \t]*(?P<relation><[^<> \t]*>)"
    rb"[ \t]*(?P<target><[^<> \t]*>|_:[^ \t<\"]+|\"(?:[^\"\\]|\\.)*\"(?:@[A-Za-z0-9-]+|\^\^<[^<> \t]*>)?)"
    rb"[ \t]*\.[ \t]*(?:#.*)?$"
)


def parse_ntriples(lines: BlockLines, parsed: Parsed) -> list[pa.StringArray]:
    """Match the open lines against the grammar of N-Triples; terms are kept as they are written."""
    if not lines.open.any():
        return empty_columns()
    texts = copy_spans(lines.data, lines.starts[lines.open], lines.ends[lines.open])
    found = pc.extract_regex(texts.cast(pa.binary()), _PATTERN)
    bad = pc.is_null(found).to_numpy(zero_copy_only=False)
    numbers = np.flatnonzero(lines.open)
    for i in numbers[bad].tolist():
        reject_line(lines, parsed, i, "not an N-Triples line (subject predicate object .)")
    good = found.filter(pa.array(~bad))
    return [good.field(name).cast(pa.string()) for name in COLUMNS]
