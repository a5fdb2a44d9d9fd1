"""The manifest of a graph: writing it, opening it, and verifying the files it vouches for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ingest.errors import IngestError
from ingest.options import SPLITS

FORMAT = "sattle-graph"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
COUNTED = {"entities": "num_entities", "relations": "num_relations"}
INDEX_ARRAYS = ("queries", "offsets", "targets")
_PIECE = 1 << 22


def sha256_of(path: Path, skip: int = 0) -> str:
    """Hash a file, leaving out its first `skip` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(skip)
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def graph_files(graph: Path) -> list[str]:
    """List the files of a graph, manifest left out, as relative names."""
    found = (path.relative_to(graph).as_posix() for path in graph.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def content_checksum(graph: Path) -> str:
    """Name the content: a hash over the labels in id order and the index arrays, whatever the layout of the files.

    It is the sha256 of lines `part length sha256`, where part is a label column (its lengths in bytes as little-endian
    int64, then its bytes, hashed apart) or an index array (its elements as little-endian integers).
    """
    tasks: list[tuple[str, Callable[[], str]]] = [
        (table, partial(_hash_labels, graph / f"{table}.parquet")) for table in ("entities", "relations")
    ]
    for split in SPLITS:
        for array in INDEX_ARRAYS:
            # The headers are read here, by one thread: numpy parses them with ast, which Python 3.11 cannot do in two.
            length, start = _read_header(path := graph / "index" / f"split={split}" / f"{array}.npy")
            tasks.append((f"{split}/{array} {length}", partial(sha256_of, path, start)))
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda task: f"{task[0]} {task[1]()}\n", tasks))
    return "sha256:" + hashlib.sha256("".join(parts).encode()).hexdigest()


def _hash_labels(path: Path) -> str:
    lengths, text, count = hashlib.sha256(), hashlib.sha256(), 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["label"]):
            labels = batch.column(0)
            if not len(labels):
                continue
            _, offsets, data = labels.buffers()
            ends = np.frombuffer(offsets, np.int32)[labels.offset : labels.offset + len(labels) + 1]
            lengths.update(np.diff(ends).astype("<i8").data)
            if data is not None:
                text.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
            count += len(labels)
    return f"{count} {lengths.hexdigest()} {text.hexdigest()}"


def _read_header(path: Path) -> tuple[int, int]:
    """Give an array's length and the byte at which its elements begin."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        assert dtype.str in ("<i8", "<i4"), dtype
        return shape[0], file.tell()


def describe_files(graph: Path) -> dict[str, dict[str, Any]]:
    """Give size and sha256 of every file."""
    names = graph_files(graph)
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda name: sha256_of(graph / name), names))
    return {
        name: {"bytes": (graph / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }


def make_manifest(graph: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Add the checksums of a finished graph to the facts about it, and write them as its manifest."""
    manifest = {**facts, "checksum": content_checksum(graph), "files": describe_files(graph)}
    write_manifest(graph, manifest)
    return manifest


def write_manifest(graph: Path, content: dict[str, Any]) -> None:
    """Write manifest.json, all of it or none."""
    text = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **content}, indent=2, ensure_ascii=False)
    draft = graph / (MANIFEST + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(graph / MANIFEST)


def read_manifest(graph: Path) -> dict[str, Any]:
    """Open a graph's manifest; raise IngestError where there is none, or a damaged or newer one."""
    if not graph.exists():
        raise IngestError(f"no graph at {graph}")
    path = graph / MANIFEST
    if not path.is_file():
        raise IngestError(f"{graph} is not a graph directory: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IngestError(f"{path} is damaged ({error}); ingest the graph again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IngestError(f"{path} does not describe a {FORMAT}")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise IngestError(
            f"{graph} has format version {version!r}, this release reads {FORMAT_VERSION}: upgrade sattle-dist, or "
            "ingest the graph again with this release"
        )
    try:
        for count in (manifest["num_entities"], manifest["num_relations"]):
            _check_count(count)
        for split in SPLITS:
            _check_count(manifest["splits"][split]["triples"])
            _check_count(manifest["splits"][split]["queries"])
        for name, facts in manifest["files"].items():
            _check_count(facts["bytes"])
            str(name), str(facts["sha256"])
        for kind in ("read", "kept", "duplicates", "rejected"):
            _check_count(manifest["lines"][kind])
        list(manifest["made_by"]["inputs"]), str(manifest["split"]["how"])
        str(manifest["checksum"]), str(manifest["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IngestError(f"{path} is damaged ({error!r}); ingest the graph again") from None
    return manifest


def _check_count(value: object) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")


def check_sizes(graph: Path, manifest: dict[str, Any]) -> None:
    """Raise IngestError where a file is missing or has another size than the manifest says."""
    for name, facts in manifest["files"].items():
        path = graph / name
        if not path.is_file():
            raise IngestError(f"{graph} is damaged: {name} is missing; ingest the graph again")
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise IngestError(
                f"{graph} is damaged: {name} has {size} bytes, not {facts['bytes']}; ingest the graph again"
            )


def _check_counts(graph: Path, manifest: dict[str, Any]) -> None:
    """Raise IngestError where a count of the manifest is not what the files hold."""
    counts = {}
    for table, count in COUNTED.items():
        counts[f"{table}.parquet"] = (pq.read_metadata(graph / f"{table}.parquet").num_rows, manifest[count])
    for split, said in manifest["splits"].items():
        folder = f"index/split={split}"
        counts[f"{folder}/queries.npy"] = (_read_header(graph / folder / "queries.npy")[0], said["queries"])
        counts[f"{folder}/targets.npy"] = (_read_header(graph / folder / "targets.npy")[0], 2 * said["triples"])
    for name, (found, expected) in counts.items():
        if found != expected:
            raise IngestError(
                f"{graph} is damaged: {name} holds {found:,}, its manifest says {expected:,}; ingest the graph again"
            )


def verify(graph: Path, manifest: dict[str, Any]) -> None:
    """Recompute every checksum; raise IngestError naming the first file that differs."""
    if missing := [f"{table}.parquet" for table in COUNTED if f"{table}.parquet" not in manifest["files"]]:
        raise IngestError(f"{graph} is damaged: its manifest does not know {missing[0]}; ingest the graph again")
    check_sizes(graph, manifest)
    found = describe_files(graph)
    for name, facts in manifest["files"].items():
        if found[name]["sha256"] != facts["sha256"]:
            raise IngestError(f"{graph} is damaged: the checksum of {name} differs; ingest the graph again")
    extra = sorted(set(found) - set(manifest["files"]))
    if extra:
        raise IngestError(f"{graph} holds {extra[0]}, which its manifest does not know; remove it")
    _check_counts(graph, manifest)
    if content_checksum(graph) != manifest["checksum"]:
        raise IngestError(f"{graph} is damaged: the checksum of its content differs; ingest the graph again")
