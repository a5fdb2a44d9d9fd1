"""Where a hash split sends a triple: a function of its labels and the seed, and of nothing else.

    place = first(md5("SEED\\nentity\\nSOURCE")) ^ first(md5("SEED\\nrelation\\nRELATION"))
            ^ last(md5("SEED\\nentity\\nTARGET"))

where first and last are the first and the last 8 of the 16 bytes, read as little-endian integers. A place below
test_fraction * 2**64 is test, one below (test_fraction + valid_fraction) * 2**64 is valid, the rest is train. So the
order of lines, the machine, the number of threads and the other triples do not matter, and equal triples stay together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingest.options import SPLITS, IngestOptions

UNSPLIT = 255
"""Split number of a triple that is to be split by hash."""


def words(kind: str, label: str, seed: int) -> tuple[int, int]:
    """Give the first and the last word of a label; kind is entity or relation."""
    digest = hashlib.md5(f"{seed}\n{kind}\n{label}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def split_of(source: str, relation: str, target: str, options: IngestOptions) -> str:
    """Give the split of a triple; SplitRule says the same."""
    place = words("entity", source, options.seed)[0] ^ words("relation", relation, options.seed)[0]
    place ^= words("entity", target, options.seed)[1]
    first_valid, first_train = thresholds(options)
    return SPLITS[2 if place < first_valid else 1 if place < first_train else 0]


def thresholds(options: IngestOptions) -> tuple[int, int]:
    """Give the first place of valid and the first place of train."""
    valid, test = options.fractions()
    return round(test * 2**64), round((test + valid) * 2**64)


@dataclass(frozen=True)
class SplitRule:
    """The rule above for many triples at once, in SQL and in numpy; or the given splits alone."""

    options: IngestOptions
    by_hash: bool

    def words_sql(self, kind: str) -> str:
        """Write the columns first and last of a table of labels in SQL."""
        if not self.by_hash:
            return "0::UBIGINT AS first, 0::UBIGINT AS last"
        text = f"'{self.options.seed}' || chr(10) || '{kind}' || chr(10) || label"
        # md5_number is all 16 bytes as one little-endian integer, and much faster than md5_number_upper and _lower.
        number = f"md5_number({text})"
        return f"({number} & {2**64 - 1})::UBIGINT AS first, ({number} >> 64)::UBIGINT AS last"

    def split_sql(self, given: str, *words: str) -> str:
        """Write the number of the split in SQL; `given` is the one a row came with."""
        if not self.by_hash:
            return given
        place = f"xor(xor({words[0]}, {words[1]}), {words[2]})"
        first_valid, first_train = thresholds(self.options)
        by_hash = f"CASE WHEN {place} < {first_valid} THEN 2 WHEN {place} < {first_train} THEN 1 ELSE 0 END"
        return f"CASE WHEN {given} = {UNSPLIT} THEN {by_hash} ELSE {given} END"

    def splits(self, given: npt.NDArray[np.uint8], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """Give the numbers of the splits."""
        first_valid, first_train = (np.uint64(bound) for bound in thresholds(self.options))
        by_hash = (places < first_train).astype(np.uint8) + (places < first_valid).astype(np.uint8)
        return np.where(given == UNSPLIT, by_hash, given).astype(np.uint8)
