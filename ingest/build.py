"""Build a graph directory from files of triples: the stages of an ingest, one after the other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.database import Scratch, load_raw, number_labels, number_triples
from ingest.errors import IngestError
from ingest.index import SplitCounts, write_split
from ingest.manifest import content_checksum, describe_files, write_manifest
from ingest.options import SPLITS, IngestOptions, memory_limit
from ingest.place import check_place, put_in_place, working_directory
from ingest.places import SplitSql
from ingest.read import Lines, Reader, prefetch
from ingest.sorting import sorted_rows
from ingest.sources import Source, bare_name, find_sources
from ingest.split import Moved, check_request, move_back

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
    out = options.out or default_out([str(path) for path in inputs], [str(path) for path in train])
    check_place(out, options.force)
    run = _Run(sources, options, out, progress or (lambda stage, count: None))
    try:
        with working_directory(out) as work:
            return run.build(work)
    except (OSError, duckdb.Error, MemoryError) as error:
        raise _explain(error, options, out) from error


def default_out(inputs: Sequence[str], train: Sequence[str]) -> Path:
    """Name the graph after its input: triples.tsv.gz -> triples.graph, a directory FB15k-237 -> FB15k-237.graph."""
    first = (inputs or train)[0]
    if first == "-":
        raise IngestError("standard input has no name: say where the graph goes with --out")
    path = Path(first)
    name = path.resolve().name if path.is_dir() else bare_name(first)
    if train and not inputs:
        name = Path(first).resolve().parent.name or name
    if len(inputs) > 1 or "*" in name or "?" in name:
        name = "triples"
    return Path(f"{name}.graph")


def _explain(error: Exception, options: IngestOptions, out: Path) -> IngestError:
    """Say in words what a disk, memory or database error means for the user."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    spill = options.temp_dir or out.parent
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in text or "max_temp_directory_size" in text:
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
    out: Path
    progress: Progress
    warnings: list[str] = field(default_factory=list)

    def build(self, work: Path) -> IngestReport:
        graph, spill = work / "graph", work / "spill"
        graph.mkdir()
        spill.mkdir()
        scratch = Scratch(self.options, spill)
        try:
            lines = self._read(scratch, graph)
            self.progress("label", 0)
            number_labels(scratch, {})
            num_entities = scratch.value("SELECT count(*) FROM entities")
            num_relations = scratch.value("SELECT count(*) FROM relations")
            self.progress("number", 0)
            number_triples(scratch, SplitSql(self.options, by_hash=not self._given()))
            moved = self._split(scratch, num_entities, num_relations)
            counts = {split: self._write_split(scratch, graph, split, num_entities, num_relations) for split in SPLITS}
            self.progress("labels", 0)
            _write_entities(scratch, graph, counts["train"])
            _write_relations(scratch, graph, counts["train"], num_relations)
        finally:
            scratch.close()
        sizes = {split: counts[split].triples for split in SPLITS}
        if moved is not None:
            self.warnings += check_request(self.options, sizes, moved)
        lines.kept = sum(sizes.values())
        lines.duplicates = lines.read - lines.rejected - lines.kept
        lines.check()
        manifest = self._manifest(graph, num_entities, num_relations, counts, lines, moved)
        self.progress("place", 0)
        put_in_place(graph, self.out, self.options.force)
        return IngestReport(self.out, manifest, self.warnings)

    def _read(self, scratch: Scratch, graph: Path) -> Lines:
        reader = Reader(
            self.sources, self.options, graph / "rejects.parquet", on_lines=lambda count: self.progress("read", count)
        )
        load_raw(scratch, prefetch(reader.batches()))
        self.warnings += reader.warnings
        if reader.lines.read == reader.lines.rejected:
            what = f"all {reader.lines.read:,} lines were rejected" if reader.lines.read else "the input is empty"
            raise IngestError(f"there are no triples in {self.sources[0].path}: {what}")
        return reader.lines

    def _given(self) -> bool:
        return all(source.split for source in self.sources)

    def _split(self, scratch: Scratch, num_entities: int, num_relations: int) -> Moved | None:
        """Repair a hash split; a given split is kept as it is."""
        if self._given():
            return None
        self.progress("split", 0)
        return move_back(scratch, num_entities, num_relations)

    def _write_split(
        self, scratch: Scratch, graph: Path, split: str, num_entities: int, num_relations: int
    ) -> SplitCounts:
        self.progress(f"sort {split}", 0)
        rows = sorted_rows(scratch, SPLITS.index(split), num_entities, num_relations, self._sort_rows())
        return write_split(rows, graph, split, num_entities, num_relations)

    def _sort_rows(self) -> int:
        """Give the number of rows to sort at once: 8 bytes each, a sixteenth of the memory."""
        return memory_limit(self.options) // 128

    def _manifest(
        self,
        graph: Path,
        num_entities: int,
        num_relations: int,
        counts: dict[str, SplitCounts],
        lines: Lines,
        moved: Moved | None,
    ) -> dict[str, Any]:
        self.progress("checksum", 0)
        valid, test = self.options.fractions()
        split = (
            {"how": "given"}
            if moved is None
            else {
                "how": "hash",
                "seed": self.options.seed,
                "valid_fraction": valid,
                "test_fraction": test,
                "moved_to_train": asdict(moved),
            }
        )
        manifest = {
            "name": self.options.name or self.out.resolve().name.removesuffix(".graph") or "graph",
            "num_entities": num_entities,
            "num_relations": num_relations,
            "splits": {name: {"triples": counts[name].triples, "queries": counts[name].queries} for name in SPLITS},
            "split": split,
            "lines": asdict(lines),
            "checksum": content_checksum(graph),
            "files": describe_files(graph),
            "made_by": {
                "version": _version(),
                "inputs": [asdict(source) for source in self.sources],
                "options": _recorded(self.options),
            },
        }
        write_manifest(graph, manifest)
        return manifest


def _recorded(options: IngestOptions) -> dict[str, Any]:
    """Give the options that shape the content, and not those of this machine."""
    left_out = {"out", "force", "memory_limit", "threads", "temp_dir", "append_to", "name"}
    return {key: value for key, value in asdict(options).items() if key not in left_out}


def _version() -> str:
    try:
        return version("sattle-dist")
    except PackageNotFoundError:
        return "unknown"


def _write_entities(scratch: Scratch, graph: Path, train: SplitCounts) -> None:
    schema = pa.schema(
        [
            ("entity_id", pa.int32()),
            ("label", pa.string()),
            ("num_train_as_source", pa.int32()),
            ("num_train_as_target", pa.int32()),
        ]
    )
    with pq.ParquetWriter(graph / "entities.parquet", schema, compression="zstd") as writer:
        for batch in scratch.stream("SELECT id, label FROM entities ORDER BY id"):
            ids = batch.column(0).to_numpy()
            columns = [*batch.columns, train.as_source[ids], train.as_target[ids]]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _write_relations(scratch: Scratch, graph: Path, train: SplitCounts, num_relations: int) -> None:
    """Write the relations with their number of training triples and their class (more than 1.5 a query is N)."""
    schema = pa.schema(
        [("relation_id", pa.int32()), ("label", pa.string()), ("num_train", pa.int64()), ("cardinality", pa.string())]
    )
    forward, inverse = train.queries_by_relation[:num_relations], train.queries_by_relation[num_relations:]
    many_targets = train.by_relation > 1.5 * forward
    many_sources = train.by_relation > 1.5 * inverse
    names = np.array(["1-1", "1-N", "N-1", "N-N"])
    classes = names[many_targets + 2 * many_sources]
    with pq.ParquetWriter(graph / "relations.parquet", schema, compression="zstd") as writer:
        for batch in scratch.stream("SELECT id, label FROM relations ORDER BY id"):
            ids = batch.column(0).to_numpy()
            columns = [*batch.columns, train.by_relation[ids], pa.array(classes[ids].tolist(), pa.string())]
            writer.write_batch(pa.record_batch(columns, schema=schema))
