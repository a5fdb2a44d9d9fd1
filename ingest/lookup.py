"""Find the ids of many labels at once by their hashes: a hash table of numpy arrays.

Exact as long as no two labels have the same hash, which `LabelTable.make` checks; it takes far less time than joining
the labels themselves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

BYTES_PER_LABEL = 72
"""Upper bound: 2 to 4 slots of 12 bytes, the hashes, and what building takes on top."""


class LabelTable:
    """Maps the 64-bit hashes of labels to ids 0, 1, 2, ... by open addressing with linear probing."""

    def __init__(self, hashes: Uint64s) -> None:
        """Place different hashes [n]; id i belongs to hashes[i]."""
        size = 1 << max(1, (2 * len(hashes) - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._ids = np.full(size, -1, np.int32)
        self._keys = np.zeros(size, np.uint64)
        waiting = np.arange(len(hashes), dtype=np.int32)
        slots = (hashes & self._mask).astype(np.int64)
        while len(waiting):
            free = self._ids[slots] < 0
            # Where several want one free slot, the last one written gets it and the others move on.
            self._ids[slots[free]] = waiting[free]
            placed = self._ids[slots] == waiting
            waiting, slots = waiting[~placed], (slots[~placed] + 1) & (size - 1)
        used = self._ids >= 0
        self._keys[used] = hashes[self._ids[used]]

    @classmethod
    def make(cls, hashes: Uint64s) -> LabelTable | None:
        """Make the table, or give None where two labels have the same hash."""
        ordered = np.sort(hashes)
        if (ordered[1:] == ordered[:-1]).any():
            return None
        return cls(hashes)

    def find(self, hashes: Uint64s) -> Int32s:
        """Give the ids of hashes that are all in the table."""
        size = len(self._ids)
        slots = (hashes & self._mask).view(np.int64)
        missed = np.flatnonzero(self._keys.take(slots) != hashes)
        while len(missed):
            slots[missed] = (slots[missed] + 1) & (size - 1)
            missed = missed[self._keys.take(slots[missed]) != hashes[missed]]
        ids = self._ids.take(slots)
        assert ids.size == 0 or ids.min() >= 0, "a label is missing from the table"
        return ids
