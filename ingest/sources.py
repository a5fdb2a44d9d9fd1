"""Find the inputs: files, globs, directories and standard input; their split, format and compression."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import cast

import pyarrow as pa

from ingest.errors import IngestError
from ingest.options import SPLITS

_FORMAT_OF_SUFFIX = {
    ".tsv": "tsv",
    ".txt": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
    ".nt": "nt",
    ".ntriples": "nt",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSION_SUFFIXES = (".gz", ".zst", ".zstd", ".bz2")
_SPLIT_WORD = re.compile(
    r"(?:^|[-_.])(?:(?P<train>train(?:ing)?)|(?P<valid>val(?:id(?:ation)?)?|dev)|(?P<test>test(?:ing)?))(?=$|[-_.0-9])"
)
_PART_NUMBER = re.compile(r"[-_.]?(?:part[-_.]?)?\d+(?:[-_.]?of[-_.]?\d+)?")
_MAGIC = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_BZ2_MAGIC = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file."""

    path: str
    """As the user wrote it; `-` is standard input."""
    split: str | None
    """The split it was given for, or None where the triples are to be split by hash."""
    format: str


def find_sources(inputs: Sequence[str], given: dict[str, Sequence[str]], format_: str) -> list[Source]:
    """Turn what the user named into files, in a fixed order; raise IngestError where that is impossible."""
    named = {split: paths for split, paths in given.items() if paths}
    if inputs and named:
        raise IngestError(
            f"give either INPUT or --train/--valid/--test, not both (INPUT is {inputs[0]}, "
            f"--{next(iter(named))} is {next(iter(named.values()))[0]})"
        )
    if named and "train" not in named:
        raise IngestError(f"--{next(iter(named))} needs --train: there is nothing to train on without it")
    if not inputs and not named:
        raise IngestError("nothing to ingest: name a file of triples, a directory, or - for standard input")
    if named:
        sources = [
            _source(path, split, format_) for split in SPLITS if split in named for path in _expand(named[split])
        ]
    elif len(inputs) == 1 and Path(inputs[0]).is_dir():
        sources = _directory(Path(inputs[0]), format_)
    else:
        sources = [_source(path, None, format_) for path in _expand(inputs)]
    if sum(source.path == "-" for source in sources) > 1:
        raise IngestError("- (standard input) can be named once only")
    for source in sources:
        require_utf8(source.path)
    return sources


def require_utf8(path: str) -> None:
    """Raise IngestError where a name cannot be written into a manifest."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise IngestError(
            f"the name {shown} is not UTF-8; rename the file, or give it another name by a link"
        ) from None


def _expand(paths: Sequence[str]) -> list[str]:
    """Replace globs by the files they match, sorted, and check that everything named is there."""
    found: list[str] = []
    for path in paths:
        if path == "-" or Path(path).exists():
            matches = [path]
        elif glob.has_magic(path):
            matches = sorted(match for match in glob.glob(path, recursive=True) if Path(match).is_file())
            if not matches:
                raise IngestError(f"no file matches {path!r}")
        else:
            raise IngestError(f"no such file: {path}")
        for match in matches:
            if match != "-" and Path(match).is_dir():
                raise IngestError(
                    f"{match} is a directory; a directory can only be the one INPUT, name the files in it instead"
                )
            if match in found:
                raise IngestError(f"{match} is named twice")
            found.append(match)
    return found


def _source(path: str, split: str | None, format_: str) -> Source:
    return Source(path=path, split=split, format=format_of(path) if format_ == "auto" else format_)


def format_of(path: str) -> str:
    """Read the format from a file's name; tsv where it says nothing."""
    return _FORMAT_OF_SUFFIX.get(_plain(path).suffix, "tsv")


def _plain(path: str) -> Path:
    """Give the lower-case name without the suffix of a compression."""
    name = Path(path.lower())
    return name.with_suffix("") if name.suffix in _COMPRESSION_SUFFIXES else name


def bare_name(path: str) -> str:
    """Give the file's name without the suffixes of its compression and format, for naming a graph after it."""
    name = Path(path).name
    for suffixes in (_COMPRESSION_SUFFIXES, tuple(_FORMAT_OF_SUFFIX)):
        stem, dot, suffix = name.rpartition(".")
        if stem and dot + suffix.lower() in suffixes:
            name = stem
    return name


def split_of(path: str) -> str | None:
    """Read the split from a file's name: train.txt, fb15k-valid.tsv.gz, test-00001.parquet."""
    plain = _plain(path)
    words = {match.lastgroup for match in _SPLIT_WORD.finditer(plain.stem)}
    return words.pop() if len(words) == 1 else None


def _directory(folder: Path, format_: str) -> list[Source]:
    """Take the train, valid and test files of a directory."""
    files = sorted(
        entry
        for entry in folder.iterdir()
        if entry.is_file() and not entry.name.startswith((".", "_")) and _plain(entry.name).suffix in _FORMAT_OF_SUFFIX
    )
    by_split: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in files:
        split = split_of(file.name)
        if split:
            by_split[split].append(file)
    if not by_split["train"]:
        seen = ", ".join(file.name for file in files[:5]) or "no file of triples"
        raise IngestError(
            f"{folder} holds no file named like train.txt, train.tsv, train.csv, train.nt or train.parquet "
            f"(found: {seen}); name the files themselves, or give --train, --valid and --test"
        )
    for split, members in by_split.items():
        stems: dict[str, Path] = {}
        for file in members:
            stem = bare_name(file.name).lower()
            other = stems.setdefault(stem, file)
            if other is file and _PART_NUMBER.sub("", stem) != _PART_NUMBER.sub("", next(iter(stems))):
                other = members[0]  # not a part of the same, but such as test.txt and test_negatives.txt
            if other is not file:
                raise IngestError(f"{folder} holds both {other.name} and {file.name}; say which one with --{split}")
    return [_source(str(file), split, format_) for split in SPLITS for file in by_split[split]]


def open_bytes(path: str) -> pa.NativeFile | BufferedReader:
    """Open a file or standard input for reading, decompressed where its first bytes say it is compressed."""
    try:
        raw = cast(BufferedReader, sys.stdin.buffer if path == "-" else open(path, "rb"))  # noqa: SIM115
        head = raw.peek(16)[:16]
    except OSError as error:
        raise IngestError(f"cannot read {path}: {error.strerror}") from None
    codec = next((name for magic, name in _MAGIC if head.startswith(magic)), None)
    if _BZ2_MAGIC.match(head):
        codec = "bz2"
    if codec is None:
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise IngestError(f"{path} is UTF-16, not UTF-8; convert it first: iconv -f UTF-16 -t UTF-8")
        return raw
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
