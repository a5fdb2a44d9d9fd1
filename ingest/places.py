"""Where a hash split sends a triple: a function of its labels and the seed, and of nothing else.

    place = word("source", s) ^ word("relation", r) ^ word("target", t)
    word(role, label) = the first 8 bytes of md5("SEED\\nROLE\\nLABEL") as a little-endian integer

A place below test_fraction * 2**64 is test, one below (test_fraction + valid_fraction) * 2**64 is valid, the rest is
train. So the order of lines, the machine, the number of threads and the other triples do not matter, and equal triples
stay together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ingest.options import SPLITS, IngestOptions

UNSPLIT = 255
"""Split number of a triple that is to be split by hash."""


def word(role: str, label: str, seed: int) -> int:
    """Give the part of a triple's place that one of its labels makes."""
    return int.from_bytes(
        hashlib.md5(f"{seed}\n{role}\n{label}".encode(), usedforsecurity=False).digest()[:8], "little"
    )


def split_of(source: str, relation: str, target: str, options: IngestOptions) -> str:
    """Give the split of a triple; the SQL below says the same."""
    place = word("source", source, options.seed) ^ word("relation", relation, options.seed)
    place ^= word("target", target, options.seed)
    first_valid, first_train = thresholds(options)
    return SPLITS[2 if place < first_valid else 1 if place < first_train else 0]


def thresholds(options: IngestOptions) -> tuple[int, int]:
    """Give the first place of valid and the first place of train."""
    valid, test = options.fractions()
    return round(test * 2**64), round((test + valid) * 2**64)


@dataclass(frozen=True)
class SplitSql:
    """The rule above in SQL, or the given splits alone."""

    options: IngestOptions
    by_hash: bool

    def place_of(self, label: str, role: str) -> str:
        if not self.by_hash:
            return "0::UBIGINT"
        # DuckDB calls the little-endian integer of the first 8 bytes the upper half.
        return f"md5_number_upper('{self.options.seed}' || chr(10) || '{role}' || chr(10) || {label})"

    def split_of(self, given: str, *places: str) -> str:
        if not self.by_hash:
            return given
        place = f"xor(xor({places[0]}, {places[1]}), {places[2]})"
        first_valid, first_train = thresholds(self.options)
        by_hash = f"CASE WHEN {place} < {first_valid} THEN 2 WHEN {place} < {first_train} THEN 1 ELSE 0 END"
        return f"CASE WHEN {given} = {UNSPLIT} THEN {by_hash} ELSE {given} END"
