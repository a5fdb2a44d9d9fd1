"""The files of a checkpoint: safetensors written in a stream, each with its checksum, sealed by state.json.

A shard file is written straight from the tensors' memory, so that nothing is copied a second time, and the interpreter
is free for training meanwhile. state.json names every file with its size and CRC-32, and holds its own CRC-32: any
flipped bit and any missing byte of a checkpoint shows before a number is used. No file is ever unpickled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sattle_dist.collectives import Group
from sattle_dist.config import UserError

STATE = "state.json"
FORMAT = "sattle-checkpoint"
FORMAT_VERSION = 1
PARTIAL = ".partial"
PIECE = 1 << 24  # bytes written and summed at once
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bfloat16: "BF16", torch.bool: "BOOL"}


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class FileFacts:
    """What is known of a file that was written."""

    name: str
    bytes: int
    crc32: str


class CheckedWriter(HuggingFaceStorageWriter):
    """Write a checkpoint beside its place, flush it, seal it, and rename it when it is whole.

    torch.distributed.checkpoint calls it: write_data on every rank, and on rank 0 prepare_global_plan before and finish
    after the writing of all ranks.
    """

    def __init__(self, final: Path, facts: dict[str, Any]) -> None:
        self.final, self.partial = final, final.with_name(final.name + PARTIAL)
        self.facts = facts
        super().__init__(str(self.partial), save_distributed=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        shutil.rmtree(self.partial, ignore_errors=True)  # of a run that was killed here
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)  # numbers the shards

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            tensors = [cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous() for item in plan.items]
            items = list(zip(plan.items, tensors, strict=True))
            written = write_shard(self.partial / f"shard-{plan.storage_data['shard_index']:05d}.safetensors", items)
            results = [WriteResult(index=plan.items[0].index, size_in_bytes=written.bytes, storage_data=written)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result.storage_data for rank in results for result in rank]
        files = {file.name: {"bytes": file.bytes, "crc32": file.crc32} for file in written}
        write_state(self.partial, {**self.facts, "files": files})
        flush_folder(self.partial)
        shutil.rmtree(self.final, ignore_errors=True)
        os.rename(self.partial, self.final)
        flush_folder(self.final.parent)


def write_shard(path: Path, items: list[tuple[WriteItem, Tensor]]) -> FileFacts:
    """Write tensors as one safetensors file, with the offsets by which torch finds a shard's place; flush it."""
    header: dict[str, Any] = {}
    offsets, end = {}, 0
    for item, tensor in items:
        assert item.tensor_data is not None
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[item.index.fqn] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with path.open("wb") as file:
        data = (piece for _, tensor in items for piece in pieces(tensor))
        for piece in itertools.chain([memoryview(struct.pack("<Q", len(text)) + text)], data):
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileFacts(path.name, size, f"{crc:08x}")


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Give the bytes of a contiguous tensor on the host, a piece at a time, without copying them."""
    whole = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for start in range(0, len(whole), PIECE):
        yield whole[start : start + PIECE]


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


NO_SUM = '"crc32_of_this_file": "--------"'
OWN_SUM = re.compile(r'"crc32_of_this_file": "([0-9a-f]{8})"')


def write_state(folder: Path, facts: dict[str, Any]) -> None:
    """Write state.json, with its own checksum: the CRC-32 of the file with eight dashes in its place."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "crc32_of_this_file": "--------"}
    text = json.dumps({**head, **facts}, indent=1) + "\n"
    text = text.replace(NO_SUM, f'"crc32_of_this_file": "{zlib.crc32(text.encode()):08x}"', 1)
    with (folder / STATE).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Read what was saved beside the tensors of a checkpoint; raise DamagedCheckpoint where a bit of it differs."""
    file = checkpoint / STATE
    try:
        text = file.read_bytes().decode("utf-8")
        sums = OWN_SUM.search(text)
        if not sums or f"{zlib.crc32(OWN_SUM.sub(NO_SUM, text, count=1).encode()):08x}" != sums[1]:
            raise DamagedCheckpoint(f"{file} is damaged: its checksum differs")
        facts = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {STATE} is missing") from None
    except (OSError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from None
    if facts.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint} has format version {facts.get('format_version')!r}, this release reads {FORMAT_VERSION}"
        )
    return dict(facts)


def verify(checkpoint: Path, group: Group) -> dict[str, Any]:
    """Check every byte of a checkpoint, each rank a share of its files; give its facts. Every rank must call it."""
    facts: dict[str, Any] = {}
    problem: CheckpointError | None = None
    try:
        facts = read_checked(checkpoint, group.rank, group.world_size)
    except CheckpointError as error:
        problem = error
    if problems := [found for found in group.gather_objects(problem) if found]:
        raise problems[0]
    return facts


def read_checked(checkpoint: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Give the facts of a checkpoint, once every byte of this rank's share of its files has been checked."""
    facts = read_facts(checkpoint)
    names = sorted(facts["files"])
    if foreign := {file.name for file in checkpoint.glob("*.safetensors")} - set(names):
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {min(foreign)} does not belong to it")
    for name in names[rank::world_size]:
        check_file(checkpoint, name, facts["files"][name])
    return facts


def check_file(checkpoint: Path, name: str, written: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint where a file is not what was written."""
    try:
        with (checkpoint / name).open("rb") as file:
            size, crc = 0, 0
            while piece := file.read(PIECE):
                size, crc = size + len(piece), zlib.crc32(piece, crc)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{checkpoint}/{name} cannot be read: {error}") from None
    if size != written["bytes"]:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {name} has {size} bytes, not {written['bytes']}")
    if f"{crc:08x}" != written["crc32"]:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: the checksum of {name} differs")
