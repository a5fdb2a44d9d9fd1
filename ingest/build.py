"""Build a graph directory from files of triples: the stages of an ingest, one after the other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ingest.append import OldGraph, join_old
from ingest.database import Scratch, load_raw
from ingest.errors import IngestError
from ingest.index import SplitCounts, write_split
from ingest.manifest import make_manifest
from ingest.numbering import number_labels, number_triples
from ingest.options import SPLITS, IngestOptions, memory_limit, package_version, recorded
from ingest.place import check_place, put_in_place, sync, working_directory
from ingest.places import SplitRule
from ingest.read import Lines, Reader, prefetch
from ingest.sorting import Rows, sorted_rows
from ingest.sources import Source, bare_name, find_sources, require_utf8
from ingest.split import Moved, check_request, describe_split, move_back
from ingest.tables import write_entities, write_relations

Progress = Callable[[str, int], None]
"""Called with the name of the stage and how far it is (lines, rows or 0)."""


@dataclass
class IngestReport:
    """What an ingest made."""

    path: Path
    manifest: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def ingest_triples(
    inputs: Sequence[str | Path] = (),
    *,
    train: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    test: Sequence[str | Path] = (),
    options: IngestOptions | None = None,
    progress: Progress | None = None,
) -> IngestReport:
    """Turn files of triples into a graph directory; raise IngestError, leaving nothing, where that fails.

    Either `inputs` (files, globs, `-`, or one directory with train, valid and test files) or `train` with `valid` and
    `test`. Unsplit triples are split by hash.
    """
    options = options or IngestOptions()
    options.check()
    given = {"train": train, "valid": valid, "test": test}
    sources = find_sources(
        [str(path) for path in inputs],
        {split: [str(path) for path in paths] for split, paths in given.items()},
        options.format,
    )
    options.require_effect({source.format for source in sources})
    if all(source.split for source in sources):
        if options.seed:
            raise IngestError(f"--seed {options.seed} chooses a split; these files have theirs")
        for name in ("valid_fraction", "test_fraction"):
            if share := getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise IngestError(f"{flag} {share:g} splits an input that has none; these files have their splits")
    old = OldGraph.open(options.append_to) if options.append_to else None
    if old:
        options = old.split_like_before(options)
    out = options.out or options.append_to or default_out([str(path) for path in inputs], [str(path) for path in train])
    require_utf8(str(out))
    if out.is_symlink():
        out = out.resolve()  # the graph behind the link is what is replaced
    replace = options.force or (old is not None and out.resolve() == old.path.resolve())
    check_place(out, replace)
    run = _Run(sources, options, old, out, replace, progress or (lambda stage, count: None))
    try:
        with working_directory(out) as work, _spill_directory(options, work) as spill:
            return run.build(work / "graph", spill)
    except (OSError, duckdb.Error, pa.ArrowException, MemoryError) as error:
        raise _explain(error, options, out) from error


def _spill_directory(options: IngestOptions, work: Path) -> AbstractContextManager[Path]:
    """Spill beside the graph, or where the user says."""
    return working_directory(options.temp_dir / "sattle-ingest") if options.temp_dir else nullcontext(work)


def default_out(inputs: Sequence[str], train: Sequence[str]) -> Path:
    """Name the graph after its input: triples.tsv.gz -> triples.graph, a directory FB15k-237 -> FB15k-237.graph."""
    first = (inputs or train)[0]
    if first == "-":
        raise IngestError("standard input has no name: say where the graph goes with --out")
    path = Path(first)
    name = path.resolve().name if path.is_dir() else bare_name(first)
    if train and not inputs:
        name = Path(first).resolve().parent.name or name
    if len(inputs) > 1 or set(name) & set("*?["):
        name = "triples"
    return Path(f"{name}.graph")


# How Arrow and DuckDB say it; DuckDB also stops when its spill files would fill the disk.
_FULL_DISK_WORDS = ("No space left", "max_temp_directory_size", "failed to offload")


def _explain(error: Exception, options: IngestOptions, out: Path) -> IngestError:
    """Say in words what a disk, memory or database error means for the user."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    spill = options.temp_dir or out.parent
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or any(words in text for words in _FULL_DISK_WORDS):
        return IngestError(
            f"the disk is full ({text}); nothing was left behind. Free some space, or name a larger disk for the graph "
            f"with --out (now {out.parent}) and for spilling with --temp-dir (now {spill})"
        )
    if isinstance(error, (MemoryError, duckdb.OutOfMemoryException)):
        return IngestError(f"out of memory ({text}); give more with --memory-limit, or fewer --threads")
    return IngestError(f"ingest stopped: {text}")


@dataclass
class _Run:
    """One ingest on its way."""

    sources: list[Source]
    options: IngestOptions
    old: OldGraph | None
    out: Path
    replace: bool
    progress: Progress
    warnings: list[str] = field(default_factory=list)

    def build(self, graph: Path, spill: Path) -> IngestReport:
        """Build the graph at `graph` and rename it into place."""
        graph.mkdir()
        scratch = Scratch(self.options, spill / "spill")
        try:
            lines = self._read(scratch, graph)
            self._number(scratch)
            num_entities = scratch.value("SELECT count(*) FROM entities")
            num_relations = scratch.value("SELECT count(*) FROM relations")
            moved = self._split(scratch, num_entities, num_relations)
            counts = {split: self._write_split(scratch, graph, split, num_entities, num_relations) for split in SPLITS}
            self.progress("labels", 0)
            write_entities(scratch, graph, counts["train"])
            write_relations(scratch, graph, counts["train"])
            sizes = {split: counts[split].triples for split in SPLITS}
            if moved is not None and self.old is None:
                self.warnings += check_request(scratch, self.options, sizes, moved)
        finally:
            scratch.close()
        lines.kept = sum(sizes.values())
        lines.duplicates = lines.read - lines.rejected - lines.kept
        lines.check()
        self.progress("checksum", 0)
        manifest = make_manifest(graph, self._facts(num_entities, num_relations, counts, lines, moved))
        self.progress("place", 0)
        sync(graph)
        if self.old:
            self.old.require_unchanged()
        put_in_place(graph, self.out, self.replace)
        return IngestReport(self.out, manifest, self.warnings)

    def _read(self, scratch: Scratch, graph: Path) -> Lines:
        reader = Reader(
            self.sources,
            self.options,
            graph / "rejects.parquet",
            old_rejects=self.old.rejects if self.old else None,
            on_lines=lambda count: self.progress("read", count),
        )
        load_raw(scratch, prefetch(reader.batches()))
        self.warnings += reader.warnings
        if reader.lines.read == reader.lines.rejected:
            lines = reader.lines
            passed = lines.blank + lines.comments + lines.headers
            what = "nothing but empty, comment and header lines" if passed else "it is empty"
            if lines.read:
                what = f"all {lines.read:,} lines were rejected"
            raise IngestError(f"there are no triples in {self.sources[0].path}: {what}")
        return reader.lines.plus(self.old.manifest["lines"]) if self.old else reader.lines

    def _number(self, scratch: Scratch) -> None:
        """Turn labels into ids, and leave only triples that the old graph does not have."""
        self.progress("label", 0)
        number_labels(scratch, self.old.label_files() if self.old else {})
        self.progress("number", 0)
        rule = SplitRule(self.options, by_hash=not self._given())
        number_triples(scratch, rule, memory_limit(self.options) // 5)
        if self.old:
            self.old.load(scratch)

    def _given(self) -> bool:
        return all(source.split for source in self.sources)

    def _split(self, scratch: Scratch, num_entities: int, num_relations: int) -> Moved | None:
        """Repair a hash split; a given split is kept as it is, and so are the triples of an old graph."""
        moved = None
        if not self._given():
            self.progress("split", 0)
            moved = move_back(scratch, num_entities, num_relations, "old" if self.old else None)
        if self.old:
            join_old(scratch)
        return moved

    def _write_split(
        self, scratch: Scratch, graph: Path, split: str, num_entities: int, num_relations: int
    ) -> SplitCounts:
        self.progress(f"sort {split}", 0)
        rows = sorted_rows(scratch, SPLITS.index(split), num_entities, num_relations, self._sort_rows())
        return write_split(self._watched(rows, split), graph, split, num_entities, num_relations)

    def _watched(self, rows: Iterator[Rows], split: str) -> Iterator[Rows]:
        """Pass rows on and report their number; two of them are a triple."""
        done = 0
        for part in rows:
            yield part
            done += len(part)
            self.progress(f"sort {split}", done // 2)

    def _sort_rows(self) -> int:
        """Give the number of rows to sort at once: 8 bytes each, a sixteenth of the memory."""
        return memory_limit(self.options) // 128

    def _facts(
        self,
        num_entities: int,
        num_relations: int,
        counts: dict[str, SplitCounts],
        lines: Lines,
        moved: Moved | None,
    ) -> dict[str, Any]:
        """Gather what the manifest says beside checksums."""
        inputs = [asdict(source) for source in self.sources]
        name = self.options.name or self.out.resolve().name.removesuffix(".graph") or "graph"
        split = describe_split(self.options, moved)
        if self.old:
            inputs = [*self.old.manifest["made_by"]["inputs"], *inputs]
            name = self.options.name or self.old.manifest["name"]
            split = self.old.split_with(moved) or split
        return {
            "name": name,
            "num_entities": num_entities,
            "num_relations": num_relations,
            "splits": {split: {"triples": counts[split].triples, "queries": counts[split].queries} for split in SPLITS},
            "split": split,
            "lines": asdict(lines),
            "made_by": {"version": package_version(), "inputs": inputs, "options": recorded(self.options)},
        }
