"""Repair a hash split so that train knows every entity and relation of valid and test, and judge what came out.

For every entity or relation that train lacks, the smallest held-out triple with it (by ids, which are sorted labels) is
moved to train: the result depends on the set of triples alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.database import Scratch
from ingest.errors import IngestError
from ingest.nearest import MAX_TRIPLES, nearest_possible
from ingest.options import SPLITS, IngestOptions

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Moved:
    """Triples moved back to train because train lacked one of their entities or their relation."""

    valid: int
    test: int


def describe_split(options: IngestOptions, moved: Moved | None) -> dict[str, Any]:
    """Say for the manifest how the splits came about."""
    if moved is None:
        return {"how": "given"}
    valid, test = options.fractions()
    return {
        "how": "hash",
        "seed": options.seed,
        "valid_fraction": valid,
        "test_fraction": test,
        "moved_to_train": asdict(moved),
    }


def move_back(scratch: Scratch, num_entities: int, num_relations: int, fixed: str | None) -> Moved:
    """Move held-out triples to train until train knows all of them; the triples of table `fixed` stay put."""
    known_entities, known_relations = np.zeros(num_entities, bool), np.zeros(num_relations, bool)
    train = "SELECT source, relation, target FROM triples WHERE split = 0"
    if fixed:
        train += f" UNION ALL SELECT source, relation, target FROM {fixed} WHERE split = 0"
    for batch in scratch.stream(train):
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
    batch = pa.record_batch([moved[:, c] for c in range(3)], names=["source", "relation", "target"])
    scratch.connection.register("moved", batch)
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


def check_request(scratch: Scratch, options: IngestOptions, sizes: dict[str, int], moved: Moved) -> list[str]:
    """Compare what was asked for with what came out: raise IngestError where a split asked for is empty, else warn."""
    total = sum(sizes.values())
    asked = {"valid": options.valid_fraction, "test": options.test_fraction}
    fractions = dict(zip(("valid", "test"), options.fractions(), strict=True))
    messages, empty = [], []
    for split in SPLITS[1:]:
        if fractions[split] == 0 or sizes[split] >= 0.5 * fractions[split] * total:
            continue
        back = getattr(moved, split)
        why = f"; {back:,} went to train, which lacked their entities or relations" if back else ""
        messages.append(f"{split} has {sizes[split]:,} of {total:,} triples, asked for was {fractions[split]:g}{why}")
        if asked[split] and not sizes[split]:
            empty.append(split)
    if empty:
        nearest = nearest_possible(_labelled(scratch, total), options, empty)
        raise IngestError(f"{'; '.join(messages)}; nearest possible: {nearest}")
    return messages


def _labelled(scratch: Scratch, total: int) -> list[tuple[str, str, str]]:
    """Fetch the triples with labels, sorted, or more than can be tried out."""
    if total > MAX_TRIPLES:
        return [("", "", "")] * total
    rows = scratch.connection.execute(
        "SELECT DISTINCT s.label, r.label, t.label, source, relation, target FROM triples x "
        "JOIN entities s ON s.id = x.source JOIN relations r ON r.id = x.relation JOIN entities t ON t.id = x.target "
        "ORDER BY source, relation, target"
    ).fetchall()
    return [row[:3] for row in rows]
