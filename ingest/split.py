"""Split triples by a hash of their labels and the seed, and see that all of valid and test is known in train.

The place of a triple is the first 8 bytes of md5("SEED\\nSOURCE\\nRELATION\\nTARGET"), read as a big-endian integer and
divided by 2**64: below the test fraction it is test, then comes valid, the rest is train. Nothing but the triple and the
seed goes into it, so neither the order of lines nor other triples matter. Whether an entity is known in train does depend
on other triples: for every entity or relation that train lacks, the smallest held-out triple with it is moved to train.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.database import Scratch
from ingest.errors import IngestError
from ingest.options import SPLITS, IngestOptions

_HASH_SQL = "('0x' || substr(md5('{seed}' || chr(10) || raw.source || chr(10) || raw.relation || chr(10) || raw.target), 1, 16))"
Int32s = npt.NDArray[np.int32]


def place_of(source: str, relation: str, target: str, seed: int) -> float:
    """Give the place of a triple in [0, 1); the SQL below computes the same."""
    digest = hashlib.md5(f"{seed}\n{source}\n{relation}\n{target}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_sql(options: IngestOptions, unsplit: int) -> str:
    """Write the SQL that sends a raw row to its split: the one it was given for, or the one its hash says."""
    valid, test = options.fractions()
    text = f"md5('{options.seed}' || chr(10) || raw.source || chr(10) || raw.relation || chr(10) || raw.target)"
    # Hexadecimal digits compare like the numbers they stand for, so no number has to be formed.
    first_valid, first_train = _threshold(test), _threshold(test + valid)
    by_hash = f"CASE WHEN {text} < '{first_valid}' THEN 2 WHEN {text} < '{first_train}' THEN 1 ELSE 0 END"
    return f"CASE WHEN raw.split = {unsplit} THEN {by_hash} ELSE raw.split END"


def _threshold(fraction: float) -> str:
    return f"{round(fraction * 2**64):016x}"


@dataclass(frozen=True)
class Moved:
    """Triples moved back to train because train lacked one of their entities or their relation."""

    valid: int
    test: int


def move_back(scratch: Scratch, num_entities: int, num_relations: int) -> Moved:
    """Move the fewest that this rule finds of the held-out triples to train, until train knows all of valid and test."""
    known_entities, known_relations = np.zeros(num_entities, bool), np.zeros(num_relations, bool)
    for batch in scratch.stream("SELECT source, relation, target FROM triples WHERE split = 0"):
        source, relation, target = (column.to_numpy() for column in batch.columns)
        known_entities[source] = known_entities[target] = True
        known_relations[relation] = True
    rows: list[npt.NDArray[np.int32]] = []
    for batch in scratch.stream("SELECT source, relation, target, split::INTEGER FROM triples WHERE split > 0"):
        row = np.stack([column.to_numpy() for column in batch.columns], axis=1)
        lacking = ~(known_entities[row[:, 0]] & known_relations[row[:, 1]] & known_entities[row[:, 2]])
        rows.append(row[lacking])
    lacking_rows = np.concatenate(rows) if rows else np.empty((0, 4), np.int32)
    if not len(lacking_rows):
        return Moved(0, 0)
    moved = _choose(lacking_rows, known_entities, known_relations)
    table = pa.record_batch([moved[:, c] for c in range(3)], names=["source", "relation", "target"])
    scratch.connection.register("moved", table)
    scratch.run(
        "UPDATE triples SET split = 0 FROM moved WHERE triples.split > 0 AND triples.source = moved.source "
        "AND triples.relation = moved.relation AND triples.target = moved.target"
    )
    scratch.connection.unregister("moved")
    return Moved(valid=int((moved[:, 3] == 1).sum()), test=int((moved[:, 3] == 2).sum()))


def _choose(rows: Int32s, known_entities: npt.NDArray[np.bool_], known_relations: npt.NDArray[np.bool_]) -> Int32s:
    """Choose, for every entity and relation not known, the smallest of the rows [n, 4] that has it."""
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    chosen = []
    for columns, known in (((0, 2), known_entities), ((1,), known_relations)):
        ids = rows[:, columns].reshape(-1)
        unique, first = np.unique(ids, return_index=True)
        chosen.append(first[~known[unique]] // len(columns))
    return rows[np.unique(np.concatenate(chosen))]


def check_request(options: IngestOptions, sizes: dict[str, int], moved: Moved) -> list[str]:
    """Compare what was asked for with what came out: raise IngestError where a split asked for is empty, else warn."""
    total = sum(sizes.values())
    asked = {"valid": options.valid_fraction, "test": options.test_fraction}
    fractions = dict(zip(("valid", "test"), options.fractions(), strict=True))
    warnings = []
    for split in SPLITS[1:]:
        fraction, back = fractions[split], getattr(moved, split)
        if fraction == 0 or sizes[split] >= 0.5 * fraction * total > 0:
            continue
        why = (
            f"{back} of its triples were moved to train, which lacked their entities or relations"
            if back
            else "too few"
        )
        message = f"--{split}-fraction {fraction:g} of {total:,} triples came to {sizes[split]:,} ({why})"
        if asked[split] is not None and sizes[split] == 0:
            raise IngestError(f"{message}; nearest possible: --{split}-fraction 0, or give the {split} file yourself")
        warnings.append(message)
    return warnings
