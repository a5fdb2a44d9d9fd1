"""Grow a graph: its ids and splits stay as they are, new labels and triples follow."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ingest.database import Scratch, parquet
from ingest.errors import IngestError
from ingest.manifest import check_sizes, read_manifest
from ingest.options import SPLITS, IngestOptions, check_fractions
from ingest.split import Moved


@dataclass(frozen=True)
class OldGraph:
    """The graph that grows."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> OldGraph:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        return cls(path, manifest)

    @property
    def rejects(self) -> Path | None:
        return self.path / "rejects.parquet" if "rejects.parquet" in self.manifest["files"] else None

    def label_files(self) -> dict[str, Path]:
        return {table: self.path / f"{table}.parquet" for table in ("entities", "relations")}

    def split_like_before(self, options: IngestOptions) -> IngestOptions:
        """Split new triples as the old ones were: by the same hash, or all to train where the splits were given."""
        before = self.manifest.get("split", {"how": "given"})
        hashed = before["how"] == "hash"
        if hashed and options.seed not in (0, before["seed"]):
            raise IngestError(
                f"--seed is {options.seed}, but {self.path} was split with seed {before['seed']}; leave --seed out"
            )
        valid, test = options.valid_fraction, options.test_fraction
        valid = (before["valid_fraction"] if hashed else 0.0) if valid is None else valid
        test = (before["test_fraction"] if hashed else 0.0) if test is None else test
        check_fractions(valid, test)
        seed = before["seed"] if hashed else options.seed
        return replace(options, seed=seed, valid_fraction=valid, test_fraction=test)

    def split_with(self, moved: Moved | None) -> dict[str, Any] | None:
        """Say how the splits came about, with the triples that were moved this time; None where it is not known."""
        split = self.manifest.get("split")
        if not (split and split["how"] == "hash" and moved):
            return split
        before = split["moved_to_train"]
        return {**split, "moved_to_train": {name: before[name] + n for name, n in asdict(moved).items()}}

    def require_unchanged(self) -> None:
        """Raise IngestError where another process has replaced the graph since it was opened."""
        if read_manifest(self.path) != self.manifest:
            raise IngestError(f"{self.path} was changed by another process meanwhile, and is left as it is; try again")

    def load(self, scratch: Scratch) -> None:
        """Load the old triples as table old, and take out of table triples what is among them, in whatever split."""
        scratch.run("CREATE TABLE old (source INTEGER, relation INTEGER, target INTEGER, split UTINYINT)")
        for number, split in enumerate(SPLITS):
            for part in sorted((self.path / "triples" / f"split={split}").glob("*.parquet")):
                scratch.run(f"INSERT INTO old SELECT source, relation, target, {number} FROM {parquet(part)}")
        scratch.run(
            "CREATE TABLE fresh AS SELECT source, relation, target, split FROM triples "
            "ANTI JOIN old USING (source, relation, target)"
        )
        scratch.run("DROP TABLE triples")
        scratch.run("ALTER TABLE fresh RENAME TO triples")


def join_old(scratch: Scratch) -> None:
    """Put the old triples, which may not be moved any more, beside the new ones."""
    scratch.run("INSERT INTO triples SELECT * FROM old")
    scratch.run("DROP TABLE old")
