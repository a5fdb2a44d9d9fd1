"""Read the tensors of a checkpoint in ranges of rows, without ever holding the whole table.

torch.distributed.checkpoint writes each process's piece of a tensor into that process's safetensors file and notes in
the file's metadata at which row the piece begins.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from sattle_dist.checkpoint import CheckpointError

Array = npt.NDArray[Any]
_PLACES = "DCP_SHARDING_INFO"


@dataclass(frozen=True, kw_only=True, order=True)
class Piece:
    """Rows [start, start + shape[0]) of a tensor, and the file that holds them."""

    start: int
    shape: tuple[int, ...]
    file: Path

    @property
    def stop(self) -> int:
        return self.start + (self.shape[0] if self.shape else 1)


class StoredTensors:
    """The tensors of a checkpoint by name."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        try:
            for file in sorted(checkpoint.glob("*.safetensors")):
                with safe_open(file, "numpy") as tensors:
                    places = json.loads(tensors.metadata()[_PLACES])
                    for name in tensors.keys():  # noqa: SIM118  it is no dict
                        shape = tuple(tensors.get_slice(name).get_shape())
                        start = (*places[name]["saved_offsets"], 0)[0]
                        self.pieces[name].append(Piece(start=start, shape=shape, file=file))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint} cannot be read: {error}") from None
        for name, pieces in self.pieces.items():
            pieces[:] = sorted(piece for piece in pieces if 0 not in piece.shape[:1] or len(pieces) == 1)
            ends = [0, *(piece.stop for piece in pieces)]
            if [piece.start for piece in pieces] != ends[:-1]:
                raise CheckpointError(f"{checkpoint} is damaged: rows of {name} are missing")

    def names(self, prefix: str) -> list[str]:
        """List the tensors whose names begin so, in alphabetical order."""
        return sorted(name for name in self.pieces if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Give the shape of a whole tensor."""
        pieces = self._pieces(name)
        return (pieces[-1].stop, *pieces[0].shape[1:]) if pieces[0].shape else ()

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Read rows [start, stop) of a tensor."""
        parts = []
        for piece in self._pieces(name):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                with safe_open(piece.file, "numpy") as tensors:
                    parts.append(tensors.get_slice(name)[first - piece.start : last - piece.start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def whole(self, name: str) -> Array:
        """Read a small tensor whole."""
        pieces = self._pieces(name)
        with safe_open(pieces[0].file, "numpy") as tensors:
            if not pieces[0].shape:
                scalar: Array = tensors.get_tensor(name)
                return scalar
        return self.rows(name, 0, pieces[-1].stop)

    def _pieces(self, name: str) -> list[Piece]:
        if not self.pieces.get(name):
            raise CheckpointError(f"{self.checkpoint} is damaged: it has no tensor {name}")
        return self.pieces[name]
