"""Carry what was trained into other tools: vectors with their labels, streamed from the checkpoint's files.

    OUT/entities.parquet     entity_id, label, vector (a list of exactly dim float32), bias
    OUT/relations.parquet    relation_id, label, vector, inverse_vector
    OUT/model.safetensors    relations, encoder and decoder; its metadata holds the config and what the run was made of

That is `parquet`. The other formats have the same model.safetensors and, instead of the first two,

    safetensors   entities.safetensors (vector [N, dim], bias [N]); entities.tsv and relations.tsv (id, label)
    npy           vectors.npy [N, dim], bias.npy [N], relations.npy [2R, dim] (inverses from R on); the same two .tsv
    tsv           entities.tsv (entity_id, label, bias, then dim numbers), relations.tsv (without bias, inverses below)

Nothing is held but a batch of rows. The folder is written beside its place and renamed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors.numpy import save

from ingest.errors import IngestError
from ingest.place import exchange, working_directory
from sattle_dist import __version__
from sattle_dist import checkpoint as checkpoints
from sattle_dist.config import Config, ConfigError, to_toml
from sattle_dist.graph import Graph
from sattle_dist.run import open_graph, read_config
from sattle_dist.storage import read_checked
from sattle_dist.stored import StoredTensors

Floats = npt.NDArray[np.float32]
OnRows = Callable[[int, int], None]  # told (entities just written, entities in all)
BATCH_BYTES = 16 << 20
FILES = {"model.safetensors", "vectors.npy", "bias.npy", "relations.npy"}
"""All that an export may hold, in any format."""
FILES |= {f"{table}.{ending}" for table in ("entities", "relations") for ending in ("parquet", "safetensors", "tsv")}
ROWS, BIAS, RELATIONS = "table.rows", "table.bias", "model.relations"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is exported: a checkpoint's tensors, the graph that has the labels, and the facts to write beside them."""

    tensors: StoredTensors
    graph: Graph
    config: Config
    epoch: int

    @property
    def dim(self) -> int:
        return self.config.model.dim

    def batches(self, on_rows: OnRows) -> Iterator[tuple[int, pa.Array, Floats, Floats]]:
        """Yield (first entity_id, labels [n], vectors [n, dim], bias [n]) for one range of entities after the other."""
        start, size = 0, max(1, BATCH_BYTES // (4 * self.dim))
        for labels in self.graph.labels("entities", size):
            stop = start + len(labels)
            yield start, labels, self.tensors.rows(ROWS, start, stop), self.tensors.rows(BIAS, start, stop)
            on_rows(len(labels), self.graph.num_entities)
            start = stop


def export(
    run_dir: Path,
    out: Path,
    format: str,
    *,
    force: bool = False,
    which: str = "best",
    on_rows: OnRows = lambda num_rows, total: None,
) -> Trained:
    """Write the vectors, relations and weights of a run into the folder `out`."""
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; choose another --out, or replace it with --force")
    if out.exists():
        require_own(out)
        out = out.resolve()  # what is behind a link is replaced, not the link
    trained = find_trained(run_dir, which)
    try:
        with working_directory(out.absolute()) as work:
            (work / "new").mkdir()
            FORMATS[format](trained, work / "new", on_rows)
            write_model(trained, work / "new")
            if out.exists():
                exchange(work / "new", out)  # so that an export is there at every moment
            else:
                (work / "new").rename(out)
    except (OSError, IngestError) as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    return trained


def require_own(out: Path) -> None:
    """Raise ConfigError where a folder holds, or is, something else than an export."""
    if not (out / "model.safetensors").is_file():
        raise ConfigError(f"{out} was not written by `sattle export` and would be lost; choose another --out")
    if foreign := sorted({path.name for path in out.iterdir()} - FILES):
        raise ConfigError(f"{out} holds {foreign[0]}, which is no part of an export and would be lost; move it away")


def find_trained(run_dir: Path, which: str) -> Trained:
    """Find a checkpoint of a run (`best` or another), every byte of it checked, and the graph with its labels."""
    checkpoint = checkpoints.find(run_dir, which)
    try:
        facts = read_checked(checkpoint)
    except checkpoints.DamagedCheckpoint as error:
        raise checkpoints.DamagedCheckpoint(f"{error}; {checkpoints.others(run_dir, checkpoint)}") from None
    tensors = StoredTensors(checkpoint)
    # What was trained is what the checkpoint says; config.toml may have been edited since.
    config = read_config(run_dir).merge(facts["config"], str(checkpoint))
    graph = open_graph(run_dir, config, facts)
    return Trained(tensors=tensors, graph=graph, config=config, epoch=facts["epoch"])


def relation_labels(trained: Trained) -> pa.Array:
    batches = list(trained.graph.labels("relations"))
    return pa.concat_arrays(batches) if batches else pa.array([], pa.string())


def vector_array(vectors: Floats) -> pa.Array:
    """Turn [n, dim] into an Arrow array of n lists of fixed size, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(vectors).reshape(-1)), vectors.shape[1])


def write_parquet(trained: Trained, folder: Path, on_rows: OnRows) -> None:
    vector = pa.list_(pa.float32(), trained.dim)
    schema = pa.schema({"entity_id": pa.int64(), "label": pa.string(), "vector": vector, "bias": pa.float32()})
    # A dictionary of floats, or of labels that are all different, only costs memory.
    with pq.ParquetWriter(folder / "entities.parquet", schema, use_dictionary=False) as writer:
        for start, labels, rows, bias in trained.batches(on_rows):
            ids = np.arange(start, start + len(labels))
            writer.write_table(pa.table([ids, labels, vector_array(rows), bias], schema=schema))
    labels, vectors = relation_labels(trained), trained.tensors.whole(RELATIONS)
    schema = pa.schema({"relation_id": pa.int64(), "label": pa.string(), "vector": vector, "inverse_vector": vector})
    both = (vector_array(vectors[: len(labels)]), vector_array(vectors[len(labels) :]))
    pq.write_table(pa.table([np.arange(len(labels)), labels, *both], schema=schema), folder / "relations.parquet")


def write_safetensors(trained: Trained, folder: Path, on_rows: OnRows) -> None:
    num, dim = trained.graph.num_entities, trained.dim
    split, end = 4 * num * dim, 4 * num * (dim + 1)
    header: dict[str, Any] = {
        "__metadata__": metadata(trained),
        "vector": {"dtype": "F32", "shape": [num, dim], "data_offsets": [0, split]},
        "bias": {"dtype": "F32", "shape": [num], "data_offsets": [split, end]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the numbers aligned
    with (folder / "entities.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        write_numbers(trained, file, folder, on_rows)


def write_npy(trained: Trained, folder: Path, on_rows: OnRows) -> None:
    num, dim = trained.graph.num_entities, trained.dim
    for name, shape in (("vectors", (num, dim)), ("bias", (num,))):
        with (folder / f"{name}.npy").open("wb") as file:
            head = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, head)
    with (folder / "vectors.npy").open("ab") as vectors, (folder / "bias.npy").open("ab") as bias:
        write_numbers(trained, vectors, folder, on_rows, bias)
    np.save(folder / "relations.npy", trained.tensors.whole(RELATIONS))


def write_numbers(
    trained: Trained, vectors: IO[bytes], folder: Path, on_rows: OnRows, bias: IO[bytes] | None = None
) -> None:
    """Append all vectors, then all biases (to the same file unless another is given), and write the labels apart."""
    with ExitStack() as stack:
        entities = stack.enter_context((folder / "entities.tsv").open("wb"))
        for start, labels, rows, _ in trained.batches(on_rows):
            vectors.write(rows.astype("<f4", copy=False).tobytes())
            write_lines(entities, [pa.array(np.arange(start, start + len(labels))), labels])
        relations = stack.enter_context((folder / "relations.tsv").open("wb"))
        names = relation_labels(trained)
        write_lines(relations, [pa.array(np.arange(len(names))), names])
    size = BATCH_BYTES // 4
    for start in range(0, trained.graph.num_entities, size):
        part = trained.tensors.rows(BIAS, start, min(start + size, trained.graph.num_entities))
        (bias or vectors).write(part.astype("<f4", copy=False).tobytes())


def write_tsv(trained: Trained, folder: Path, on_rows: OnRows) -> None:
    with (folder / "entities.tsv").open("wb") as file:
        for start, labels, rows, bias in trained.batches(on_rows):
            ids = np.arange(start, start + len(labels))
            write_lines(file, [pa.array(ids), labels, pa.array(bias), *map(pa.array, np.ascontiguousarray(rows.T))])
    labels, vectors = relation_labels(trained), trained.tensors.whole(RELATIONS)
    names = pa.concat_arrays([labels, pc.binary_join_element_wise("inverse of ", labels, "")])
    with (folder / "relations.tsv").open("wb") as file:
        columns = [pa.array(np.arange(len(names))), names, *map(pa.array, np.ascontiguousarray(vectors.T))]
        write_lines(file, columns)


def write_lines(file: IO[bytes], columns: list[pa.Array]) -> None:
    """Append a line per row, the columns between tabs; numbers as the shortest text that gives them back."""
    if not len(columns[0]):
        return
    labels = columns[1]
    if bad := labels.filter(pc.match_substring_regex(labels, "[\t\r\n]")):
        raise ConfigError(f"the label {bad[0].as_py()!r} has a tab or a line end, which TSV cannot hold; use parquet")
    lines = pc.binary_join_element_wise(*(column.cast(pa.string()) for column in columns), "\t")
    file.write("\n".join(lines.to_pylist()).encode() + b"\n")


def write_model(trained: Trained, folder: Path) -> None:
    """Write everything but the entities: relations, encoder, decoder."""
    names = trained.tensors.names("model.")
    tensors = {name.removeprefix("model."): trained.tensors.whole(name) for name in names}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata(trained)))


def metadata(trained: Trained) -> dict[str, str]:
    """Say what the vectors were made of, as text."""
    return {
        "config": to_toml(trained.config),
        "graph": trained.graph.name,
        "graph_checksum": trained.graph.checksum,
        "num_entities": str(trained.graph.num_entities),
        "num_relations": str(trained.graph.num_relations),
        "epoch": str(trained.epoch),
        "made_by": f"sattle-dist {__version__}",
    }


FORMATS: dict[str, Callable[[Trained, Path, OnRows], None]] = {
    "parquet": write_parquet,
    "safetensors": write_safetensors,
    "npy": write_npy,
    "tsv": write_tsv,
}
