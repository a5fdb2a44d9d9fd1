"""Open a graph directory (docs/graph-format.md): its manifest, its labels, its mapped query index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sattle_dist.config import UserError

FORMAT = "sattle-graph"
FORMAT_VERSION = 1
SPLITS = ("train", "valid", "test")

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class GraphError(UserError):
    """A graph directory that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class QueryIndex:
    """One split's triples grouped by query, mapped from disk: query i has targets[offsets[i]:offsets[i + 1]]."""

    queries: Int64s  # [Q] keys source * num_relations_both + relation, increasing
    offsets: Int64s  # [Q + 1]
    targets: Int32s  # [T] increasing within a query
    num_relations_both: int  # 2R: relations and their inverses

    def __len__(self) -> int:
        return len(self.queries)

    def split_keys(self, keys: Int64s) -> tuple[Int64s, Int64s]:
        """Turn query keys [n] into sources [n] and relations [n], inverse relations at R and above."""
        return keys // self.num_relations_both, keys % self.num_relations_both

    def targets_of(self, places: Int64s) -> tuple[Int64s, Int32s]:
        """Give the number of targets [n] of the queries at these places, and their targets one after the other."""
        starts = self.offsets[places]
        counts = self.offsets[places + 1] - starts
        return counts, self.targets[concatenated_ranges(starts, counts)]

    def known_targets(self, keys: Int64s) -> tuple[Int64s, Int32s]:
        """Like `targets_of` for query keys; a query the split does not hold has no targets."""
        places, found = self._find(keys)
        counts = np.zeros(len(keys), np.int64)
        counts[found], targets = self.targets_of(places[found])
        return counts, targets

    def count_known(self, keys: Int64s) -> Int64s:
        """Count the targets [n] of query keys, without reading them."""
        places, found = self._find(keys)
        counts = np.zeros(len(keys), np.int64)
        counts[found] = self.offsets[places[found] + 1] - self.offsets[places[found]]
        return counts

    def _find(self, keys: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        places = np.searchsorted(self.queries, keys)
        found = places < len(self.queries)
        found[found] = self.queries[places[found]] == keys[found]
        return places, found


def concatenated_ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Concatenate arange(start, start + count) for every pair."""
    ends = np.cumsum(counts)
    places: Int64s = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return places


@dataclass(frozen=True, kw_only=True)
class Graph:
    path: Path
    name: str
    checksum: str
    num_entities: int
    num_relations: int
    num_triples: dict[str, int]
    """Triples by split."""
    _indexes: dict[str, QueryIndex] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path) -> Graph:
        """Read the manifest of the graph at `path`; raise GraphError with the reason where that is no graph."""
        manifest = read_manifest(path)
        try:
            graph = cls(
                path=path,
                name=str(manifest["name"]),
                checksum=str(manifest["checksum"]),
                num_entities=int(manifest["num_entities"]),
                num_relations=int(manifest["num_relations"]),
                num_triples={split: int(manifest["splits"][split]["triples"]) for split in SPLITS},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"{path}/manifest.json is damaged ({error!r}); ingest the graph again") from None
        for table, count in (("entities", graph.num_entities), ("relations", graph.num_relations)):
            graph._require_rows(table, count)
        return graph

    def _require_rows(self, table: str, count: int) -> None:
        """Raise GraphError where there are more or fewer labels than the manifest says."""
        file = self.path / f"{table}.parquet"
        try:
            found = pq.read_metadata(file).num_rows
        except (OSError, pa.ArrowException) as error:
            raise GraphError(f"{file} cannot be read ({error}); ingest the graph again") from None
        if found != count:
            raise GraphError(
                f"{self.path} is damaged: {file.name} has {found:,} rows, its manifest says {count:,}; ingest it again"
            )

    def index(self, split: str) -> QueryIndex:
        """Map the grouped index of a split, once; nothing is read before it is touched."""
        if split not in self._indexes:
            self._indexes[split] = self._map(split)
        return self._indexes[split]

    def hold(self) -> None:
        """Map every index now: what is mapped stays, also where the graph is replaced or grown meanwhile."""
        for split in SPLITS:
            self.index(split)

    def _map(self, split: str) -> QueryIndex:
        folder = self.path / "index" / f"split={split}"
        try:
            queries, offsets, targets = (
                np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ("queries", "offsets", "targets")
            )
        except (OSError, ValueError, EOFError) as error:
            raise GraphError(f"{folder} cannot be read ({error}); ingest the graph again") from None
        ends = (0, len(targets)) if len(queries) else (0, 0)
        fitting = len(offsets) == len(queries) + 1 and (offsets[0], offsets[-1]) == ends
        if not fitting or len(targets) != 2 * self.num_triples[split]:
            raise GraphError(f"{folder} does not fit its manifest; ingest the graph again")
        # A zero-length file cannot be mapped; numpy then gives a plain empty array, which serves as well.
        return QueryIndex(queries=queries, offsets=offsets, targets=targets, num_relations_both=2 * self.num_relations)

    def labels(self, table: str, batch_size: int = 1 << 16) -> Iterator[pa.Array]:
        """Yield the labels of `entities` or `relations` in the order of their ids, batch by batch."""
        file = self.path / f"{table}.parquet"
        try:
            for batch in pq.ParquetFile(file).iter_batches(batch_size, columns=["label"]):
                yield batch["label"].cast(pa.string())
        except (OSError, pa.ArrowException, KeyError) as error:
            raise GraphError(f"{file} cannot be read ({error}); ingest the graph again") from None

    def relation_labels(self) -> list[str]:
        """Read all relation labels, in the order of their ids."""
        return [label for batch in self.labels("relations") for label in batch.to_pylist()]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the head of manifest.json: a graph of a format version this release knows."""
    file = path / "manifest.json"
    try:
        if not path.exists():
            raise GraphError(f"no graph at {path}; make one with `sattle-ingest triples.tsv --out {path}`")
        if not file.is_file():
            raise GraphError(f"{path} is not a graph directory (it has no manifest.json); make one with sattle-ingest")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except GraphError:
        raise
    except (OSError, ValueError) as error:
        raise GraphError(f"{file} cannot be read ({error}); ingest the graph again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise GraphError(f"{file} does not describe a {FORMAT}")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise GraphError(
            f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}: "
            "upgrade sattle-dist, or ingest the graph again with this release"
        )
    return manifest
