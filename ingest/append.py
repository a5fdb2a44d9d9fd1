"""Grow a graph: its ids and splits stay as they are, new labels and triples follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingest.database import Scratch, quote
from ingest.errors import IngestError
from ingest.manifest import check_sizes, read_manifest
from ingest.options import SPLITS, IngestOptions


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
        return replace(
            options,
            seed=before["seed"] if hashed else options.seed,
            valid_fraction=(before["valid_fraction"] if hashed else 0.0) if valid is None else valid,
            test_fraction=(before["test_fraction"] if hashed else 0.0) if test is None else test,
        )

    def load(self, scratch: Scratch) -> None:
        """Load the old triples as table old, and take out of table triples what is among them, in whatever split."""
        scratch.run("CREATE TABLE old (source INTEGER, relation INTEGER, target INTEGER, split UTINYINT)")
        for number, split in enumerate(SPLITS):
            for part in sorted((self.path / "triples" / f"split={split}").glob("*.parquet")):
                scratch.run(
                    f"INSERT INTO old SELECT source, relation, target, {number} "
                    f"FROM read_parquet([{quote(part)}], hive_partitioning = false)"
                )
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
