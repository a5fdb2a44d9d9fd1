"""The options of an ingest: what they are, their defaults and their bounds."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ingest.errors import IngestError

FORMATS = ("auto", "tsv", "csv", "nt", "parquet")
SPLITS = ("train", "valid", "test")
DEFAULT_FRACTION = 0.05
MIN_MEMORY = 128 << 20
_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


@dataclass(frozen=True, kw_only=True)
class IngestOptions:
    """How triples become a graph. Everything has a default; `check` is called before anything is read."""

    out: Path | None = None
    """Directory of the graph; by default the input's name with `.graph`, in the current directory."""
    name: str | None = None
    """Name in the manifest; by default the name of `out` without `.graph`."""
    format: str = "auto"
    """tsv, csv, nt (N-Triples), parquet, or auto: from the file's name, tsv where it says nothing."""
    delimiter: str | None = None
    """The byte between fields; by default a tab (tsv) or a comma (csv)."""
    columns: tuple[str, str, str] | None = None
    """Source, relation and target column: positions from 1, or names (of the header, or of Parquet columns)."""
    header: bool = False
    """The first line of every file is a header, not a triple."""
    comment: str | None = None
    """Lines that start with this are comments."""
    strip: bool = False
    """Cut blanks at both ends of every field and at the end of every line. Off: labels keep every byte."""
    on_reject: str = "error"
    """error: a malformed line stops the ingest. skip: it goes to rejects.parquet."""
    max_line_bytes: int = 1 << 20
    """Longer lines are malformed."""
    valid_fraction: float | None = None
    """Share of the triples of an unsplit input that goes to valid."""
    test_fraction: float | None = None
    """Share of the triples of an unsplit input that goes to test."""
    seed: int = 0
    """Chooses among the possible hash splits."""
    append_to: Path | None = None
    """Graph to extend: its ids stay, new labels follow."""
    force: bool = False
    """Replace an existing graph."""
    memory_limit: int | None = None
    """Bytes; by default half of the machine's memory."""
    threads: int | None = None
    """By default one per processor this process may use."""
    temp_dir: Path | None = None
    """Where to spill; by default beside the graph."""

    def check(self) -> None:
        """Raise IngestError for the first option that is out of bounds."""
        if self.format not in FORMATS:
            raise IngestError(f"--format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.on_reject not in ("error", "skip"):
            raise IngestError(f"--on-reject must be error or skip, got {self.on_reject!r}")
        if self.delimiter is not None and (
            len(self.delimiter.encode()) != 1 or self.delimiter in '\n\r"' or not self.delimiter.isascii()
        ):
            raise IngestError(
                f"--delimiter must be one ASCII character other than a quote or a line end, got {self.delimiter!r}"
            )
        if self.comment is not None and (not self.comment or "\n" in self.comment or "\r" in self.comment):
            raise IngestError(f"--comment must be a non-empty text without line ends, got {self.comment!r}")
        if self.columns is not None and (len(self.columns) != 3 or len(set(self.columns)) != 3 or "" in self.columns):
            raise IngestError(f"--columns must name three different columns, got {','.join(self.columns)!r}")
        if not 1 <= self.max_line_bytes <= 1 << 28:
            raise IngestError(f"--max-line-bytes must be from 1 to {1 << 28}, got {self.max_line_bytes}")
        if not 0 <= self.seed < 2**63:
            raise IngestError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise IngestError(f"--threads must be from 1 to 1024, got {self.threads}")
        if self.memory_limit is not None and self.memory_limit < MIN_MEMORY:
            raise IngestError(f"--memory-limit must be at least {MIN_MEMORY >> 20}MiB, got {self.memory_limit} bytes")
        check_fractions(self.valid_fraction, self.test_fraction, together=self.append_to is None)

    def require_effect(self, formats: set[str]) -> None:
        """Raise IngestError for the first option that no input of these formats has a use for."""
        fields = {"tsv", "csv"}
        used_by = {
            "header": fields,
            "delimiter": fields,
            "comment": fields,
            "strip": fields,
            "columns": fields | {"parquet"},
            "max_line_bytes": fields | {"nt"},
        }
        for name, users in used_by.items():
            if getattr(self, name) != getattr(IngestOptions, name) and not formats & users:
                flag = f"--{name.replace('_', '-')}"
                raise IngestError(
                    f"{flag} would have no effect on {' and '.join(sorted(formats))} input; leave it away"
                )

    def fractions(self) -> tuple[float, float]:
        """Give the shares of valid and test, defaults filled in."""
        valid, test = self.valid_fraction, self.test_fraction
        return DEFAULT_FRACTION if valid is None else valid, DEFAULT_FRACTION if test is None else test


def check_fractions(valid: float | None, test: float | None, *, together: bool = True) -> None:
    """Raise IngestError unless both shares can be had, and at once, with something left to train on."""
    for flag, value in (("--valid-fraction", valid), ("--test-fraction", test)):
        if value is not None and not 0 <= value < 1:
            nearest = 0 if not value > 0 else 0.99
            raise IngestError(f"{flag} must be at least 0 and below 1, got {value}; nearest possible: {nearest}")
    if not together:
        return
    used_valid = DEFAULT_FRACTION if valid is None else valid
    used_test = DEFAULT_FRACTION if test is None else test
    total = used_valid + used_test
    if total >= 1:
        scale = 0.99 / total
        raise IngestError(
            f"--valid-fraction {used_valid:g} and --test-fraction {used_test:g} leave nothing to train on (their sum "
            f"must be below 1); nearest possible: --valid-fraction {_floor(used_valid * scale)} "
            f"--test-fraction {_floor(used_test * scale)}"
        )


def _floor(value: float) -> float:
    return int(value * 1000) / 1000


def parse_size(text: str) -> int:
    """Read a size such as 4GB, 512MiB or 1e9 in bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] == "i":
        raise IngestError(f"{text!r} is not a size; write it like 4GB or 512MiB")
    try:
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, OverflowError):
        raise IngestError(f"{text!r} is not a size; write it like 4GB or 512MiB") from None


def machine_memory() -> int:
    """Give the memory of this machine in bytes, or of the container when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        return total


def available_threads() -> int:
    """Give the number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit(options: IngestOptions) -> int:
    """Give the memory an ingest may use, in bytes."""
    return options.memory_limit or machine_memory() // 2


def recorded(options: IngestOptions) -> dict[str, Any]:
    """Give the options that shape the content, and not those of this machine."""
    left_out = {"out", "force", "memory_limit", "threads", "temp_dir", "append_to", "name"}
    return {key: value for key, value in asdict(options).items() if key not in left_out}


def package_version() -> str:
    """Give the version of this package, also where it runs from a checkout."""
    try:
        return version("sattle-dist")
    except PackageNotFoundError:
        return "unknown"
