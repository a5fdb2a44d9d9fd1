"""Blocks of lines become columns of labels: compared with a parser that goes line by line and byte by byte."""

import io
import random

import pytest

from ingest.blocks import read_blocks
from ingest.errors import IngestError
from ingest.lines import Layout
from ingest.parse import parse_block
from ingest.quoted import split_quoted

TSV = Layout(delimiter=9, quoted=False)
CSV = Layout(delimiter=ord(","), quoted=True)
NT = Layout(delimiter=9, quoted=False, ntriples=True)


def parse(data, layout=TSV, block_bytes=1 << 20):
    """Give the triples, the rejects as {line: reason}, and the number of blank and comment lines."""
    triples, rejects, blank, comments = [], {}, 0, 0
    for block in read_blocks(io.BytesIO(data), layout.max_line_bytes, block_bytes):
        parsed = parse_block(block, layout)
        triples += zip(*(column.to_pylist() for column in parsed.columns), strict=True)
        rejects |= {reject.line: reject.reason for reject in parsed.rejects}
        blank += parsed.blank
        comments += parsed.comments
    return triples, rejects, blank, comments


def reference(data, comment=None):
    """Parse TSV one line at a time."""
    triples, rejects, blank, comments = [], {}, 0, 0
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        fields = line.split(b"\t")
        if line.strip(b" \r") == b"":
            blank += 1
        elif comment and line.startswith(comment):
            comments += 1
        else:
            try:
                labels = [field.decode() for field in fields]
            except UnicodeDecodeError:
                rejects[number] = "invalid UTF-8"
                continue
            if len(labels) != 3:
                rejects[number] = f"{len(labels)} fields, expected 3"
            elif "" in labels:
                rejects[number] = "empty " + ("source", "relation", "target")[labels.index("")]
            else:
                triples.append(tuple(labels))
    return triples, rejects, blank, comments


@pytest.mark.parametrize(
    ("data", "triples"),
    [
        (b"a\tr\tb\n", [("a", "r", "b")]),
        (b"a\tr\tb", [("a", "r", "b")]),  # no newline at the end
        (b"\xef\xbb\xbfa\tr\tb\n", [("a", "r", "b")]),  # byte order mark
        (b"a\tr\tb\r\nc\tr\td\r\n", [("a", "r", "b"), ("c", "r", "d")]),
        (b"New York\tis in\tthe  US\n", [("New York", "is in", "the  US")]),
        (b" a\tr\tb \n", [(" a", "r", "b ")]),  # blanks are bytes of the label
        (b'"a"\t\'r\'\t"b\n', [('"a"', "'r'", '"b')]),  # quotes are bytes of the label
        (b"a\\t\tr\\\tb,c\n", [("a\\t", "r\\", "b,c")]),
        (b"NULL\tnan\t\\N\n", [("NULL", "nan", "\\N")]),
        (b"a\x00\tr\tb\rc\n", [("a\x00", "r", "b\rc")]),  # only \r\n ends a line
        ("é\t日本\t🙂\n".encode(), [("é", "日本", "🙂")]),
        ("\u2028\t\u00a0\t\ufeff\n".encode(), [("\u2028", "\u00a0", "\ufeff")]),
        (b"\n\na\tr\tb\n\n", [("a", "r", "b")]),
    ],
)
def test_labels_are_kept_byte_for_byte(data, triples):
    found, rejects, _, _ = parse(data)
    assert found == triples
    assert rejects == {}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"a\tr", "2 fields, expected 3"),
        (b"a", "1 fields, expected 3"),
        (b"a\tr\tb\t", "4 fields, expected 3"),
        (b"\tr\tb", "empty source"),
        (b"a\t\tb", "empty relation"),
        (b"a\tr\t", "empty target"),
        (b"a\tr\t\r", "empty target"),
        (b"a\tr\t\xff", "invalid UTF-8"),
        (b"a\tr\t\xed\xa0\x80", "invalid UTF-8"),  # a surrogate
        (b"a\tr\t\xc0\xaf", "invalid UTF-8"),  # a slash in two bytes
        (b"a\tr\t" + b"x" * 200, "longer than 100 bytes"),
        (b"a\tr\t" + b"x" * 5000, "longer than 100 bytes"),  # longer than a block
    ],
)
@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_malformed_lines_are_named_with_number_and_reason(line, reason, block_bytes):
    layout = Layout(delimiter=9, quoted=False, max_line_bytes=100)
    data = b"a\tr\tb\n" * 20 + line + b"\n" + b"c\tr\td\n" * 20
    triples, rejects, blank, _ = parse(data, layout, block_bytes)
    assert rejects == {21: reason}
    assert triples == [("a", "r", "b")] * 20 + [("c", "r", "d")] * 20
    assert blank == 0


def test_random_bytes_are_parsed_like_the_reference_whatever_the_block_size():
    rng = random.Random(5)
    pieces = [b"a", b"b", b"\t", b"\t", b"\n", b"\n", b"\r\n", b" ", b'"', b"#", b"\xff", b"\xc3\xa9", b"\x00", b"\r"]
    layout = Layout(delimiter=9, quoted=False, comment=b"#")
    for _ in range(2000):
        data = b"".join(rng.choices(pieces, k=rng.randrange(60)))
        if rng.random() < 0.5:
            data = b"a\tr\tb\n" + data
        assert parse(data, layout, rng.choice([3, 7, 1000])) == reference(data, b"#"), data


def test_comments_and_empty_lines_are_counted():
    layout = Layout(delimiter=9, quoted=False, comment=b"//")
    data = b"// a\tr\tb\n\n   \na\tr\tb\n/x\tr\tb\n"
    assert parse(data, layout) == ([("a", "r", "b"), ("/x", "r", "b")], {}, 2, 1)
    assert len(parse(b"#a\tr\tb\n")[0]) == 1, "without --comment nothing is a comment"


def test_strip_cuts_blanks_around_fields_and_line_ends():
    layout = Layout(delimiter=9, quoted=False, strip=True)
    data = b" a \t r\t b c \t \r\na\tr\tb\t\t\n\t r\tb\n"
    triples, rejects, _, _ = parse(data, layout)
    assert triples == [("a", "r", "b c"), ("a", "r", "b")]
    assert rejects == {3: "empty source"}


def test_columns_are_chosen_and_reordered():
    layout = Layout(delimiter=9, quoted=False, positions=(3, 0, 1), num_fields=4)
    triples, rejects, _, _ = parse(b"r\tb\tunused\ta\nr\t\t\ta\nr\tb\ta\n", layout)
    assert triples == [("a", "r", "b")]
    assert rejects == {2: "empty target", 3: "3 fields, expected 4"}


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (b"a,b,c", [b"a", b"b", b"c"]),
        (b'"a,b",c', [b"a,b", b"c"]),
        (b'"say ""hi""",c', [b'say "hi"', b"c"]),
        (b'a"b,c', [b'a"b', b"c"]),
        (b'"",""', [b"", b""]),
        (b"a,", [b"a", b""]),
        (b"", [b""]),
    ],
)
def test_split_quoted(line, fields):
    assert split_quoted(line, ord(",")) == fields


@pytest.mark.parametrize(("line", "message"), [(b'"a,b', "not closed"), (b'"a"b,c', "after a closing quote")])
def test_split_quoted_refuses(line, message):
    with pytest.raises(IngestError, match=message):
        split_quoted(line, ord(","))


def test_csv_lines_with_and_without_quotes():
    data = b'a,r,b\n"a, Inc.",r,b\n"x,r,b\n"",r,b\n"a",r\n'
    triples, rejects, _, _ = parse(data, CSV)
    assert sorted(triples) == [("a", "r", "b"), ("a, Inc.", "r", "b")]
    assert rejects == {
        3: "quoted field is not closed on its line",
        4: "empty source",
        5: "2 fields, expected 3",
    }


def test_ntriples_terms_are_kept_as_written():
    data = b"""# a comment
<http://x/a> <http://x/p> <http://x/b> .
_:n1 <p> "say \\"hi\\" . there"@en-GB .  # trailing comment
<a><p>"1"^^<http://www.w3.org/2001/XMLSchema#int>.
<a> <p> "caf\xc3\xa9" .

<a> <p> <b>
<a> "p" <b> .
<a> <p> <b> <graph> .
"""
    triples, rejects, blank, comments = parse(data, NT)
    assert triples == [
        ("<http://x/a>", "<http://x/p>", "<http://x/b>"),
        ("_:n1", "<p>", '"say \\"hi\\" . there"@en-GB'),
        ("<a>", "<p>", '"1"^^<http://www.w3.org/2001/XMLSchema#int>'),
        ("<a>", "<p>", '"café"'),
    ]
    assert sorted(rejects) == [7, 8, 9]
    assert (blank, comments) == (1, 1)
