"""Every random choice of a run, as a pure function of its seed and of where it is used.

Nothing here keeps state: the order of an epoch, a dropout mask and an initial row are computed from (seed, epoch, step,
place), so they do not depend on how many processes ask, nor on what was asked before. A resumed run needs no saved
generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# What a key is for; part of the key, so that two uses never share numbers.
ORDER, MASKS, ROWS, WEIGHTS, TIES, BOOTSTRAP, HEARSAY = range(7)

ROWS_PER_BLOCK = 1024
WORDS_PER_COUNT = 16  # one step of Philox's counter yields 256 bits: sixteen 16-bit words


def philox(*key: int, counter: int = 0) -> np.random.Philox:
    """Make a counter-based bit generator for this key, at this place of its stream."""
    return np.random.Philox(key=np.random.SeedSequence(key).generate_state(2, np.uint64), counter=counter)


class Permutation:
    """A pseudo-random order of [0, n) that is computed, not stored.

    A Feistel network of four rounds permutes the smallest square of a power of two that covers n; places it sends
    outside [0, n) are sent on until they fall inside (cycle walking; fewer than four tries on average).
    """

    NUM_ROUNDS = 4

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._keys = np.random.SeedSequence((ORDER, *key)).generate_state(self.NUM_ROUNDS, np.uint64)

    def __call__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map distinct places in [0, n) to distinct items in [0, n)."""
        items = self._shuffle(places.astype(np.uint64))
        while len(outside := np.flatnonzero(items >= self.n)):
            items[outside] = self._shuffle(items[outside])
        return items.astype(np.int64)

    def _shuffle(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = x >> half, x & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter the bits of x: the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class MaskSpec:
    """One dropout site: the shape of its mask for a single query, and the share of entries it drops."""

    shape: tuple[int, ...]
    rate: float


def draw_masks(
    specs: Mapping[str, MaskSpec], start: int, stop: int, *key: int, device: torch.device
) -> dict[str, Tensor]:
    """Draw the dropout masks of queries [start, stop) of a global batch, scaled by 1 / (keep probability).

    Every query owns a fixed piece of one counter-based stream, so a process draws its slice alone and it is the slice
    of the mask that one process would have drawn for the whole batch.
    """
    sizes = [int(np.prod(spec.shape)) for spec in specs.values()]
    counts_per_query = -(-sum(sizes) // WORDS_PER_COUNT)
    stream = philox(MASKS, *key, counter=start * counts_per_query)
    raw = stream.random_raw((stop - start) * counts_per_query * WORDS_PER_COUNT // 4)
    words = raw.view(np.uint16).reshape(stop - start, counts_per_query * WORDS_PER_COUNT)
    masks, column = {}, 0
    for (name, spec), size in zip(specs.items(), sizes, strict=True):
        threshold = round(spec.rate * 65536)  # rates are met to 1/65536, and scaled by what is met
        keep = torch.from_numpy(words[:, column : column + size] >= threshold)
        keep = to_device(keep, device).view(-1, *spec.shape)
        masks[name] = keep * (65536 / (65536 - threshold))
        column += size
    return masks


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for a GPU to be ready for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def normal_rows(start: int, stop: int, dim: int, std: float, *key: int) -> Tensor:
    """Draw rows [start, stop) of a table of normal numbers; a row depends on its place and the key alone.

    The key begins with what it is for, ROWS or WEIGHTS. Keys are of one length: numpy takes a shorter one for the same
    key with zeros behind.
    """
    rows = np.empty((stop - start, dim), np.float32)
    for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        low, high = max(start, first), min(stop, first + ROWS_PER_BLOCK)
        drawn = np.random.Generator(philox(*key, block)).standard_normal((ROWS_PER_BLOCK, dim), np.float32)
        rows[low - start : high - start] = drawn[low - first : high - first]
    rows *= std
    return torch.from_numpy(rows)
